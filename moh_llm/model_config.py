"""Whether the numbers of a model's `config.json` can be a model's, told before anything is computed from them.

The bounds are far above the largest published models; beyond them a number is a slip or an attack, and what is built
from it would fail late, or never end.
"""

import math
from pathlib import Path
from typing import Any

from moh_llm.errors import UserError
from moh_llm.reading import read_json

CONFIG = "config.json"
# Field: smallest and largest whole number.
COUNTS = {
    "num_hidden_layers": (1, 2000),
    "num_attention_heads": (1, 4096),
    "num_key_value_heads": (1, 4096),
    "hidden_size": (1, 1 << 20),
    "intermediate_size": (1, 1 << 22),
    "head_dim": (1, 1 << 14),
    "vocab_size": (1, 1 << 24),
    "max_position_embeddings": (1, 1 << 40),
    "moh_format": (1, 1 << 20),
}
_ABOVE_0 = ("rms_norm_eps", "rope_theta", "factor")
DTYPES = ("float32", "float16", "bfloat16", "float64")


def read_config(folder: Path) -> dict[str, Any]:
    """A model folder's `config.json`, checked by `check_numbers`. Raises UserError where it is none."""
    fields = read_json(folder / CONFIG)
    if not isinstance(fields, dict):
        raise UserError(f"{folder / CONFIG} is not an object; is {folder} a model's folder?")
    check_numbers(fields, str(folder / CONFIG))
    return fields


def check_numbers(fields: dict[str, Any], where: str) -> None:
    """Raise UserError, which names ``where`` and the field, for a number that no model can have.

    Fields that are absent or null are passed over: which ones a family needs is asked elsewhere.
    """
    for name, (low, high) in COUNTS.items():
        value = fields.get(name)
        if value is not None and (type(value) is not int or not low <= value <= high):
            raise UserError(f"{where}: {name}={_show(value)} must be a whole number from {low} to {high:,}")
    for place in (fields, *(fields.get(name) for name in ("rope_parameters", "rope_scaling"))):
        if isinstance(place, dict):
            _check_above_0(place, where)
    heads, groups = fields.get("num_attention_heads"), fields.get("num_key_value_heads")
    if heads and groups and heads % groups:
        raise UserError(f"{where}: num_attention_heads={heads} must be a multiple of num_key_value_heads={groups}")
    hidden = fields.get("hidden_size")
    if heads and hidden and fields.get("head_dim") is None and hidden % heads:
        raise UserError(f"{where}: hidden_size={hidden} must be a multiple of num_attention_heads={heads}")
    for name in ("dtype", "torch_dtype"):
        if (value := fields.get(name)) is not None and value not in DTYPES:
            raise UserError(f"{where}: {name}={_show(value)} must be one of {', '.join(DTYPES)}")
    _check_tokens(fields, where)


def _check_above_0(place: dict[str, Any], where: str) -> None:
    for name in _ABOVE_0:
        value = place.get(name)
        if value is None:
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 < value < 1e30 or math.isnan(value):
            raise UserError(f"{where}: {name}={_show(value)} must be a finite number above 0")


def _check_tokens(fields: dict[str, Any], where: str) -> None:
    vocabulary = fields.get("vocab_size")
    padding = fields.get("pad_token_id")
    if vocabulary is None or padding is None:
        return
    # -1, the last row, is what early LLaMA checkpoints say for "none".
    if type(padding) is not int or not -1 <= padding < vocabulary:
        raise UserError(f"{where}: pad_token_id={_show(padding)} must be below vocab_size={vocabulary}, or null")


def _show(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 40 else f"{shown[:37]}..."
