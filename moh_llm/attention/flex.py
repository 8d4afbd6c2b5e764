"""Attention of sorted queries by PyTorch's FlexAttention, compiled on a GPU.

One compilation serves all lengths, batch sizes and numbers of key-value heads: these sizes are marked dynamic,
key-value heads become rows of the batch, and lengths are padded to whole blocks. Another head size or dtype, gradients,
sinks, and a batch of one row with one key-value head each need their own compilation.

Shapes: B batch, S keys, D head size; G groups of heads, N entries, M and K blocks as in plan.py; P = B * G.
"""

import math

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention import flex_attention as flex
from torch.nn.functional import pad, scaled_dot_product_attention

from .call import Call
from .compiled import DEVICES, can_compile, compiled
from .parts import Kernels, attention_of_parts, why_not_sorted
from .plan import BLOCK, Plan, block_count
from .windowed import windowed_attention

# By default PyTorch prefers FlashAttention 2; cuDNN's kernel is faster on Hopper.
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


def flex_attention(call: Call) -> Tensor:
    """`interval_attention` with FlexAttention for sorted queries, `[B, T, H, D]`."""
    return attention_of_parts(call, KERNELS)


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> tuple[Tensor, None]:
    """Dense causal attention `[B, H, T, D]` of T queries to T keys, by SDPA."""
    with sdpa_kernel(_DENSE, set_priority=True):
        how = {"is_causal": True, "scale": scaling, "enable_gqa": query.shape[1] > key.shape[1]}
        return scaled_dot_product_attention(query, key, value, **how), None


def sorted_attention(query: Tensor, key: Tensor, value: Tensor, plan: Plan, scaling: float) -> tuple[Tensor, Tensor]:
    """Attention of sorted queries: outputs `[B, G, N, D]` and log-sum-exp `[B, G, N]` in float32 or wider.

    `query` is `[B, G, N, D]`; `key` and `value` are `[B, G, S, D]`. Both results have gradients. An entry that sees no
    key gets zeros and a log-sum-exp of minus infinity.
    """
    usual = query.shape[-1] ** -0.5
    if not math.isclose(scaling, usual):  # a scale other than the default would be compiled in
        query = query * (scaling / usual)
    missing = block_count(key.shape[2]) * BLOCK - key.shape[2]
    states = [query, *(pad(states, (0, 0, 0, missing)) if missing else states for states in (key, value))]
    states = [_as_rows(states, -1, BLOCK, states.shape[-1]) for states in states]
    bounds = [bound for bound in (plan.last, plan.low, plan.start, plan.sink_end) if bound is not None]
    lists = [*plan.keys, *(plan.queries or ())]
    indices = [_as_rows(tensor, *tensor.shape[2:]) for tensor in (*bounds, *lists)]
    out, lse = _attention(*states, indices[: len(bounds)], indices[len(bounds) :])
    return out.view(query.shape), lse.view(query.shape[:-1])


def _as_rows(tensor: Tensor, *shape: int) -> Tensor:
    """Reshape `[B, G, ...]` to `[P, *shape]` without a view, because dynamo guards on the base of a view."""
    return torch.ops.aten._unsafe_view(tensor.contiguous(), (tensor.shape[0] * tensor.shape[1], *shape))


@compiled
def _attention(
    query: Tensor, key: Tensor, value: Tensor, bounds: list[Tensor], lists: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Outputs `[P, 1, N, D]` and log-sum-exp `[P, 1, N]` of states `[P, blocks, 128, D]`.

    `bounds` are last, low and, with sinks, start and sink_end, each `[P, N]`; `lists` are the fields of `plan.keys`
    and, with gradients, of `plan.queries`.
    """
    query, key, value = (states.flatten(1, 2).unsqueeze(1) for states in (query, key, value))
    last, low, *sinks = bounds

    def is_seen(row: Tensor, _: Tensor, entry: Tensor, place: Tensor) -> Tensor:
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
