"""An estimate of the memory that each process of a run needs, by part, without loading a weight.

Bytes per process, with N processes, P weights of the student (adapters included), t of them
trained, and B of its base; c is 2 under `mixed_precision: bf16`, else 4:

            weights          teacher   gradients   moments   buffers
    one     4P               cB        4t          8t        none
    ddp     4P               cB        8t          8t        none (half of the gradients are DDP's buckets)
    zero1   cP + 4t/N        cB        ct          8t/N      a bucket
    zero2   cP + 4t/N        cB        ct/N        8t/N      a bucket
    zero3   cP/N (+ 4t/N)    cB/N      ct/N        8t/N      a bucket, gathered weights
    fsdp2   4P/N             cB/N      4t/N        8t/N      gathered weights and their gradients

DeepSpeed keeps a float32 copy of the trained weights, divided (under ZeRO-3 only if it computes in another precision).
One process and DDP cast float32 weights as they go (autocast), FSDP2 as it gathers them. There is a teacher only in
distillation; with a frozen base only if its weights were tuned before (`copies_teacher`). With `quantization: nf4` the
weights of the layers' linear maps take 0.52 bytes each instead of 4.

Activations and temporary tensors are added. The allocator's fragments, kernels' workspaces, the libraries' own memory
(on a GPU about 1 GiB) and copies that CPUs make to add numbers of two precisions are not estimated.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from moh_llm.flops import feed_forward_width
from moh_llm.modeling import MoHLlamaConfig, MoHLlamaForCausalLM
from moh_llm.records.lineage import read_chain
from moh_llm.training.config import TrainConfig
from moh_llm.training.losses import chunk_positions
from moh_llm.training.networks import trainable, trained_weights

STRATEGIES = ("one", "ddp", "zero1", "zero2", "zero3", "fsdp2")

# DeepSpeed's defaults, which recipes/accelerate leaves as they are: reduce_bucket_size, max_live_parameters.
BUCKET, _GATHERED = 500_000_000, 1_000_000_000
_BLOCK, _MULTIPLE = 128, 16  # queries of a block of local attention at most, and what its keys are a multiple of
# Bytes of a weight in nf4: 4 bits, a byte for each block of 64, a float32 for each 256 of these.
_NF4 = 1 / 2 + 1 / 64 + 4 / (64 * 256)


@dataclass(frozen=True)
class Sizes:
    """Numbers of weights, tied ones once: `student` and `trained` with adapters, `base` without; `layer` in the largest
    decoder layer, `ends` outside of the layers, `linear` in the layers' linear maps, which autocast copies.
    """

    student: int
    trained: int
    base: int
    layer: int
    ends: int
    linear: int

    @classmethod
    def of(cls, config: TrainConfig, model: MoHLlamaConfig) -> "Sizes":
        """Count a model on the meta device. Raises UserError: ``lora`` names layers that the model has not."""
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
    """Bytes of one process by part. `temporary` is the most on top of the others, at `moment`."""

    weights: int
    teacher: int
    gradients: int
    moments: int
    buffers: int
    activations: int
    temporary: int
    moment: str

    @property
    def parts(self) -> dict[str, int]:
        """The parts by name."""
        return {name: value for name, value in vars(self).items() if name != "moment"}

    @property
    def total(self) -> int:
        """The highest point of a step."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class Precision:
    """Bytes per number: of `products`, of the residual `stream`, and of the `teacher`'s stream."""

    products: int
    stream: int
    teacher: int

    @classmethod
    def of(cls, config: TrainConfig, strategy: str) -> "Precision":
        """Under autocast (one process, DDP) the stream stays float32; else it has the weights' precision."""
        products = 2 if config.mixed_precision == "bf16" else 4
        stream = 4 if strategy in ("one", "ddp") else products
        return cls(products, stream, stream if config.is_base_frozen else products)

    @property
    def casts(self) -> bool:
        """Whether each linear map makes copies of its input and weight."""
        return self.stream > self.products


def estimate_memory(config: TrainConfig, model: MoHLlamaConfig, sizes: Sizes, strategy: str, processes: int) -> Memory:
    """The memory of each of ``processes``, for one of `STRATEGIES` and the config and sizes of ``config.model``.

    The highest point is at the loss, in a layer's backward pass, under FSDP2 where the last gradients are reduced, or
    in AdamW's step, which on GPUs makes a float32 copy of all that it updates.
    """
    precision = Precision.of(config, strategy)
    zero, sharded, c = strategy.startswith("zero"), strategy in ("zero3", "fsdp2"), precision.products
    base = sizes.base if copies_teacher(config) else 0

    def part(numbers: int, divided: bool) -> int:
        return -(-numbers // processes) if divided else numbers

    held = 4 * sizes.student
    if config.quantization is not None:
        held -= round((4 - _NF4) * sizes.linear)
    own = part(sizes.trained, strategy not in ("one", "ddp"))  # weights that this process updates
    weights = part(sizes.student, sharded) * c if zero else part(held, sharded)
    if zero and (strategy != "zero3" or c < 4):
        weights += 4 * own
    gradients = part(sizes.trained, strategy in ("zero2", "zero3", "fsdp2")) * (c if zero else 4)
    if strategy == "ddp":
        gradients *= 2
    buffers = BUCKET * c if zero else 0
    if strategy == "zero3":
        buffers += min(sizes.student + base, _GATHERED) * c
    activations, layer = activation_bytes(config, model, sizes, precision)
    loss, step = loss_bytes(config, model, precision), 4 * own + (4 * own if zero and c < 4 else 0)
    moments = {"the loss": loss, "a layer's backward pass": layer, "AdamW's step": step - activations}
    if strategy == "fsdp2":
        # The root's weights stay gathered until their gradients, which come last, are there.
        buffers += c * sizes.ends * (2 if base else 1)
        moments["the loss"] += c * sizes.layer  # the last layer's, which the next gathering frees
        moments["AdamW's step"] -= buffers
        if not config.is_base_frozen:
            # This layer's weights and the next one's, its gradient and a copy of it to reduce, and the root's so far.
            moments["a layer's backward pass"] += c * (4 * sizes.layer + sizes.ends)
            reduced = 2 * c * sizes.ends + part(4 * sizes.ends, True)
            moments["the reduction of gradients"] = reduced - activations - buffers
        else:
            moments["a layer's backward pass"] += 2 * c * sizes.layer
    moment = max(moments, key=lambda name: moments[name])
    return Memory(weights, part(base, sharded) * c, gradients, 8 * own, buffers, activations, moments[moment], moment)


def activation_bytes(config: TrainConfig, model: MoHLlamaConfig, sizes: Sizes, precision: Precision) -> tuple[int, int]:
    """Bytes that the forward pass of a micro-batch keeps, and that a layer's backward pass adds temporarily.

    With gradient checkpointing a layer keeps its input and router logits alone, with offloading without the input, and
    one layer at a time is recomputed. Under autocast copies of the layers' weights are kept by their backward pass, or,
    where it recomputes them, in autocast's cache until the forward pass ends. The backward pass adds
    gradients of the MLP's widest tensors, two at a time, of the stream, and of a tied head, which waits for the
    embedding's.
    """
    length, stream = config.data.sequence_length, precision.stream
    tokens = config.data.micro_batch_size * length
    # Token ids; sines and cosines; the boolean mask that keeps documents apart in the base's attention; the last norm.
    kept = 8 + 2 * stream * model.head_dim + (4 + stream) * model.hidden_size
    kept += length * any(_is_base(model, number, length) for number in range(model.num_hidden_layers))
    layers, masks = [], _masks(model, precision.products, length)
    for number, active in enumerate(model.active_heads_per_layer):
        group_size, shared = model.heads_per_group, len(model.shared_heads_per_layer[number])
        routed, top_k = len(model.routed_heads(number)) // group_size, (active - shared) // group_size
        attention = _attention(config, model, precision.products, number)
        layers.append(_layer(config, model, precision, routed, top_k) + attention)
        kept += 8 * (routed + top_k)  # logits; the load-balance loss's softmax and chosen heads (int64)
        if config.gradient_checkpointing:
            kept += 0 if config.activation_offloading else stream * model.hidden_size
        else:
            kept += layers[-1]
        if config.objective.layer_coefficient:
            kept += stream * model.hidden_size + 16  # the base's outputs, later gradients; which positions count
    of_mlp = stream if model.num_local_experts else precision.products  # autocast leaves experts alone
    backward = tokens * (2 * of_mlp * feed_forward_width(model) + stream * model.hidden_size)
    if model.tie_word_embeddings and not config.is_base_frozen:
        backward += stream * model.hidden_size * model.vocab_size
    copies = precision.products * sizes.linear if precision.casts else 0
    if not config.gradient_checkpointing:
        return tokens * (kept + masks) + copies, backward
    cached = 0 if config.is_base_frozen else copies
    again = tokens * (max(layers) + masks) + copies // model.num_hidden_layers
    return tokens * kept + cached, again + backward - cached


def _layer(config: TrainConfig, model: MoHLlamaConfig, precision: Precision, routed: int, top_k: int) -> int:
    """Bytes per token that one layer keeps for its backward pass.

    With hidden size C, queries A = heads x head size, intermediate size F, sequences of L tokens, c and
    s bytes per number in products and in the stream: of the two norms, float32 inputs and
    normalised outputs, 2 (4 + s) C; the linear maps' inputs, 2 c C, under autocast a copy for each;
    the output projection's input, c A; the MLP's four intermediates, 4 c F, or what `_experts` says; `_attention`. A
    router takes its input in float32, 4 C, or the queries, 4 A. Linear maps that are frozen and have no adapter keep no
    input. (Nor does the first layer keep what precedes its fallbacks, which is counted here.)
    """
    c, s, hidden, lora = precision.products, precision.stream, model.hidden_size, config.lora
    heads, wide = model.num_attention_heads, model.num_attention_heads * model.head_dim
    has_fallback = model.head_fallback == "value" and routed > 0
    # Where dropout differs from adapter to adapter, so do their inputs.
    separate = precision.casts or (lora is not None and lora.dropout > 0)
    inputs = 5 + (has_fallback or model.head_fallback == "local") if separate else 2
    if config.freeze_base:
        inputs = int(has_fallback or (c == 4 and routed > 0 and model.router_type in ("linear", "two_stage")))
    total = 2 * (4 * hidden + 4) + inputs * c * hidden
    total += 4 * routed + 8 * top_k
    total += _experts(model, s) if model.num_local_experts else 4 * c * model.intermediate_size
    if config.freeze_base:
        total -= 0 if model.num_local_experts else c * model.intermediate_size
    else:
        total += c * wide
    if not config.is_base_frozen:
        total += 2 * s * hidden  # normalised, for the gradient of the norm's weight
    if lora is not None:
        total += c * lora.rank * len(lora.target_modules)
        total += (5 * hidden + wide + model.intermediate_size) * (lora.dropout > 0)  # dropout's masks, of booleans
    if model.router_type == "query_norm":
        total += 4 * wide
    elif c < 4 and routed and model.router_type != "none":
        total += 4 * hidden
    if model.query_key_norm:
        total += (4 + c) * (heads + model.num_key_value_heads) * model.head_dim
    return total


def _experts(model: MoHLlamaConfig, number: int) -> int:
    """Bytes per token that a layer's experts and their router keep for the backward pass, in grouped products.

    Of each expert that a token selects its input and output, C, the four intermediates, 4 F, and indices (int64); of
    the router logits in float32 and the weights of all experts.
    """
    selected = model.num_experts_per_tok
    return number * (2 * selected * model.hidden_size + 4 * feed_forward_width(model)) + 8 * model.num_local_experts


def _is_base(model: MoHLlamaConfig, number: int, length: int) -> bool:
    """Whether all heads of a layer are on for all tokens: its attention is the base's."""
    is_start = model.head_fallback == "local" and length <= model.all_heads_until
    return is_start or model.active_heads_per_layer[number] == model.num_attention_heads


def _attention(config: TrainConfig, model: MoHLlamaConfig, c: int, number: int) -> int:
    """Bytes per token that attention, gates and fallbacks of a layer keep for the backward pass, c per number.

    The base's keeps queries, repeated keys and values, outputs and its mask. Else full attention of the heads that some
    token may have on keeps their queries and outputs, with another copy in the order of all heads, the log-sum-exp of
    their scores, and keys and values, a copy for each of them unless they are as many of each group. That of heads that
    are never on, for documents' first tokens, keeps the same of these. Then `_local`; which heads are on; what a head
    gives less its fallback, and the gate, where routers learn from it; and the values of fallbacks.
    """
    heads, size, length = model.num_attention_heads, model.head_dim, config.data.sequence_length
    shared, groups = len(model.shared_heads_per_layer[number]), model.num_key_value_heads
    if _is_base(model, number, length):
        return 4 * c * heads * size + c * length + (4 + c) * heads
    routed, never = model.routed_heads(number), set(model.never_on_heads_per_layer[number])
    if model.router_type == "none":
        routed, never = [], {*range(heads)} - set(model.shared_heads_per_layer[number])
    used = {*range(heads)} - never

    def states_of(ids: set[int]) -> int:
        """Heads of keys and values that attention of these heads reads."""
        counts = Counter(head * groups // heads for head in ids)
        return len(counts) if len({*counts.values()}) == 1 else len(ids)

    total = c * size * (heads + len(used) + 2 * states_of(used)) + 4 * len(used) + 2 * heads
    if never:
        total += c * size * len(used)
        read = max(groups, states_of(never))  # of slices autograd keeps the whole tensors
        total += c * size * (len(never) + 2 * read) * (model.head_fallback == "local")
    if model.head_fallback == "local":
        total += _local(model, c, length, heads - shared)
    elif model.head_fallback == "value":
        total += c * (size + 1) * heads
    if routed and model.router_type != "threshold" and config.gate_gradient != "none":
        total += c * size * heads + (4 + c) * heads
    return total


def _local(model: MoHLlamaConfig, c: int, length: int, heads: int) -> int:
    """Bytes per token that local attention of so many heads keeps, of tokens that have not all heads on.

    Queries and outputs, which last are also copied in the order of all heads; log-sum-exp and the distant token's
    score; and keys and values of blocks, which have a window and sinks more than their queries.
    """
    size, groups, later = model.head_dim, model.num_key_value_heads, length - model.all_heads_until
    computed, block, keys = _blocks(model, later)
    of_block = 2 * c * size * heads + 8 * heads + 2 * c * groups * size * keys // block
    return (of_block * computed + c * size * heads * later) // length


def _masks(model: MoHLlamaConfig, c: int, length: int) -> int:
    """Bytes per token of the masks of local attention, one for each number of heads that share keys in some layer."""
    later, heads, groups = length - model.all_heads_until, model.num_attention_heads, model.num_key_value_heads
    if model.head_fallback != "local" or later <= 0:
        return 0
    counts = {
        count
        for number, shared in enumerate(model.shared_heads_per_layer)
        if not _is_base(model, number, length)
        for count in Counter(head * groups // heads for head in {*range(heads)} - {*shared}).values()
    }
    computed, _, keys = _blocks(model, later)
    return c * sum(counts) * keys * computed // length


def _blocks(model: MoHLlamaConfig, later: int) -> tuple[int, int, int]:
    """Tokens of whole blocks of local attention, of so many tokens; tokens of a block, and keys that it reads."""
    block = min(later, model.local_window, _BLOCK)
    keys = -(-(model.local_sinks + model.local_window + block - 1) // _MULTIPLE) * _MULTIPLE
    return -(-later // block) * block, block, keys


def loss_bytes(config: TrainConfig, model: MoHLlamaConfig, precision: Precision) -> int:
    """Bytes of the loss beside the activations (`moh_llm.training.losses`).

    Hidden states of student and teacher and their gradient; the float32 gradient of a trained head; copies of the heads
    under autocast; then the larger of the logits of a chunk of positions (3 float32 tensors with a teacher, else 2, and
    the product's own) and a product of the size of the head's weight.
    """
    c, s = precision.products, precision.stream
    tokens = config.data.micro_batch_size * config.data.sequence_length
    head = model.hidden_size * model.vocab_size
    states = tokens * model.hidden_size
    positions = chunk_positions(model.vocab_size)
    chunk, earlier = min(tokens, positions) * model.vocab_size, tokens > positions
    trained, teacher = not config.is_base_frozen, config.objective.has_teacher
    gradient = 4 * head if trained else 0  # of the head's weight; each chunk makes one and adds it to the first
    fixed = 2 * s * states + (precision.teacher * states if teacher else 0)
    if precision.casts:
        fixed += c * head * (2 if teacher and not trained else 1)
    rounded = c if c < 4 else 0  # logits and their gradient as products take and give them, where those are no float32
    softmax = ((12 if teacher else 8) + rounded) * chunk + gradient * earlier
    product = ((12 if teacher else 4) + rounded) * chunk + gradient * (1 + earlier) + (rounded * head if trained else 0)
    return fixed + max(softmax, product, gradient + s * (head + states) if trained else 0)


def copies_teacher(config: TrainConfig) -> bool:
    """Whether the teacher is a network of its own; with a frozen base only if a run trained it: see `make_teacher`."""
    tuned = any(not run.freeze_base for run in read_chain(Path(config.model)).runs)
    return config.objective.has_teacher and (tuned or not config.is_base_frozen)


def _count(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())
