"""The networks of a run: the student, its adapters, and the teacher."""

from pathlib import Path

import torch
from accelerate import init_empty_weights
from safetensors import SafetensorError
from transformers import PreTrainedTokenizerBase
from transformers.initialization import no_init_weights

from moh_llm.conversion.base import moh_fields
from moh_llm.data.tokenizer import open_tokenizer
from moh_llm.errors import UserError
from moh_llm.modeling import MoHLlamaConfig, MoHLlamaForCausalLM
from moh_llm.records.model import licence_texts, making_model, read_config, read_weight_map
from moh_llm.records.tensors import Tensors, check_tensors, empty_model, is_fallback_weight, is_routing_weight, is_tied
from moh_llm.training.config import LoraConfig, TrainConfig
from moh_llm.training.reference import Reference


def read_network_config(folder: Path) -> MoHLlamaConfig:
    """The config of a converted model, without what a session may have set. Raises UserError if it makes no model."""
    with making_model(folder):
        config = MoHLlamaConfig.from_pretrained(folder)
    empty_model(config, str(folder))
    config.return_dict, config.output_attentions, config.output_hidden_states = True, False, False
    config._attn_implementation = None  # the default
    return config


def check_network(folder: Path, config: MoHLlamaConfig | None = None) -> Tensors:
    """The tensors that are loaded from a model's folder; their numbers are not read.

    Raises UserError if weights are missing, an adapter would be loaded on top, or a text of the licence is a link out
    of the folder.
    """
    licence_texts(Path(folder))
    weight_map = read_weight_map(Path(folder))[1]
    return check_tensors(str(folder), Path(folder), weight_map, config or read_network_config(folder))


def load_network(
    folder: Path, dtype: torch.dtype, config: MoHLlamaConfig | None = None, empty: bool = False
) -> MoHLlamaForCausalLM:
    """A converted model with its weights in ``dtype``; ``config`` replaces its own.

    With ``empty`` the parameters are on the meta device, unchecked; buffers have their numbers. Otherwise raises
    UserError if the weights cannot be read, or `check_network` refuses them.
    """
    config = config or read_network_config(folder)
    if empty:
        config.tie_word_embeddings = is_tied(folder, read_weight_map(folder)[1], config.tie_word_embeddings)
        with init_empty_weights(include_buffers=False), no_init_weights():
            network = MoHLlamaForCausalLM._from_config(config, dtype=dtype)
        network.tie_weights()  # on the meta device each module registers a weight of its own
        network.name_or_path = str(folder)
        return network.eval()
    config.tie_word_embeddings = check_network(folder, config).tied
    try:
        return MoHLlamaForCausalLM.from_pretrained(folder, dtype=dtype, config=config)
    except (OSError, SafetensorError) as error:
        raise UserError(f"the weights in {folder} cannot be read: {' '.join(str(error).split())}") from error


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder. Raises UserError where there is none, or one with ids beyond the embedding."""
    return open_tokenizer(folder, embedding_rows(folder))


def embedding_rows(folder: Path) -> int | None:
    """Rows of the embedding of a model folder, by its config. Raises UserError for a config that cannot be read."""
    return read_config(Path(folder)).get("vocab_size")


def make_student(config: TrainConfig, empty: bool = False) -> torch.nn.Module:
    """The network that is trained, in float32, with adapters if the recipe has any.

    With ``empty`` the weights of ``config.model`` stay on the meta device; adapters are initialised.
    """
    network = load_network(Path(config.model), torch.float32, empty=empty)
    network.set_gate_gradient(config.gate_gradient)
    if config.gradient_checkpointing:
        # The re-entrant kind would lose the gradient of the load-balance loss.
        network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return trainable(config, network)


def trainable(config: TrainConfig, network: MoHLlamaForCausalLM) -> torch.nn.Module:
    """The network with those weights trainable that the recipe trains: all, adapters, or routers and fallbacks.

    Raises UserError if the recipe freezes the base and nothing else can be trained, or for a target without a module.
    """
    if network.config.router_type == "threshold" and config.gate_gradient == "none":
        for router in network.routers:  # nothing would tell them which keys matter
            router.requires_grad_(False)
    if config.lora is not None:
        return add_lora(network, config.lora)
    if config.freeze_base:
        for name, weight in network.named_parameters():
            weight.requires_grad_(weight.requires_grad and is_routing_weight(name))
        if not trained_weights(network):
            raise UserError(f"freeze_base=true leaves nothing to train in model={config.model}; set it to false")
    return network


def add_lora(network: MoHLlamaForCausalLM, config: LoraConfig) -> torch.nn.Module:
    """Freeze the network, add adapters, and keep those routers and fallbacks trainable in full that were.

    They are trained in place and not through peft's ``modules_to_save``, which would wrap them: the head budget that is
    set on a wrapper does not reach the router inside. Raises UserError for a target without a module.
    """
    import peft
    from peft.tuners.lora import LoraLayer

    linear = [name for name, module in network.named_modules() if isinstance(module, torch.nn.Linear)]
    known = sorted({name.rsplit(".", 1)[-1] for name in linear if not is_routing_weight(name)} - {"lm_head"})
    for target in config.target_modules:
        if target not in known:
            raise UserError(f"lora.target_modules: the model has no {target!r}; it has {', '.join(known)}")
    adapters = peft.LoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules=list(config.target_modules))
    trained = [w for name, w in network.named_parameters() if is_routing_weight(name) and w.requires_grad]
    adapted = peft.get_peft_model(network, adapters)
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


def reference_dtype(config: TrainConfig) -> torch.dtype:
    """The dtype of the reference's weights: under mixed precision bfloat16, in which they are multiplied anyway."""
    return torch.bfloat16 if config.mixed_precision == "bf16" else torch.float32


def load_reference(
    config: TrainConfig, reference: Reference, device: torch.device, empty: bool = False
) -> MoHLlamaForCausalLM:
    """The reference, frozen: the base, or the model that the run began with, with every head on."""
    dtype, base = reference_dtype(config), reference.base
    if base is None:
        network = load_network(Path(config.model), dtype, empty=empty)
        network.set_active_heads(network.config.num_attention_heads)
    else:
        heads = base.config.num_attention_heads
        # The dense model in our own classes, so that the student's strategy distributes it, too.
        always_on = {"num_shared_heads": heads, "num_active_heads": heads, "router_type": "query_norm"}
        network = load_network(base.folder, dtype, MoHLlamaConfig(**moh_fields(base.config), **always_on), empty)
    return (network if empty else network.to(device)).eval().requires_grad_(False)


def trained_weights(network: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters that are trained, by name; tied ones once."""
    return {name: weight for name, weight in network.named_parameters() if weight.requires_grad}


def count_weights(network: torch.nn.Module) -> dict[str, int]:
    """The number of weights that are trained, in all and by kind, and of all weights (`RunRecord.parameters`)."""
    kinds = dict.fromkeys(("trained_base", "trained_adapters", "trained_routers", "trained_fallbacks"), 0)
    for name, weight in trained_weights(network).items():
        kind = "adapters" if ".lora_" in name else "base"
        if is_routing_weight(name):
            kind = "fallbacks" if is_fallback_weight(name) else "routers"
        kinds[f"trained_{kind}"] += full_shape(weight).numel()
    total = sum(full_shape(weight).numel() for weight in network.parameters())
    return {"trained": sum(kinds.values()), "total": total, **kinds}


def full_shape(weight: torch.nn.Parameter) -> torch.Size:
    """A weight's whole shape; under ZeRO-3 a process holds a flat part of it."""
    return torch.Size(getattr(weight, "ds_shape", weight.shape))


def make_teacher(
    config: TrainConfig, reference: Reference | None, device: torch.device, empty: bool = False
) -> MoHLlamaForCausalLM | None:
    """A frozen copy of the reference; None where none is needed.

    With a frozen base, the student without adapters and with all heads on is the model that the run began with. Where
    that is the reference, it needs no memory of its own.
    """
    if not config.objective.has_teacher or reference is None:
        return None
    return None if config.is_base_frozen and reference.own else load_reference(config, reference, device, empty)
