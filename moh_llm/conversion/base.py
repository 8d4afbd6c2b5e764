"""The checkpoint to convert is found, checked and identified before anything is computed.

All families have LLaMA's layer with small differences, which are fields of `MoHLlamaConfig`.
"""

from dataclasses import dataclass
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils.hub import CHAT_TEMPLATE_DIR

from moh_llm.errors import UserError
from moh_llm.files import check_links
from moh_llm.modeling.head_plan_moh import FORMAT, HeadPlan
from moh_llm.reading import expand_home, read_json
from moh_llm.records.conversion import Base
from moh_llm.records.identity import hash_weights
from moh_llm.records.model import (
    DESCRIPTION,
    LICENCE_NAMES,
    check_place,
    is_image_model,
    making_model,
    read_config,
    read_weight_map,
)
from moh_llm.records.tensors import check_tensors, is_routing_weight, matrix_dtype

# model_type -> fields that the architecture implies without naming them in config.json.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {"attention_bias": True, "attention_output_bias": False},
    "qwen3": {"query_key_norm": True},
    "mixtral": {},
}
# `MoHLlamaConfig`'s names for experts -> Mixtral's.
_EXPERTS = {
    "num_local_experts": "num_local_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "expert_balance_coef": "router_aux_loss_coef",
    "router_jitter_noise": "router_jitter_noise",
}
# Fields of the MoH layer. They are dropped when a MoH model is converted again.
MOH_FIELDS = {field.name for field in fields_of(HeadPlan)} | {"local_window", "local_sinks", "local_start"}
MOH_FIELDS |= {"local_heads", "keys_budget"}  # never_on_heads up to format 5; what training adds
# Settings of a session, not of a model; some configs were saved with them.
_SESSION = {"return_dict", "output_attentions", "output_hidden_states", "attn_implementation", "_attn_implementation"}
# LLaMA's settings that other families ignore, even if config.json names them.
_ONLY_LLAMA = {
    "mistral": {"attention_bias", "mlp_bias"},
    "qwen2": {"attention_bias", "mlp_bias"},
    "qwen3": {"mlp_bias"},
    "mixtral": {"attention_bias", "mlp_bias"},
}
FORGOTTEN = {"model_type", "architectures", "auto_map", "transformers_version", "dtype", "torch_dtype"}
# A config without these would silently describe a model of another size.
_NEEDED = ("num_attention_heads", "num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size")


@dataclass(frozen=True)
class BaseCheckpoint:
    """A dense checkpoint on disk, or the dense part of a MoH one.

    Attributes:
        name: path or Hub id as the user gave it, without a revision.
        folder: local folder of its files.
        revision: commit hash on the Hub; None for a local folder.
        is_moh: whether the checkpoint is a MoH model.
        config: the dense model's config.
        weight_map: name of a dense tensor -> file name of its shard.
        note: a warning about tensors that the architecture does not have; they are not converted.
    """

    name: str
    folder: Path
    revision: str | None
    is_moh: bool
    config: PreTrainedConfig
    weight_map: dict[str, str]
    note: str | None = None

    @property
    def shards(self) -> list[Path]:
        """Safetensors files with dense tensors, in order."""
        return [self.folder / name for name in sorted(set(self.weight_map.values()))]

    @property
    def dtype(self) -> torch.dtype:
        """The narrowest dtype that rounds no weight matrix."""
        return matrix_dtype(self.folder, self.weight_map) or torch.float32

    @property
    def dense_sha256(self) -> str:
        """`moh_llm.records.seal.WeightHashes.dense`; all weights are read, about a second per GB."""
        return hash_weights(self.folder, self.weight_map).dense

    def identity(self) -> Base:
        """The base's identity in records."""
        return Base(name=self.name, revision=self.revision, dense_sha256=self.dense_sha256)


def open_base(name: str, revision: str | None = None, paper_preset: bool = False) -> BaseCheckpoint:
    """Find a base (a local folder, Hub id, or Hub id@revision) and check that it can be converted.

    With ``paper_preset`` configs with remote code are accepted.

    Raises:
        UserError: no such folder or model; missing, truncated, quantised or unexpected weights; an architecture that
            cannot be converted; an adapter; a file is a link that leads out of its folder.
    """
    folder, commit = locate(name, revision)
    name = name if commit is None else name.partition("@")[0]
    check_links(folder, [folder / "config.json", *accompanying(folder)])
    fields = read_config(folder)
    _check_family(fields, name, paper_preset)
    config = _dense_config(fields, name)
    shards, weight_map = read_weight_map(folder)
    check_links(folder, shards)
    dense = {tensor: file for tensor, file in weight_map.items() if not is_routing_weight(tensor)}
    tensors = check_tensors(name, folder, dense, config)
    config.tie_word_embeddings = tensors.tied
    is_moh = fields["model_type"] == "moh_llama"
    return BaseCheckpoint(name, folder, commit, is_moh, config, tensors.weight_map, tensors.note)


def holds_image_model(name: str) -> bool:
    """Whether a folder or Hub id is of a model of images; False for what is no model. Of the Hub its config is read."""
    path, (hub_id, _, revision) = Path(expand_home(name), "config.json"), name.partition("@")
    try:
        if not path.parent.is_dir():
            check_place(hub_id)
            from huggingface_hub import hf_hub_download

            path = Path(hf_hub_download(hub_id, "config.json", revision=revision or None))
        return path.is_file() and is_image_model(read_json(path))
    except (UserError, OSError, ValueError, AttributeError):  # the Hub's errors are of OSError and ValueError
        return False


def accompanying(folder: Path) -> list[Path]:
    """Files of a checkpoint other than its weights that are read or copied."""
    return sorted(folder.glob(f"{CHAT_TEMPLATE_DIR}/*.jinja")) + sorted(
        file
        for file in folder.iterdir()
        if file.is_file() and (file.name in DESCRIPTION or file.name.startswith((*LICENCE_NAMES, "README.md")))
    )


def locate(name: str, revision: str | None = None) -> tuple[Path, str | None]:
    """The folder of a model, and its commit on the Hub. Raises UserError where there is none."""
    folder = Path(expand_home(name))
    if folder.is_dir():
        return folder, None
    hub_id, at, named = name.partition("@")
    if at and named and "://" not in name and not folder.exists():  # an address may have a password
        name, revision = hub_id, named
    check_place(name)

    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        # README.md names the base's licence and languages.
        patterns = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "README.md"]
        patterns += [f"{name}*" for name in LICENCE_NAMES]
        path = Path(snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns="original/*"))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"{name} is neither a folder here nor a model that the Hub gives ({reason})") from error
    return path, path.name  # a snapshot's folder is named by its commit


def _check_family(config: dict[str, Any], name: str, paper_preset: bool) -> None:
    """Raise UserError unless a base with this config.json can be converted."""
    kind = config.get("model_type")
    if kind not in (*FAMILIES, "moh_llama"):
        raise UserError(f"{name}: model_type {kind!r} cannot be converted; these can: {', '.join(FAMILIES)}")
    if kind == "moh_llama" and config.get("moh_format", 1) > FORMAT:
        raise UserError(f"{name}: moh_format={config['moh_format']} is newer than moh-llm reads ({FORMAT}); update it")
    if config.get("quantization_config"):
        raise UserError(f"{name}: its weights are quantised; convert the full-precision checkpoint")
    if kind == "llama" and config.get("auto_map") and not paper_preset:
        raise UserError(
            f"{name}: auto_map names code of its own, so it may not be a plain LLaMA; "
            "pass --preset paper if it is the paper authors' MoH model, else remove auto_map from its config.json"
        )
    if absent := [key for key in _NEEDED if not isinstance(config.get(key), int)]:
        raise UserError(f"{name}: its config.json gives no number for {', '.join(absent)}")


def _dense_config(fields: dict[str, Any], name: str) -> PreTrainedConfig:
    """The dense model's config from the fields of a dense or MoH config.json.

    Raises:
        UserError: the fields make no model, or attention that MoH layers do not support.
    """
    kind = fields["model_type"]
    if kind == "moh_llama":
        implied = {family: marks for family, marks in FAMILIES.items() if marks}
        kind = next((family for family, marks in implied.items() if marks.items() <= fields.items()), "llama")
        if fields.get("num_local_experts"):
            kind = "mixtral"
            fields = fields | {name: fields[own] for own, name in _EXPERTS.items() if own in fields}
    # What the architecture implies is no argument of its config.
    marks = {key for implied in FAMILIES.values() for key in implied if key != "attention_bias"}
    foreign = _ONLY_LLAMA.get(kind, set())
    own = [key for key in sorted(foreign - FAMILIES[kind].keys()) if fields.get(key)]
    if own and fields["model_type"] == "moh_llama":
        raise UserError(f"{name}: there is no dense model inside: a {kind} has no {own[0]}")
    dropped = {"model_type", "architectures", "auto_map"} | MOH_FIELDS | _SESSION | foreign | marks
    dropped |= {"expert_balance_coef"} if kind == "mixtral" else set(_EXPERTS)
    with making_model(name):
        config = CONFIG_MAPPING[kind](**{key: value for key, value in fields.items() if key not in dropped})
    _check_attention(config, kind, name)
    return config


def _check_attention(config: PreTrainedConfig, kind: str, name: str) -> None:
    """Raise UserError unless all layers are alike and attend to all earlier tokens and no later one."""
    window = getattr(config, "sliding_window", None)
    others = set(getattr(config, "layer_types", None) or []) - {"full_attention"}
    # transformers reads some of these fields in code that all models share, so any config may have them.
    slides = kind in ("mistral", "mixtral") or getattr(config, "use_sliding_window", False)
    faults = {
        "is_causal=False": not getattr(config, "is_causal", True),
        "per_layer_config": getattr(config, "is_heterogeneous", False) or vars(config).get("per_layer_config"),
        f"sliding_window={window}": window and (slides or "sliding_attention" in others),
        f"layer_types with {', '.join(sorted(others))}": others,
    }
    for fault, found in faults.items():
        if found:
            raise UserError(
                f"{name}: {fault} is not supported, since all layers of a MoH model attend to all earlier tokens; "
                "change it in config.json (sliding_window: null) if your texts are no longer than the window"
            )


def moh_fields(config: PreTrainedConfig) -> dict[str, Any]:
    """The arguments of `MoHLlamaConfig` that describe the same dense model as `config`."""
    default = {key: value for key, value in LlamaConfig().to_dict().items() if key not in FORGOTTEN}
    given = config.to_dict()
    # Their defaults follow from other fields.
    computed = ("head_dim", "num_key_value_heads")
    fields = {k: given[k] for k, value in default.items() if k in given and (k in computed or given[k] != value)}
    if config.model_type == "mixtral":
        fields |= {own: given[name] for own, name in _EXPERTS.items()}
    return fields | FAMILIES[config.model_type]
