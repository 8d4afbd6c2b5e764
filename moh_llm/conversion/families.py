"""Which architectures can become MoH models, and how their configs read as a `MoHLlamaConfig`.

All of them are LLaMA's layer with small differences, which `MoHLlamaConfig` names as fields.
"""

from typing import Any

from transformers import LlamaConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from moh_llm.errors import UserError

# model_type -> fields that the architecture implies and its config.json does not say.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {"attention_bias": True, "attention_output_bias": False},
    "qwen3": {"query_key_norm": True},
}
# Fields of the MoH layer; a model that is one already is planned anew without them.
MOH_FIELDS = {
    "num_shared_heads",
    "num_active_heads",
    "shared_heads",
    "router_type",
    "router_score",
    "router_aux_loss_coef",
    "output_router_logits",
    "head_stand_in",
}
_FORGOTTEN = {"model_type", "architectures", "auto_map", "transformers_version", "dtype", "torch_dtype"}


def check_family(config: Any, name: str, paper_preset: bool = False) -> None:
    """Raise UserError, with the field that stands in the way, unless a base with this config.json can be converted."""
    if not isinstance(config, dict):
        raise UserError(f"{name}: its config.json is not an object; is it a model's folder?")
    kind = config.get("model_type")
    if kind not in (*FAMILIES, "moh_llama"):
        architecture = ", ".join(config.get("architectures") or ["no architecture named"])
        known = ", ".join(FAMILIES)
        raise UserError(f"{name}: model_type {kind!r} ({architecture}) cannot be converted; these can: {known}")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown method")
        raise UserError(f"{name}: its weights are quantised ({method}); convert the full-precision checkpoint")
    if kind == "llama" and config.get("auto_map") and not paper_preset:
        raise UserError(
            f"{name}: auto_map says that it runs code of its own, so it may not be a plain LLaMA; "
            "pass --preset paper if it is the paper authors' MoH model, else remove auto_map from its config.json"
        )
    slides = config.get("sliding_window") and (kind == "mistral" or config.get("use_sliding_window"))
    if slides or "sliding_attention" in (config.get("layer_types") or []):
        raise UserError(
            f"{name}: sliding_window={config.get('sliding_window')} stands in the way: MoH layers attend to all "
            "earlier tokens; set it to null in config.json to use the model on texts no longer than the window"
        )


def base_config(config: dict[str, Any]) -> PreTrainedConfig:
    """The dense model's own config from its config.json, or from that of a MoH model made of a LLaMA."""
    kind = config["model_type"]
    if kind == "moh_llama":
        implied = {family: fields for family, fields in FAMILIES.items() if fields}
        fits = [family for family, fields in implied.items() if fields.items() <= config.items()]
        kind = fits[0] if fits else "llama"
    marks = {key for fields in FAMILIES.values() for key in fields if key != "attention_bias"}
    dropped = {"model_type", "architectures", "auto_map"} | MOH_FIELDS | marks
    return CONFIG_MAPPING[kind](**{key: value for key, value in config.items() if key not in dropped})


def moh_fields(config: PreTrainedConfig) -> dict[str, Any]:
    """The arguments of `MoHLlamaConfig` that describe the same dense model as `config`."""
    default = {key: value for key, value in LlamaConfig().to_dict().items() if key not in _FORGOTTEN}
    given = config.to_dict()
    fields = {key: given[key] for key, value in default.items() if key in given and given[key] != value}
    return fields | FAMILIES[config.model_type]
