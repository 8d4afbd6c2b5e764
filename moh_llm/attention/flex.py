"""The attention of sorted queries by FlexAttention: PyTorch alone, compiled on a GPU, plain on a CPU.

One compilation serves all lengths, batches and numbers of key-value heads: the compiler is told that these sizes
change, key-value heads are rows of the batch, and lengths are whole blocks. What is compiled anew is another head size
or dtype, a pass with gradients or with sinks, and a batch of one row with one key-value head.

Shapes: B batch, S keys, D head size; G groups of heads, N entries, M and K blocks as in plan.py; P = B * G.
"""

import functools
import math
from collections.abc import Callable

import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.nn.functional import pad

from .plan import BLOCK, Plan, block_count


def unsupported(query: torch.Tensor) -> str | None:
    """Why FlexAttention's kernels do not take queries `[B, H, T, D]`; None where they do."""
    if query.device.type not in ("cuda", "xpu"):
        return "FlexAttention is compiled for GPUs alone"
    return "FlexAttention takes head sizes from 16" if query.shape[-1] < 16 else None


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
    states = [states.flatten(0, 1).contiguous().unflatten(1, (-1, BLOCK)) for states in states]
    bounds = [bound for bound in (plan.last, plan.low, plan.start, plan.sink_end) if bound is not None]
    lists = [*plan.keys, *(plan.queries or ())]
    indices = [tensor.flatten(0, 1) for tensor in (*bounds, *lists)]
    call = _attention
    if query.device.type != "cpu" and not torch.compiler.is_compiling():
        call = _compiled(_attention)
        mark_sizes(states, indices)
    out, lse = call(*states, indices[: len(bounds)], indices[len(bounds) :])
    return out.view(query.shape), lse.view(query.shape[:-1])


def mark_sizes(states: list[torch.Tensor], indices: list[torch.Tensor]) -> None:
    """Tell the compiler that sizes change: P and the number of blocks of `states`, all of `indices`."""
    for tensor in states:
        torch._dynamo.maybe_mark_dynamic(tensor, (0, 1))
    for tensor in indices:
        torch._dynamo.maybe_mark_dynamic(tensor, tuple(range(tensor.dim())))


@functools.cache
def _compiled(function: Callable) -> Callable:
    return torch.compile(function, fullgraph=True)


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
    mask = BlockMask((query.shape[2], key.shape[2]), *lists, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=is_seen)
    out, others = flex_attention(query, key, value, block_mask=mask, return_aux=AuxRequest(lse=True))
    return out, others.lse
