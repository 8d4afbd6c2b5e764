"""Which architectures can become MoH models, and how their configs read as a `MoHLlamaConfig`.

All of them are LLaMA's layer with small differences, which `MoHLlamaConfig` names as fields.
"""

from typing import Any

from transformers import LlamaConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from moh_llm.errors import UserError
from moh_llm.modeling.configuration_moh_llama import FORMAT

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
    "routing_granularity",
    "router_aux_loss_coef",
    "output_router_logits",
    "head_fallback",
    "moh_format",
}
_FORGOTTEN = {"model_type", "architectures", "auto_map", "transformers_version", "dtype", "torch_dtype"}


def check_family(config: Any, name: str, paper_preset: bool = False) -> None:
    """Raise UserError, with the field that stands in the way, unless a base with this config.json can be converted."""
    if not isinstance(config, dict):
        raise UserError(f"{name}: its config.json is not an object; is it a model's folder?")
    kind = config.get("model_type")
    if kind not in (*FAMILIES, "moh_llama"):
        named = config.get("architectures")
        architecture = ", ".join(map(str, named)) if isinstance(named, list) and named else "no architecture named"
        known = ", ".join(FAMILIES)
        raise UserError(f"{name}: model_type {kind!r} ({architecture}) cannot be converted; these can: {known}")
    if kind == "moh_llama" and config.get("moh_format", 1) > FORMAT:
        raise UserError(
            f"{name}: moh_format={config['moh_format']} is newer than this moh-llm reads ({FORMAT}); "
            "pip install -U moh-llm"
        )
    if config.get("quantization_config"):
        quantised = config["quantization_config"]
        method = quantised.get("quant_method") if isinstance(quantised, dict) else "unknown method"
        raise UserError(f"{name}: its weights are quantised ({method}); convert the full-precision checkpoint")
    if kind == "llama" and config.get("auto_map") and not paper_preset:
        raise UserError(
            f"{name}: auto_map says that it runs code of its own, so it may not be a plain LLaMA; "
            "pass --preset paper if it is the paper authors' MoH model, else remove auto_map from its config.json"
        )


def check_window(config: PreTrainedConfig, name: str) -> None:
    """Raise UserError for a dense model whose layers attend to a window only."""
    window = getattr(config, "sliding_window", None)
    slides = window and (config.model_type == "mistral" or getattr(config, "use_sliding_window", False))
    if slides or "sliding_attention" in (getattr(config, "layer_types", None) or []):
        raise UserError(
            f"{name}: sliding_window={window} stands in the way: MoH layers attend to all earlier tokens; "
            "set it to null in config.json to use the model on texts no longer than the window"
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
    # The defaults of these two follow from other fields.
    computed = ("head_dim", "num_key_value_heads")
    fields = {k: given[k] for k, value in default.items() if k in given and (k in computed or given[k] != value)}
    return fields | FAMILIES[config.model_type]
