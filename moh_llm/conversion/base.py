"""The checkpoint to convert: found, checked, and identified before anything is computed."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moh_llm.errors import UserError
from moh_llm.files import read_json, sha256
from moh_llm.model_folder import INDEX_NAME, may_be_hub_id, read_weight_map

# Without these a config would silently describe a LLaMA of another size.
_NEEDED = ("num_attention_heads", "num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size")


@dataclass(frozen=True)
class BaseCheckpoint:
    """A LLaMA checkpoint on disk.

    Attributes:
        name: path or Hub id as the user gave it.
        folder: where its files lie.
        revision: commit hash on the Hub; None for a local folder.
        config: its config.json.
        shards: its safetensors files, in order.
        weight_map: tensor name -> shard's file name.
        weights_sha256: hash of the weights index, or of the weights where one file holds all.
    """

    name: str
    folder: Path
    revision: str | None
    config: dict[str, Any]
    shards: list[Path]
    weight_map: dict[str, str]
    weights_sha256: str

    def identity(self) -> dict[str, Any]:
        """What a record needs to tell this base from any other."""
        return {"name": self.name, "revision": self.revision, "weights_sha256": self.weights_sha256}


def open_base(name: str, revision: str | None = None) -> BaseCheckpoint:
    """Find a base by local folder or Hub id and check that it can be converted.

    Raises:
        UserError: no such folder or model; no safetensors weights; a truncated or missing shard; a
            tensor that LLaMA needs is missing or has another shape; an architecture other than LLaMA;
            quantised weights.
    """
    folder, commit = _locate(name, revision)
    config = read_json(folder / "config.json")
    _check_architecture(config, name)
    shards, weight_map = read_weight_map(folder)
    _check_tensors(config, shards, name)
    index = folder / INDEX_NAME
    return BaseCheckpoint(
        name=name,
        folder=folder,
        revision=commit,
        config=config,
        shards=shards,
        weight_map=weight_map,
        weights_sha256=sha256(index if index.exists() else shards[0]),
    )


def _locate(name: str, revision: str | None) -> tuple[Path, str | None]:
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder, None
    if folder.exists():
        raise UserError(f"{name} is a file; name the folder that holds config.json and the weights")
    if not may_be_hub_id(name):
        raise UserError(f"folder {name} does not exist; name a LLaMA's folder or a Hub id such as owner/name")

    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        patterns = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "LICENSE*", "NOTICE*", "USE_POLICY*"]
        path = Path(snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns="original/*"))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"{name} is neither a folder here nor a model that the Hub gives ({reason})") from error
    return path, path.name  # a snapshot's folder is named by its commit


def _check_architecture(config: dict[str, Any], name: str) -> None:
    kind = config.get("model_type") if isinstance(config, dict) else None
    if kind == "llama" and (absent := [key for key in _NEEDED if not isinstance(config.get(key), int)]):
        raise UserError(f"{name}: its config.json gives no number for {', '.join(absent)}")
    if kind != "llama":
        named = config.get("architectures") if isinstance(config, dict) else None
        architecture = ", ".join(named or ["no architecture named"])
        raise UserError(f"{name}: model_type {kind!r} ({architecture}) cannot be converted; only 'llama' models can")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown method")
        raise UserError(f"{name}: its weights are quantised ({method}); convert the full-precision checkpoint")


def _check_tensors(config: dict[str, Any], shards: list[Path], name: str) -> None:
    """Every tensor that LLaMA needs must be there, in the config's shape.

    transformers would fill a gap with random numbers, and stop at a wrong shape with a traceback.
    """
    import torch
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import safe_open
    from transformers import LlamaConfig, LlamaForCausalLM

    try:
        with torch.device("meta"):
            model = LlamaForCausalLM(LlamaConfig(**config))
    except (ValueError, TypeError, KeyError, StrictDataclassError) as error:
        raise UserError(f"{name}: its config.json makes no LLaMA model ({' '.join(str(error).split())})") from error
    needed = {tensor: list(value.shape) for tensor, value in model.state_dict().items()}
    if config.get("tie_word_embeddings"):
        needed.pop("lm_head.weight", None)
    for shard in shards:
        with safe_open(shard, framework="np") as file:
            for tensor in file.keys():  # noqa: SIM118 (not a dict)
                shape = file.get_slice(tensor).get_shape()
                if needed.pop(tensor, shape) != shape:
                    raise UserError(
                        f"{name}: {tensor} in {shard.name} has shape {shape}, which config.json contradicts"
                    )
    if missing := sorted(needed):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(f"{name}: the weights lack {missing[0]}{more}; is it a LLaMA causal language model?")
