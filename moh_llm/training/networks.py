"""The networks of a run: the student, its adapters, the teacher, the saved model."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import BitsAndBytesConfig, PreTrainedTokenizerBase
from transformers.initialization import no_init_weights

from moh_llm.conversion.base import moh_fields
from moh_llm.data.tokenizer import open_tokenizer
from moh_llm.errors import UserError
from moh_llm.files import new_folder
from moh_llm.modeling import MoHLlamaConfig, MoHLlamaForCausalLM
from moh_llm.records.conversion import NAME as CONVERSION
from moh_llm.records.identity import hash_model
from moh_llm.records.lineage import NAME as LINEAGE
from moh_llm.records.model import licence_texts, read_config, read_weight_map
from moh_llm.records.seal import write_seal
from moh_llm.records.tensors import (
    Tensors,
    cast_weight,
    check_tensors,
    empty_model,
    is_fallback_weight,
    is_routing_weight,
    is_tied,
    matrix_dtype,
    tensor_dtypes,
    why_no_model,
)
from moh_llm.training.adapters import add_lora
from moh_llm.training.checkpoints import read_weights
from moh_llm.training.config import TrainConfig
from moh_llm.training.reference import Reference, StartingPoint
from moh_llm.training.shared_heads import fix_shared_heads, learn_shared_heads


def read_network_config(folder: Path) -> MoHLlamaConfig:
    """The config of a converted model, without settings of a session that it may have been saved with.

    Raises:
        UserError: transformers refuses it, or makes no model of it.
    """
    try:
        config = MoHLlamaConfig.from_pretrained(folder)
    except (ValueError, TypeError, KeyError, StrictDataclassError) as error:
        reason = why_no_model(error, read_config(Path(folder)))
        raise UserError(f"{Path(folder) / 'config.json'} cannot be used: {reason}") from error
    empty_model(config, str(folder))
    config.return_dict, config.output_attentions, config.output_hidden_states = True, False, False
    config._attn_implementation = None  # the default
    return config


def check_network(folder: Path, config: MoHLlamaConfig | None = None) -> Tensors:
    """The tensors of a model's folder that are loaded; their numbers are not read.

    Raises:
        UserError: weights are missing, an adapter would be loaded on top, or a text of the licence, which is copied
            beside what is tuned, is a link out of the folder.
    """
    licence_texts(Path(folder))
    weight_map = read_weight_map(Path(folder))[1]
    return check_tensors(str(folder), Path(folder), weight_map, config or read_network_config(folder))


def load_network(
    folder: Path, dtype: torch.dtype, config: MoHLlamaConfig | None = None, empty: bool = False, **loading: Any
) -> MoHLlamaForCausalLM:
    """A converted model with its weights in ``dtype``; ``config`` in place of the folder's own.

    With ``empty`` the parameters are on the meta device, and nothing is checked (`check_network`); buffers have their
    numbers. ``loading`` goes to `from_pretrained`.

    Raises:
        UserError: the weights cannot be read, some are missing, or transformers would load an adapter on top.
    """
    config = config or read_network_config(folder)
    if empty:
        config.tie_word_embeddings = is_tied(folder, read_weight_map(folder)[1], config.tie_word_embeddings)
        with init_empty_weights(include_buffers=False), no_init_weights():
            network = MoHLlamaForCausalLM._from_config(config, dtype=dtype)
        network.tie_weights()  # what each module registers there is a weight of its own
        network.name_or_path = str(folder)
        return network.eval()
    config.tie_word_embeddings = check_network(folder, config).tied
    try:
        return MoHLlamaForCausalLM.from_pretrained(folder, dtype=dtype, config=config, **loading)
    except (OSError, SafetensorError) as error:
        raise UserError(f"the weights in {folder} cannot be read: {' '.join(str(error).split())}") from error


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder. Raises UserError where there is none, or one with ids beyond the embedding."""
    return open_tokenizer(folder, embedding_rows(folder))


def embedding_rows(folder: Path) -> int | None:
    """Rows of the embedding of a model folder, by its config. Raises UserError for a config that cannot be read."""
    return read_config(Path(folder)).get("vocab_size")


def make_student(config: TrainConfig, device: torch.device | None = None, empty: bool = False) -> torch.nn.Module:
    """The network that is trained, with adapters if the recipe has any; master weights are float32 always.

    Args:
        config: the recipe; with ``quantization`` the linear maps of the layers are held in 4 bits, all but routing.
        device: where weights are quantized, and stay; None: the CPU.
        empty: leave the weights of ``config.model`` on the meta device; adapters are made.
    """
    network = load_network(Path(config.model), torch.float32, empty=empty, **_quantized(config, device))
    if config.quantization is not None and network.device.type == "cpu":
        _check_on_cpu(network)
    network.set_attn_implementation(config.attn_implementation)
    network.set_gate_gradient(config.gate_gradient)
    if config.shared_heads is not None:
        learn_shared_heads(network, config.shared_heads.number)
    if config.gradient_checkpointing:
        recompute(network, config.activation_offloading)
    return trainable(config, network)


def trainable(config: TrainConfig, network: MoHLlamaForCausalLM) -> torch.nn.Module:
    """The network with the weights trained that the recipe trains: all of them, adapters, or routers and fallbacks.

    Raises:
        UserError: the recipe freezes the base and the model has no other weights, or `add_lora` raises it.
    """
    if network.config.router_type == "threshold":  # trained, they would turn on more and more heads
        for router in network.routers:
            router.requires_grad_(False)
    if config.lora is not None:
        return add_lora(network, config.lora)
    if config.freeze_base:
        for name, weight in network.named_parameters():
            weight.requires_grad_(weight.requires_grad and is_routing_weight(name))
        if not trained_weights(network):
            raise UserError(
                f"freeze_base=true: model={config.model} has no fallbacks and no router that is trained (threshold "
                "routers are not): set freeze_base to false"
            )
    return network


def recompute(network: MoHLlamaForCausalLM, offload: bool = False) -> None:
    """Recompute each layer in the backward pass, from its input, which with ``offload`` waits in the CPU's memory.

    No loss or gradient changes.
    """
    # The re-entrant kind would lose the load-balance loss's gradient.
    network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if offload:
        for layer in network.model.layers:
            layer._gradient_checkpointing_func = partial(_with_input_on_cpu, layer._gradient_checkpointing_func)


def _with_input_on_cpu(checkpoint: Callable[..., Any], *inputs: Any) -> Any:
    """Call ``checkpoint``, whose own hooks leave nothing but its input to these."""
    with torch.autograd.graph.save_on_cpu(pin_memory=torch.accelerator.is_available()):
        return checkpoint(*inputs)


def _quantized(config: TrainConfig, device: torch.device | None) -> dict[str, Any]:
    """Arguments with which `from_pretrained` quantizes the weights as it reads them."""
    if config.quantization is None:
        return {}
    four_bits = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=config.quantization,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=reference_dtype(config),
    )
    return {"quantization_config": four_bits, "device_map": {"": device or torch.device("cpu")}}


def _check_on_cpu(network: MoHLlamaForCausalLM) -> None:
    """Work around faults of bitsandbytes 0.50 on CPUs. Raises UserError for sizes that it handles wrongly there."""
    from bitsandbytes.nn import Linear4bit

    for name, module in network.named_modules():
        if isinstance(module, Linear4bit):
            # Else it packs the weights anew when they first score, and rounds them a second time.
            module.support_avx512bf16_for_cpu = False
            if module.in_features % 64:  # its blocks of 64 numbers would span rows, which its kernel does not expect
                raise UserError(
                    f"quantization=nf4 on a CPU: bitsandbytes misreads {name}, whose {module.in_features} inputs are "
                    "no multiple of 64; take a GPU, or set quantization to null"
                )


def reference_dtype(config: TrainConfig) -> torch.dtype:
    """The dtype of the reference's weights: under mixed precision bfloat16, in which it computes anyway."""
    assert config.mixed_precision != "auto", "not decided yet (moh_llm.training.precision)"
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
        # The dense model in our own classes: what distributes the student then distributes it, too.
        always_on = {"num_shared_heads": heads, "num_active_heads": heads, "router_type": "query_norm"}
        network = load_network(base.folder, dtype, MoHLlamaConfig(**moh_fields(base.config), **always_on), empty)
    return (network if empty else network.to(device)).eval().requires_grad_(False)


def trained_weights(network: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters that are trained, by name; tied ones once."""
    return {name: weight for name, weight in network.named_parameters() if weight.requires_grad}


def count_weights(network: torch.nn.Module) -> dict[str, int]:
    """How many numbers are trained, in all and by kind, and how many there are (`RunRecord.parameters`)."""
    kinds = dict.fromkeys(("trained_base", "trained_adapters", "trained_routers", "trained_fallbacks"), 0)
    for name, weight in trained_weights(network).items():
        kind = "adapters" if ".lora_" in name else "base"
        if is_routing_weight(name):
            kind = "fallbacks" if is_fallback_weight(name) else "routers"
        kinds[f"trained_{kind}"] += full_shape(weight).numel()
    total = sum(full_shape(weight).numel() for weight in network.parameters())
    return {"trained": sum(kinds.values()), "total": total, **kinds}


def full_shape(weight: torch.nn.Parameter) -> torch.Size:
    """A weight's shape; under ZeRO-3 what a process holds of it is a flat part, and a weight of 4 bits is packed."""
    packed = getattr(weight, "quant_state", None)
    return torch.Size(getattr(weight, "ds_shape", weight.shape) if packed is None else packed.shape)


def make_teacher(
    config: TrainConfig, reference: Reference | None, device: torch.device, empty: bool = False
) -> MoHLlamaForCausalLM | None:
    """A frozen copy of the reference; None where none is needed.

    With a frozen base, where the model that the run began with is the reference with all heads on, the student (without
    its adapters) is the reference, at no memory; of quantized weights it is the quantized reference.
    """
    if not config.objective.has_teacher or reference is None:
        return None
    return None if config.is_base_frozen and reference.own else load_reference(config, reference, device, empty)


def save_network(
    config: TrainConfig,
    checkpoint: Path,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    starting_point: StartingPoint,
    steps: int,
) -> None:
    """Write the tuned model as a folder of its own: weights, config, tokenizer, remote code, lineage.

    Adapters are merged into the weights of ``config.model``, quantized or not in training, and these are cast: to the
    dtype that each has there, unless the recipe names one for all. The record of the conversion goes along, since it
    names the base, and so do the texts of its licence.

    Args:
        config: the recipe; weights that were not trained are read from ``config.model``.
        checkpoint: the folder that holds the trained weights (`moh_llm.training.checkpoints`).
        tokenizer: saved beside the model.
        folder: the folder to write.
        starting_point: the model that the run began with; the run is added to its lineage.
        steps: number of steps made.

    Raises:
        UserError: ``config.model`` cannot be read or is another model by now, or the disk refuses.
    """
    starting_point.check_model(config)
    network = make_student(replace(config, quantization=None))
    read_weights(checkpoint, trained_weights(network))
    if config.lora is not None:
        network = network.merge_and_unload()
    fix_shared_heads(network)
    dtype = _cast(network, Path(config.model))
    with new_folder(folder, overwrite=True) as temporary:
        try:
            network.save_pretrained(temporary)
            network.config.dtype = dtype  # which `save_pretrained` takes from the first weight
            network.config.save_pretrained(temporary)
        except SafetensorError as error:  # how it reports a full disk
            raise UserError(f"cannot write {folder}: {' '.join(str(error).split())[:200]}; free some space") from error
        tokenizer.save_pretrained(temporary)
        began_with = Path(config.model)
        for file in licence_texts(began_with):
            shutil.copyfile(file, temporary / file.name)
        if (conversion := starting_point.records.conversion) is not None:
            conversion.write(temporary / CONVERSION)
        made = hash_model(temporary)
        starting_point.chain_after(config, steps, made).write(temporary / LINEAGE)
        write_seal(temporary, made)


def _cast(network: torch.nn.Module, folder: Path) -> torch.dtype:
    """Cast each weight to the dtype that it has in ``folder``; returns the dtype of the matrices.

    Raises:
        UserError: a weight is too large for its dtype.
    """
    weight_map = read_weight_map(folder)[1]
    stored, widest = tensor_dtypes(folder, weight_map), matrix_dtype(folder, weight_map) or torch.float32
    with torch.no_grad():
        for name, weight in network.named_parameters():
            weight.data = cast_weight(weight.data, stored.get(name, widest), name)
    return widest
