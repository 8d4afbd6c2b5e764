"""Adapters of LoRA in a network; routers and fallbacks beside them are trained in full."""

import torch

from moh_llm.errors import UserError
from moh_llm.modeling import MoHLlamaForCausalLM
from moh_llm.records.tensors import is_routing_weight
from moh_llm.training.config import LoraConfig


def add_lora(network: MoHLlamaForCausalLM, config: LoraConfig) -> torch.nn.Module:
    """Freeze the network, give it adapters, and leave its routers and fallbacks trainable as they are, in full.

    These are trained in place and not through peft's ``modules_to_save``: that would wrap them,
    and the head budget set on a wrapper would not reach the router inside.

    Raises:
        UserError: a target module that the network does not have.
    """
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model
    from peft.tuners.lora import LoraLayer

    linear = [name for name, module in network.named_modules() if isinstance(module, torch.nn.Linear)]
    known = sorted({name.rsplit(".", 1)[-1] for name in linear if not is_routing_weight(name)} - {"lm_head"})
    for target in config.target_modules:
        if target not in known:
            raise UserError(f"lora.target_modules: the model has no {target!r}; it has {', '.join(known)}")
    adapters = PeftConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=list(config.target_modules),
    )
    trained = [w for name, w in network.named_parameters() if is_routing_weight(name) and w.requires_grad]
    adapted = get_peft_model(network, adapters)
    for layer in (module for module in network.modules() if isinstance(module, LoraLayer)):
        for parts in (layer.lora_A, layer.lora_B):
            if parts["default"].weight.is_meta:  # peft puts them where the weight is that they adapt
                parts["default"].to_empty(device="cpu")
            if hasattr(layer.weight, "ds_id"):  # ZeRO-3 takes weights of one dtype, and its optimizer copies in float32
                parts["default"].to(layer.weight.dtype)
        layer.reset_lora_parameters("default", True)  # drawn in one order, wherever they were
    for weight in trained:
        weight.requires_grad_(True)
    return adapted
