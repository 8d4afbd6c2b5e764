"""Models to train from scratch: an architecture file and a tokenizer make a folder of random weights."""

import difflib
import math
from dataclasses import dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, is_typeddict

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import PreTrainedConfig, PreTrainedTokenizerBase
from transformers.activations import ACT2FN

from moh_llm.data.tokenizer import TextTokenizer, open_tokenizer
from moh_llm.errors import UserError
from moh_llm.files import check_output_folder, new_folder
from moh_llm.locking import lock_folder
from moh_llm.modeling import MoHLlamaConfig, MoHLlamaForCausalLM
from moh_llm.reading import read_yaml
from moh_llm.records.identity import hash_model
from moh_llm.records.model import may_be_hub_id
from moh_llm.records.seal import write_seal
from moh_llm.records.tensors import is_routing_weight

# Without these a file would silently describe a model of another size.
NEEDED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_POSITIVE = (*NEEDED, "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "initializer_range")


@dataclass(frozen=True)
class InitialModel:
    """A model that was initialised: its config, and how many weights it has in all, in embeddings, in routers.

    Embeddings are those of the input and, where it is not the same matrix, the output.
    """

    config: MoHLlamaConfig
    total: int
    embedding: int
    routing: int


def architecture_keys() -> dict[str, Any]:
    """The keys of an architecture file with their types: the fields of `MoHLlamaConfig` that define the network."""
    general = {field.name for field in fields(PreTrainedConfig)} | set(_TOKEN_IDS)
    return {field.name: field.type for field in fields(MoHLlamaConfig) if field.name not in general}


def read_architecture(path: Path) -> MoHLlamaConfig:
    """The config that an architecture file describes, still without a tokenizer's ids.

    Raises:
        UserError: the file cannot be read, a key is unknown (the nearest known one is named) or
            missing, or the values make no model.
    """
    known, values = architecture_keys(), _read_yaml(path)
    for name, value in values.items():
        if name in _TOKEN_IDS:
            raise UserError(f"{path}: {name} is taken from the tokenizer; remove it")
        if name not in known:
            nearest = difflib.get_close_matches(str(name), known, n=1, cutoff=0.0)[0]
            raise UserError(f"{path}: unknown key {name!r}; the nearest known key is {nearest!r}")
        if not _fits(value, known[name]):
            raise UserError(f"{path}: {name}={value!r} must be {_in_words(known[name])}")
    if absent := [name for name in NEEDED if name not in values]:
        raise UserError(f"{path} lacks {', '.join(absent)}; give each a number")
    _check_values(path, values)
    values = {name: float(value) if known[name] is float else value for name, value in values.items()}
    try:
        config = MoHLlamaConfig(**values, **dict.fromkeys(_TOKEN_IDS))
        config.validate()
        with torch.device("meta"):
            MoHLlamaForCausalLM(config)
    except (ValueError, TypeError, KeyError, StrictDataclassError) as error:
        reason = " ".join(str(error).split()).rsplit("Error: ", 1)[-1]
        raise UserError(f"{path} makes no model: {reason}") from error
    return config


def initialise(
    architecture: Path, tokenizer: str, output: Path, seed: int, dtype: torch.dtype, overwrite: bool
) -> InitialModel:
    """Write a model of random weights as a folder that training starts from.

    Weights are drawn in float32 on the CPU, by `seed` alone, and then cast.

    Args:
        architecture: YAML file of `architecture_keys`.
        tokenizer: folder or Hub id; its ids of special tokens become the model's.
        output: folder to make; it appears when all of it is there.
        seed: of the weights.
        dtype: of the stored weights.
        overwrite: replace ``output`` if it is not empty.

    Raises:
        UserError: an input cannot be used, ``output`` is in the way, or the disk refuses.
    """
    check_output_folder(output, overwrite, [architecture, tokenizer])
    config = read_architecture(architecture)
    loaded = _open_tokenizer(tokenizer)
    ids = TextTokenizer.from_tokenizer(loaded).vocab_size
    if config.vocab_size < ids:
        raise UserError(
            f"{architecture}: vocab_size={config.vocab_size} is less than the {ids} ids of tokenizer {tokenizer}; "
            "raise it or name a smaller tokenizer"
        )
    config.bos_token_id, config.eos_token_id = loaded.bos_token_id, loaded.eos_token_id
    # The embedding of a padding token is never trained, so one with another use must not count as padding.
    if loaded.pad_token_id not in (loaded.bos_token_id, loaded.eos_token_id):
        config.pad_token_id = loaded.pad_token_id

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = MoHLlamaForCausalLM(config).to(dtype)
    with lock_folder(output), new_folder(output, overwrite) as temporary:
        try:
            model.save_pretrained(temporary)
        except SafetensorError as error:  # how the library reports a full disk
            raise UserError(f"cannot write {output} ({error}); free some space or name another place") from error
        loaded.save_pretrained(temporary)
        write_seal(temporary, hash_model(temporary))
    counts = {name: weight.numel() for name, weight in model.named_parameters()}
    return InitialModel(
        config,
        total=sum(counts.values()),
        embedding=sum(n for name, n in counts.items() if "embed_tokens" in name or "lm_head" in name),
        routing=sum(n for name, n in counts.items() if is_routing_weight(name)),
    )


def _read_yaml(path: Path) -> dict[Any, Any]:
    if not path.exists():
        raise UserError(f"architecture {path} does not exist; recipes/architectures has some")
    try:
        content = read_yaml(path)
    except UserError as error:
        raise UserError(f"architecture {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"architecture {path} must hold `key: value` lines")
    return content


def _check_values(path: Path, values: dict[str, Any]) -> None:
    """Raise UserError for values that transformers accepts but that give no working model."""
    for name in _POSITIVE:
        if (value := values.get(name)) is not None and not 0 < value < math.inf:
            raise UserError(f"{path}: {name}={value} must be above 0")
    heads = values["num_attention_heads"]
    if heads % (groups := values.get("num_key_value_heads") or heads):
        raise UserError(f"{path}: num_attention_heads={heads} must be a multiple of num_key_value_heads={groups}")
    if (size := values.get("head_dim") or values["hidden_size"] // heads) % 2:
        raise UserError(f"{path}: head_dim={size} must be even: rotary embedding turns pairs")
    if not 0 <= (beta := values.get("head_balance_coef", 0)) < math.inf:
        raise UserError(f"{path}: head_balance_coef={beta} must not be negative")
    if (act := values.get("hidden_act", "silu")) not in ACT2FN:
        raise UserError(f"{path}: hidden_act={act} is no activation of transformers; LLaMA's is silu")


def _open_tokenizer(name: str) -> PreTrainedTokenizerBase:
    if not Path(name).is_dir() and (Path(name).exists() or not may_be_hub_id(name)):
        raise UserError(f"--tokenizer {name} is not a folder; name one that holds a tokenizer, or a Hub id")
    return open_tokenizer(name)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a YAML value is of an annotation's type; a whole number is a number, and true is neither."""
    if get_origin(hint) is list:
        return isinstance(value, list) and all(_fits(entry, get_args(hint)[0]) for entry in value)
    if get_args(hint):
        return any(_fits(value, one) for one in get_args(hint))
    if hint in (int, float):
        return isinstance(value, (int, hint)) and not isinstance(value, bool)
    return isinstance(value, dict if is_typeddict(hint) else hint)


def _in_words(hint: Any) -> str:
    if get_origin(hint) is list:
        return f"a list (each entry {_in_words(get_args(hint)[0])})"
    if get_args(hint):
        return " or ".join(dict.fromkeys(map(_in_words, get_args(hint))))
    words = {int: "a whole number", float: "a number", str: "text", bool: "true or false", NoneType: "null"}
    return words.get(hint, "a map")
