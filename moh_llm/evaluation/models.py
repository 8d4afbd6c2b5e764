"""Looking at a model before it is loaded: is it there, is it whole, what is it."""

from pathlib import Path
from typing import Any

from moh_llm.errors import UserError
from moh_llm.files import read_json
from moh_llm.model_folder import may_be_hub_id, read_weight_map

# Records that the other commands leave beside the weights.
RECORDS = ("conversion.json", "run.json")

# The part of a MoH config that a reader of the report wants to see.
_HEADS = (
    "num_attention_heads",
    "num_shared_heads",
    "num_active_heads",
    "shared_heads",
    "router_type",
    "router_score",
    "head_stand_in",
)
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def check_model(model: str) -> None:
    """Raise UserError unless ``model`` can be loaded: a folder with config, tokenizer and whole weights, or a Hub id.

    Reads headers only. A Hub id is looked up by its config.
    """
    folder = Path(model)
    if folder.is_dir():
        _check_folder(folder)
        return
    if folder.exists():
        raise UserError(f"{model} is a file; name the model's folder")
    if not may_be_hub_id(model):
        raise UserError(f"{model} does not exist; name a model's folder or a Hub id such as owner/name")
    from transformers import AutoConfig

    register_moh()
    try:
        AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"{model} is neither a folder here nor a model on the Hub ({reason})") from error


def register_moh() -> None:
    """Make transformers' Auto classes know MoH models, so that no remote code is run to load one."""
    import moh_llm.modeling  # noqa: F401


def describe_model(model: str) -> dict[str, Any]:
    """What the report says about a model: path or id, architecture, heads, and the records beside its weights."""
    folder = Path(model)
    about: dict[str, Any] = {"model": model}
    if not (folder / "config.json").is_file():
        return about
    config = read_json(folder / "config.json")
    about["model_type"] = config.get("model_type")
    if config.get("model_type") == "moh_llama":
        about["heads"] = {key: config[key] for key in _HEADS if key in config}
    about["records"] = [str(folder / name) for name in RECORDS if (folder / name).is_file()]
    return about


def _check_folder(folder: Path) -> None:
    config = read_json(folder / "config.json")
    if not isinstance(config, dict) or "model_type" not in config:
        raise UserError(f"{folder / 'config.json'} names no model_type; is this a model's folder?")
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        raise UserError(
            f"{folder} has no tokenizer (none of {', '.join(_TOKENIZERS)}); save the base's beside the model"
        )
    read_weight_map(folder)
