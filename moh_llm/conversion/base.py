"""The checkpoint to convert: found, checked, and identified before anything is computed."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from moh_llm.conversion.families import base_config, check_family, check_window
from moh_llm.errors import UserError
from moh_llm.modeling import is_routing_weight
from moh_llm.reading import expand_home
from moh_llm.records.conversion import Base
from moh_llm.records.model import (
    LICENCE_NAMES,
    check_tensors,
    fingerprint,
    hash_weights,
    may_be_hub_id,
    read_config,
    read_weight_map,
)

# Without these a config would silently describe a model of another size.
_NEEDED = ("num_attention_heads", "num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size")


@dataclass(frozen=True)
class BaseCheckpoint:
    """A dense checkpoint on disk, or the dense part of a MoH one.

    Attributes:
        name: path or Hub id as the user gave it.
        folder: where its files lie.
        revision: commit hash on the Hub; None for a local folder.
        is_moh: whether it is a MoH model already.
        config: the dense model's config.
        shards: the safetensors files that hold dense tensors, in order.
        weight_map: dense tensor's name -> shard's file name.
        routing_tensors: names of the tensors that a MoH model has beside these.
        fingerprint: `moh_llm.records.model.fingerprint` of its shards.
    """

    name: str
    folder: Path
    revision: str | None
    is_moh: bool
    config: PreTrainedConfig
    shards: list[Path]
    weight_map: dict[str, str]
    routing_tensors: frozenset[str]
    fingerprint: str

    def identity(self) -> dict[str, Any]:
        """What a record needs to tell this base from any other."""
        return {"name": self.name, "revision": self.revision, "fingerprint": self.fingerprint}


def open_base(name: str, revision: str | None = None, paper_preset: bool = False) -> BaseCheckpoint:
    """Find a base by local folder or Hub id and check that it can be converted.

    Raises:
        UserError: no such folder or model; no safetensors weights; a truncated or missing shard; a
            tensor that the architecture needs is missing or has another shape; an architecture that
            cannot be converted; quantised weights.
    """
    folder, commit = _locate(name, revision)
    fields = read_config(folder)
    check_family(fields, name, paper_preset)
    if absent := [key for key in _NEEDED if not isinstance(fields.get(key), int)]:
        raise UserError(f"{name}: its config.json gives no number for {', '.join(absent)}")
    config = _dense_config(fields, name)
    check_window(config, name)
    shards, weight_map = read_weight_map(folder)
    routing = frozenset(filter(is_routing_weight, weight_map))
    weight_map = {tensor: file for tensor, file in weight_map.items() if tensor not in routing}
    shards = [shard for shard in shards if shard.name in set(weight_map.values())]
    check_tensors(name, shards, config)
    is_moh = fields["model_type"] == "moh_llama"
    return BaseCheckpoint(name, folder, commit, is_moh, config, shards, weight_map, routing, fingerprint(shards))


def is_checkpoint(found: BaseCheckpoint, recorded: Base) -> bool:
    """Whether ``found`` is the checkpoint of a conversion's record.

    The fingerprint is of files. Where these are laid out differently, all weights are read and hashed.
    """
    if recorded.fingerprint == found.fingerprint:
        return True
    return recorded.dense_sha256 == hash_weights(found.folder, found.weight_map).dense


def _locate(name: str, revision: str | None) -> tuple[Path, str | None]:
    folder = expand_home(name)
    if folder.is_dir():
        return folder, None
    if folder.exists():
        raise UserError(f"{name} is a file; name the folder that holds config.json and the weights")
    if not may_be_hub_id(name):
        raise UserError(f"folder {name} does not exist; name a LLaMA's folder or a Hub id such as owner/name")

    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        # README.md is not converted: it says under which licence the base is, and in which languages.
        patterns = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "README.md"]
        patterns += [f"{name}*" for name in LICENCE_NAMES]
        path = Path(snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns="original/*"))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"{name} is neither a folder here nor a model that the Hub gives ({reason})") from error
    return path, path.name  # a snapshot's folder is named by its commit


def _dense_config(fields: dict[str, Any], name: str) -> PreTrainedConfig:
    from huggingface_hub.errors import StrictDataclassError

    try:
        return base_config(fields)
    except (ValueError, TypeError, KeyError, StrictDataclassError) as error:
        raise UserError(f"{name}: its config.json makes no model ({' '.join(str(error).split())})") from error
