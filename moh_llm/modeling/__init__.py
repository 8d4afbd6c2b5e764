"""The model: the files beside this one travel with every checkpoint as its remote code.

They are flat and import torch and transformers only. Importing this package registers the classes with the Auto
classes, for loading without `trust_remote_code`, and for saving (`save_pretrained` writes the files along).
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from moh_llm.modeling.configuration_moh_llama import MoHLlamaConfig
from moh_llm.modeling.modeling_moh_llama import (
    MoHLlamaForCausalLM,
    MoHLlamaForSequenceClassification,
    MoHLlamaModel,
    MoHLlamaPreTrainedModel,
)
from moh_llm.modeling.routing_moh import MoHRouter, load_balancing_loss

AutoConfig.register("moh_llama", MoHLlamaConfig, exist_ok=True)
MoHLlamaConfig.register_for_auto_class()
for _auto, _model in (
    (AutoModel, MoHLlamaModel),
    (AutoModelForCausalLM, MoHLlamaForCausalLM),
    (AutoModelForSequenceClassification, MoHLlamaForSequenceClassification),
):
    _auto.register(MoHLlamaConfig, _model, exist_ok=True)
    _model.register_for_auto_class(_auto.__name__)

__all__ = [
    "MoHLlamaConfig",
    "MoHLlamaForCausalLM",
    "MoHLlamaForSequenceClassification",
    "MoHLlamaModel",
    "MoHLlamaPreTrainedModel",
    "MoHRouter",
    "load_balancing_loss",
]
