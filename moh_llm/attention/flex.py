"""The attention of sorted queries by FlexAttention: PyTorch alone, compiled on a GPU, plain on a CPU.

One compilation serves all lengths, batches and numbers of key-value heads: the compiler is told that these sizes
change, key-value heads are rows of the batch, and lengths are whole blocks. What is compiled anew is another head size
or dtype, a pass with gradients or with sinks, and a batch of one row with one key-value head.

Shapes: B batch, S keys, D head size; G groups of heads, N entries, M and K blocks as in plan.py; P = B * G.
"""

import math

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention import flex_attention as flex
from torch.nn.functional import pad, scaled_dot_product_attention

from .call import Call
from .compiled import DEVICES, can_compile, compiled
from .parts import Kernels, attention_of_parts, why_not_sorted
from .plan import BLOCK, Plan, block_count
from .windowed import windowed_attention

# PyTorch takes FlashAttention 2 where it may choose; cuDNN's kernel is the faster one on Hopper.
_DENSE = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def why_not(call: Call) -> str | None:
    """Why `flex_attention` does not take this call; None if it does."""
    if call.query.device.type not in DEVICES:
        return "FlexAttention is compiled for GPUs"
    if not can_compile(call.query.device):
        return "Triton is not installed, or does not support this GPU"
    if call.query.shape[-1] < 16 or call.query.dtype == torch.float64:
        return "FlexAttention takes head sizes from 16, and no float64"
    return why_not_sorted(call)


def flex_attention(call: Call) -> torch.Tensor:
    """`interval_attention` with FlexAttention for sorted queries, `[B, T, H, D]`."""
    return attention_of_parts(call, KERNELS)


def causal_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
) -> tuple[torch.Tensor, None]:
    """Dense attention `[B, H, T, D]` of each query to all keys up to its own, of as many keys, by SDPA."""
    with sdpa_kernel(_DENSE, set_priority=True):
        how = {"is_causal": True, "scale": scaling, "enable_gqa": query.shape[1] > key.shape[1]}
        return scaled_dot_product_attention(query, key, value, **how), None


def sorted_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: Plan, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs `[B, G, N, D]` and their log-sum-exp `[B, G, N]`, float32 at least; both have gradients.

    `query` is sorted, `[B, G, N, D]`; `key` and `value` are `[B, G, S, D]`. An entry that sees nothing has an output of
    zero and a log-sum-exp of minus infinity.
    """
    usual = query.shape[-1] ** -0.5
    if not math.isclose(scaling, usual):  # a number would be compiled in
        query = query * (scaling / usual)
    missing = block_count(key.shape[2]) * BLOCK - key.shape[2]
    states = [query, *(pad(states, (0, 0, 0, missing)) if missing else states for states in (key, value))]
    states = [_as_rows(states, -1, BLOCK, states.shape[-1]) for states in states]
    bounds = [bound for bound in (plan.last, plan.low, plan.start, plan.sink_end) if bound is not None]
    lists = [*plan.keys, *(plan.queries or ())]
    indices = [_as_rows(tensor, *tensor.shape[2:]) for tensor in (*bounds, *lists)]
    out, lse = _attention(*states, indices[: len(bounds)], indices[len(bounds) :])
    return out.view(query.shape), lse.view(query.shape[:-1])


def _as_rows(tensor: torch.Tensor, *shape: int) -> torch.Tensor:
    """A tensor `[B, G, ...]` as `[P, *shape]`, and no view: of a view dynamo looks at what it is a view of."""
    return torch.ops.aten._unsafe_view(tensor.contiguous(), (tensor.shape[0] * tensor.shape[1], *shape))


@compiled
def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: list[torch.Tensor], lists: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs `[P, 1, N, D]` and log-sum-exp `[P, 1, N]` of states `[P, blocks, 128, D]`.

    `bounds` are last, low, and where there are sinks their start and end, `[P, N]`; `lists` those of `Blocks` for keys,
    and for gradients those for queries.
    """
    query, key, value = (states.flatten(1, 2).unsqueeze(1) for states in (query, key, value))
    last, low, *sinks = bounds

    def is_seen(row: torch.Tensor, _: torch.Tensor, entry: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        seen = place >= low[row, entry]
        if sinks:
            seen = seen | ((place >= sinks[0][row, entry]) & (place < sinks[1][row, entry]))
        return seen & (place <= last[row, entry])

    lists = [tensor.unsqueeze(1) for tensor in lists]
    lists += [None] * (8 - len(lists))
    mask = flex.BlockMask((query.shape[2], key.shape[2]), *lists, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=is_seen)
    out, others = flex.flex_attention(query, key, value, block_mask=mask, return_aux=flex.AuxRequest(lse=True))
    return out, others.lse


KERNELS = Kernels(sorted_attention, causal_attention, windowed_attention)
