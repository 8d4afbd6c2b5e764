"""Models before they are loaded: labels, checks, and what a report says about them."""

from collections.abc import Sequence
from dataclasses import fields as fields_of
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moh_llm.errors import UserError, reason
from moh_llm.modeling.head_plan_moh import HeadPlan
from moh_llm.reading import read_json
from moh_llm.records.conversion import read_conversion
from moh_llm.records.identity import FolderRecords
from moh_llm.records.model import CONFIG, TOKENIZERS, check_place, making_model, read_config, read_weight_map
from moh_llm.records.seal import read_seal

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from moh_llm.modeling import MoHLlamaForCausalLM

# Records that other commands write beside the weights.
RECORDS = ("conversion.json", "lineage.json", "run.json")

# Fields of a MoH config that a report shows.
_HIDDEN = {"never_on_heads", "head_balance_coef", "output_router_logits", "moh_format"}
_HEADS = ("num_attention_heads", *(field.name for field in fields_of(HeadPlan) if field.name not in _HIDDEN))


def label_models(models: Sequence[str], base: str | None) -> dict[str, str]:
    """Labels of the models of a report, base first: "base", and "model" for a single one.

    Several models are labelled by their folders' names, with as much of the path as sets them apart. Raises UserError
    for a model that is given twice.
    """
    labels = {} if base is None else {"base": base}
    if len(models) == 1:
        return {**labels, "model": models[0]}
    paths = [Path(model).resolve().parts[1:] if Path(model).is_dir() else tuple(model.split("/")) for model in models]
    for number, (parts, model) in enumerate(zip(paths, models, strict=True)):
        if parts in paths[:number]:
            raise UserError(f"model {model} is given twice")
        for length in range(1, len(parts) + 1):
            label = "-".join(parts[-length:])
            alone = ["-".join(other[-length:]) for other in paths].count(label) == 1
            if alone and label not in ("base", "model", *labels):
                break
        labels[label] = model
    return labels


def check_model(model: str) -> None:
    """Raise UserError unless ``model`` can be loaded: a folder with config, tokenizer and whole weights, or a Hub id.

    Reads headers only. A Hub id is looked up by its config.
    """
    folder = Path(model)
    if folder.is_dir():
        if "model_type" not in read_config(folder):
            raise UserError(f"{folder / CONFIG} names no model_type; is this a model's folder?")
        if not any((folder / name).is_file() for name in TOKENIZERS):
            names = ", ".join(TOKENIZERS)
            raise UserError(f"{folder} has no tokenizer (none of {names}); save the base's beside the model")
        _check_weights(folder)
        if read_seal(folder) is None:
            read_conversion(folder)  # a malformed one is reported before hours of scoring
        return
    check_place(model)
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(model, trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"{model} is neither a folder here nor a model on the Hub ({reason})") from error


def _check_weights(folder: Path) -> None:
    """Raise UserError if a LLaMA's folder lacks weights, which transformers would draw at random; headers only."""
    from transformers import AutoConfig

    from moh_llm.conversion.base import FAMILIES
    from moh_llm.records.tensors import check_tensors

    weight_map, fields = read_weight_map(folder)[1], read_config(folder)
    if fields["model_type"] not in (*FAMILIES, "moh_llama") or fields.get("quantization_config"):
        return
    with making_model(folder):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    check_tensors(str(folder), folder, weight_map, config)


def has_heads_off(model: str) -> bool:
    """Whether some head of a model is off for some token."""
    from transformers import AutoConfig

    from moh_llm.modeling import MoHLlamaConfig

    config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    return isinstance(config, MoHLlamaConfig) and min(config.active_heads_per_layer) < config.num_attention_heads


def load_moh(
    model: str, dtype: "str | torch.dtype", device: "str | torch.device"
) -> tuple["MoHLlamaForCausalLM", "PreTrainedTokenizerBase"]:
    """An MoH model, in evaluation mode, and its tokenizer. Raises UserError where they cannot be loaded."""
    from transformers import AutoTokenizer

    from moh_llm.modeling import MoHLlamaForCausalLM

    try:
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
        network = MoHLlamaForCausalLM.from_pretrained(model, dtype=dtype, use_safetensors=True, return_dict=True)
    except (OSError, ValueError, ImportError) as error:
        raise UserError(f"{model} cannot be loaded: {reason(error)}") from error
    return network.to(device), tokenizer


def describe_model(model: str, records: FolderRecords | None) -> dict[str, Any]:
    """Fields of a `ModelRecord` from a model's folder: its type, heads, and what its records say.

    Of a model on the Hub nothing is known. From records that are not of the model beside them nothing is taken.
    """
    folder = Path(model)
    about: dict[str, Any] = {"model": model}
    if records is None:
        return about
    config = read_json(folder / "config.json")
    about["model_type"] = config.get("model_type")
    if config.get("model_type") == "moh_llama":
        about["heads"] = {key: config[key] for key in _HEADS if key in config}
    if records.changed:
        return about | {"changed": records.changed}
    # Training leaves its record beside the tuned model's folder, not in it.
    places = [folder / name for name in RECORDS] + ([folder.parent / "run.json"] if folder.name == "model" else [])
    return about | {"records": [str(place) for place in places if place.is_file()]}


def other_base(records: FolderRecords | None, base: str, revision: str | None) -> str | None:
    """The base that a model's conversion names, if it is not ``base``, a folder or a Hub id at ``revision``."""
    conversion = records and records.conversion
    if conversion is None:
        return None
    recorded = conversion.base
    from moh_llm.conversion.base import open_base

    if not Path(base).is_dir():
        same = (recorded.name, recorded.revision) == (base, revision)
    else:
        try:
            found = open_base(base)
            same = not found.is_moh and found.dense_sha256 == recorded.dense_sha256
        except UserError:  # no model that can be converted
            same = False
    return None if same else recorded.label
