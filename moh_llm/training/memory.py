"""An estimate of the memory that each process of a run needs, without loading a weight.

Bytes per process, with N processes, P weights of the student (adapters included), t of them trained, and B weights of
the teacher; c is 2 under `mixed_precision: bf16`, else 4:

            weights          teacher   gradients   moments   buffers
    one     4P               cB        4t          8t        none
    ddp     4P               cB        8t          8t        none (half of the gradients are DDP's buckets)
    zero1   cP + 4t/N        cB        ct          8t/N      a bucket
    zero2   cP + 4t/N        cB        ct/N        8t/N      a bucket
    zero3   cP/N (+ 4t/N)    cB/N      ct/N        8t/N      a bucket, gathered weights
    fsdp2   4P/N             cB/N      4t/N        8t/N      gathered weights and their gradients

DeepSpeed keeps a float32 copy of the trained weights, divided (under ZeRO-3 only if it computes in another precision).
One process and DDP cast float32 weights as they go (autocast), FSDP2 as it gathers them. With `quantization: nf4` the
weights of the layers' linear maps take 0.52 bytes each instead of 4.

Activations and temporary tensors are added. Fragmentation, workspaces of kernels and the libraries' own memory (about
1 GiB on a GPU) are not.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from moh_llm.flops import feed_forward_width
from moh_llm.modeling import MoHLlamaConfig, MoHLlamaForCausalLM
from moh_llm.records.conversion import read_chain
from moh_llm.training.config import TrainConfig
from moh_llm.training.losses import chunk_positions
from moh_llm.training.networks import trainable, trained_weights

STRATEGIES = ("one", "ddp", "zero1", "zero2", "zero3", "fsdp2")

# DeepSpeed's defaults: reduce_bucket_size and max_live_parameters.
BUCKET, _GATHERED = 500_000_000, 1_000_000_000
_BLOCK = 128  # queries of a block of local attention
# Bytes of a weight in nf4: 4 bits, a byte for each block of 64, a float32 for each 256 of these.
_NF4 = 1 / 2 + 1 / 64 + 4 / (64 * 256)


@dataclass(frozen=True)
class Sizes:
    """Numbers of weights; tied weights count once.

    Attributes:
        student: of the student, adapters included.
        trained: those of them that are trained.
        base: of the student without adapters.
        layer: of the largest decoder layer.
        ends: outside of the decoder layers.
        linear: of the linear maps of the decoder layers.
    """

    student: int
    trained: int
    base: int
    layer: int
    ends: int
    linear: int

    @classmethod
    def count(cls, config: TrainConfig, model: MoHLlamaConfig) -> "Sizes":
        """Build the model on the meta device and count. Raises UserError where ``lora`` names unknown layers."""
        with torch.device("meta"):
            network = MoHLlamaForCausalLM(model)
            layers = [_count(layer) for layer in network.model.layers]
            matrices = [m for m in network.model.layers.modules() if isinstance(m, nn.Linear)]
            base, linear = _count(network), sum(matrix.weight.numel() for matrix in matrices)
            student = trainable(config, network)
        trained = sum(weight.numel() for weight in trained_weights(student).values())
        return cls(_count(student), trained, base, max(layers), base - sum(layers), linear)


@dataclass(frozen=True)
class Memory:
    """Bytes of one process by part; `temporary` is what a step needs at most on top of the other parts."""

    weights: int
    teacher: int
    gradients: int
    moments: int
    buffers: int
    activations: int
    temporary: int

    @property
    def total(self) -> int:
        """The highest point of a step."""
        return sum(vars(self).values())


def estimate_memory(
    config: TrainConfig, model: MoHLlamaConfig, sizes: Sizes, strategy: str = "one", processes: int = 1
) -> Memory:
    """The memory of each of ``processes``, for one of `STRATEGIES` and the config and sizes of ``config.model``.

    The highest point is at the loss, in a layer's backward pass, or in AdamW's step, which on GPUs makes a float32
    copy of all that it updates.
    """
    c = _product_bytes(config)
    zero, sharded = strategy.startswith("zero"), strategy in ("zero3", "fsdp2")
    base = sizes.base if copies_teacher(config) else 0

    def part(numbers: int, divided: bool) -> int:
        return -(-numbers // processes) if divided else numbers

    own = part(sizes.trained, strategy not in ("one", "ddp"))  # weights that this process updates
    if zero:
        weights = part(sizes.student, sharded) * c
        if strategy != "zero3" or c < 4:
            weights += 4 * own
    else:
        saved = round((4 - _NF4) * sizes.linear) if config.quantization is not None else 0
        weights = part(4 * sizes.student - saved, sharded)
    gradients = part(sizes.trained, strategy in ("zero2", "zero3", "fsdp2")) * (c if zero else 4)
    if strategy == "ddp":
        gradients *= 2
    buffers = BUCKET * c if zero else 0
    if strategy == "zero3":
        buffers += min(sizes.student + base, _GATHERED) * c
    activations, backward = activation_bytes(config, model, sizes, strategy)
    if strategy == "fsdp2":
        # Embedding and head stay gathered. So are this layer and the next one, with gradients while these are reduced.
        buffers += c * sizes.ends * (2 if base else 1)
        backward += 2 * c * sizes.layer if config.is_base_frozen else c * (4 * sizes.layer + sizes.ends)
    update = 4 * own + (4 * own if zero and c < 4 else 0) - activations
    temporary = max(loss_bytes(config, model, strategy), backward, update)
    return Memory(weights, part(base, sharded) * c, gradients, 8 * own, buffers, activations, temporary)


def activation_bytes(config: TrainConfig, model: MoHLlamaConfig, sizes: Sizes, strategy: str) -> tuple[int, int]:
    """Bytes that the forward pass of a micro-batch keeps, and that a layer's backward pass adds for a time.

    With gradient checkpointing the forward pass keeps each layer's input, with offloading not even that, and the
    backward pass computes one layer at a time again. It adds the gradients of the stream and of the MLP's two widest
    tensors. A tied head's gradient waits for the embedding's.
    """
    c, s = _product_bytes(config), _stream_bytes(config, strategy)
    length, layers = config.data.sequence_length, range(model.num_hidden_layers)
    tokens = config.data.micro_batch_size * length
    kept = 2 * s * model.head_dim + (4 + s) * model.hidden_size  # sines and cosines, the last norm
    by_layer = [_layer_bytes(config, model, c, s, layer) for layer in layers]
    if not config.gradient_checkpointing:
        kept += sum(by_layer)
    elif not config.activation_offloading:
        kept += len(layers) * s * model.hidden_size
    if config.objective.layer_coefficient:
        kept += len(layers) * s * model.hidden_size  # the base's outputs
    of_mlp = s if model.num_local_experts else c  # autocast leaves experts alone
    backward = tokens * (2 * of_mlp * feed_forward_width(model) + s * model.hidden_size)
    if model.tie_word_embeddings and not config.is_base_frozen:
        backward += s * model.hidden_size * model.vocab_size
    copies = c * sizes.linear if c < s else 0  # of the weights, by autocast
    if not config.gradient_checkpointing:
        return tokens * kept + copies, backward
    # Autocast caches its copies of trained weights until the forward pass ends, which is before the backward pass.
    cached = 0 if config.is_base_frozen else copies
    return tokens * kept + cached, tokens * max(by_layer) + copies // len(layers) + backward - cached


def _layer_bytes(config: TrainConfig, model: MoHLlamaConfig, c: int, s: int, layer: int) -> int:
    """Bytes per token that one layer keeps for its backward pass; c and s bytes per number in products and stream."""
    hidden, wide, width = model.hidden_size, model.num_attention_heads * model.head_dim, feed_forward_width(model)
    total = 8 * hidden  # the inputs of two norms, in float32
    if not config.is_base_frozen:
        total += 2 * s * hidden  # their outputs, for the gradient of the norms' weights
    if config.freeze_base:
        total += c * hidden
    else:  # the inputs of linear maps: some read the same, of which autocast makes a copy for each
        total += (6 if c < s else 2) * c * hidden + c * wide
    if model.num_local_experts:  # of each expert that a token selects its input and output, and its intermediates
        total += s * (2 * model.num_experts_per_tok * hidden + 4 * width)
    else:
        total += c * width * (3 if config.freeze_base else 4)
    if model.query_key_norm:
        total += (4 + c) * (model.num_attention_heads + model.num_key_value_heads) * model.head_dim
    return total + _attention_bytes(config, model, c, layer)


def _attention_bytes(config: TrainConfig, model: MoHLlamaConfig, c: int, layer: int) -> int:
    """Bytes per token that attention, router and fallback of a layer keep for the backward pass."""
    size, length = model.head_dim, config.data.sequence_length
    wide = model.num_attention_heads * size
    if _is_base(model, layer, length):
        return 4 * c * wide + c * length  # queries, repeated keys and values, outputs; the mask of documents
    routed, shared = model.routed_heads(layer), model.shared_heads_per_layer[layer]
    on = c * size * (len(shared) + len(routed))  # a number per channel of the heads that may be on
    total = c * wide + 3 * on  # queries and outputs of these, and their repeated keys and values
    if model.head_fallback == "value":
        total += c * wide
    if model.head_fallback == "local":
        # Queries and outputs of the heads that may be off. Each block of queries copies the keys and values of its
        # window and the sinks.
        later = length - model.all_heads_until
        block = min(later, model.local_window, _BLOCK)
        copies = (model.local_sinks + model.local_window + block) / block
        off = c * size * (3 * (model.num_attention_heads - len(shared)) + 2 * model.num_key_value_heads * copies)
        total += round(off * later / length)
    if routed and model.router_type != "threshold" and config.gate_gradient != "none":
        total += c * wide  # the head less its fallback, for the gate's gradient
    if routed and model.router_type == "query_norm":
        total += 4 * wide
    elif routed and model.router_type != "none" and c < 4:
        total += 4 * model.hidden_size  # the router's input, in float32
    return total


def _is_base(model: MoHLlamaConfig, layer: int, length: int) -> bool:
    """Whether all heads of a layer are on for all tokens, so that its attention is the base's."""
    is_start = model.head_fallback == "local" and length <= model.all_heads_until
    return is_start or model.active_heads_per_layer[layer] == model.num_attention_heads


def loss_bytes(config: TrainConfig, model: MoHLlamaConfig, strategy: str) -> int:
    """Bytes of the loss beside the activations (`moh_llm.training.losses`).

    Hidden states of student and teacher and their gradient, the gradient of a trained head, copies of the heads under
    autocast, and the logits of a chunk of positions: 3 float32 tensors with a teacher, else 2, and the product's own.
    """
    c, s = _product_bytes(config), _stream_bytes(config, strategy)
    tokens = config.data.micro_batch_size * config.data.sequence_length
    head, states = model.hidden_size * model.vocab_size, tokens * model.hidden_size
    positions = chunk_positions(model.vocab_size)
    trained, teacher = not config.is_base_frozen, config.objective.has_teacher
    total = (2 * s + (c if teacher else 0)) * states
    if c < s:
        total += c * head * (2 if teacher and not trained else 1)
    logits = ((12 if teacher else 8) + (c if c < 4 else 0)) * min(tokens, positions) * model.vocab_size
    if not trained:
        return total + logits
    gradient = 4 * head * (2 if tokens > positions else 1)  # each chunk makes one and adds it to the first
    return total + max(logits + 4 * head * (tokens > positions), gradient + s * (head + states))


def copies_teacher(config: TrainConfig) -> bool:
    """Whether the teacher is a network of its own: with a frozen base only if an earlier run trained the base."""
    tuned = any(not run.freeze_base for run in read_chain(Path(config.model)).runs)
    return config.objective.has_teacher and (tuned or not config.is_base_frozen)


def _product_bytes(config: TrainConfig) -> int:
    """Bytes of a number in products."""
    return 2 if config.mixed_precision == "bf16" else 4


def _stream_bytes(config: TrainConfig, strategy: str) -> int:
    """Bytes of a number in the residual stream: autocast (one process, DDP) leaves it in float32."""
    return 4 if strategy in ("one", "ddp") else _product_bytes(config)


def _count(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())
