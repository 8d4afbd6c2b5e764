"""Interval attention on a GPU as a few calls of fast kernels.

If each row is one document without padding, heads that are always on use dense attention, and heads that are never on
use a windowed kernel. All other queries are sorted (plan.py) and computed by one block-sparse call.

The rows of the queries `[B * T * H, D]` are split into the parts' queries, and the parts' outputs are joined again;
each step is the gradient of the other. A part's softmax covers the keys that the part reads. The distant token, and the
few sinks of a single document, are merged afterwards by log-sum-exp; other sinks are keys of the sorted call.

Shapes: B batch, T queries, S keys, H query heads, KV key-value heads, D head size; G, N as in plan.py.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moh_llm.modeling.seen_moh import Seen

from .call import Call, Kinds, equal_groups
from .compiled import compiled
from .plan import Plan, group_table, plan_of
from .windowed import why_not_windowed

Outputs = tuple[Tensor, Tensor | None]
_MOST_SINKS = 8  # sinks that are merged: the compiled code is unrolled over them


class Kernels(NamedTuple):
    """The kernels of a backend.

    Attributes:
        sorted: query, key, value, plan, scaling -> outputs and log-sum-exp; see `flex.sorted_attention`.
        causal: query `[B, H, T, D]`, key, value `[B, KV, T, D]`, scaling -> outputs, and log-sum-exp or None.
        windowed: query, key, value `[B, KV, S, D]`, scaling, window -> outputs and log-sum-exp; see `windowed.py`.
    """

    sorted: Callable[[Tensor, Tensor, Tensor, Plan, float], Outputs]
    causal: Callable[[Tensor, Tensor, Tensor, float], Outputs]
    windowed: Callable[[Tensor, Tensor, Tensor, float, int], Outputs]


def why_not_sorted(call: Call) -> str | None:
    """Why queries cannot be sorted into blocks, whatever the kernels; None if they can."""
    if call.query.shape[2] == 1:
        return "a decoding step has no blocks of queries"
    return None if call.is_one_dtype else "queries, keys and values differ in dtype"


def attention_of_parts(call: Call, kernels: Kernels) -> Tensor:
    """`interval_attention` without `seen.visible` and dropout, by a backend's kernels: `[B, T, H, D]`."""
    query, key, value, first, seen, scaling, distant, _, kinds = call
    batch, heads, tokens, size = query.shape
    is_whole = seen.is_causal and tokens == key.shape[2] and seen.sinks <= _MOST_SINKS
    always, never = kinds if kinds and is_whole else ((), ())
    if not seen.window or why_not_windowed(query.device, query.dtype, size) is not None:
        never = ()
    sinks = [states[:, :, : seen.sinks] for states in (key, value)] if is_whole and seen.sinks else []
    if sinks:
        seen = seen._replace(sinks=0)
    parts, place = _parts(first, seen, (always, never), key, scaling, kernels, _wants_gradients(query, key, value))

    # Not a view: dynamo guards on the base of a view.
    states = torch.ops.aten._unsafe_view(query.transpose(1, 2).contiguous(), (-1, size))
    rows = [part.rows.flatten() for part in parts]
    of_parts = _Apart.apply(states, place, *rows) if _wants_gradients(states) else _taken(states, rows)
    outputs, lses = [], []
    for part, own in zip(parts, of_parts, strict=True):
        taken = (
            states if len(part.groups) == states.shape[1] else states.index_select(1, part.groups)
            for states in (key, value)
        )
        out, lse = part.attend(own.view(*part.rows.shape, size), *taken)
        outputs.append(out.reshape(-1, size))
        lses += [] if lse is None else [lse.reshape(-1, 1)]
    if not lses or (not sinks and distant is None):
        return _together(place, rows, outputs).view(batch, tokens, heads, size)
    # The first parts have a log-sum-exp. The others' heads are on, where nothing is merged.
    sinks = [states.repeat_interleave(heads // key.shape[1], 1) for states in sinks]  # [B, H, sinks, D]
    values = [value.unsqueeze(1) for value in sinks[1].unbind(2)] if sinks else []
    values += [] if distant is None else [distant[1]]
    far = [] if distant is None else [distant[0], seen.start, seen.hidden]
    # Two compiled passes, because in one pass every thread of an output row would recompute the row's weights.
    weights = _weights(place, rows[: len(lses)], lses, first, states, sinks[:1], far, scaling)
    return _weighted(place, rows, outputs, weights, values)


class _Part(NamedTuple):
    """Queries that one kernel call computes.

    Attributes:
        groups: key-value heads that the call reads, `[G]`.
        rows: rows of its queries: `[B, G, N]` if they are sorted, else `[B, tokens, heads]`.
        attend: maps queries, keys and values to outputs in the order of `rows`, and their log-sum-exp or None.
    """

    groups: Tensor
    rows: Tensor
    attend: Callable[[Tensor, Tensor, Tensor], Outputs]


def _parts(
    first: Tensor, seen: Seen, kinds: Kinds, key: Tensor, scaling: float, kernels: Kernels, gradients: bool
) -> tuple[list[_Part], Tensor]:
    """All parts, the ones with a log-sum-exp first, and the place of each row in their concatenation, `[B * T * H]`."""
    tokens, heads = first.shape[1:]
    shared, device = heads // key.shape[1], first.device
    always, never = kinds
    others = tuple(head for head in range(heads) if head not in always and head not in never)
    groups, attends, sorted_rows = [], [], []
    if others:
        own, table = group_table(others, shared, device)
        plan = plan_of(first, seen, table, key.shape[2], gradients)
        groups, sorted_rows = [own], [plan.rows]
        attends = [lambda *states: kernels.sorted(*states, plan, scaling)]
    windowed = functools.partial(_windowed, window=seen.window, scaling=scaling, windowed=kernels.windowed)
    dense = functools.partial(_dense, scaling=scaling, causal=kernels.causal)
    tables, spans = [], []
    for kind, begin, end, attend in (
        (never if seen.lead < tokens else (), seen.lead, tokens, windowed),
        (never if seen.lead else (), 0, seen.lead, dense),
        (always, 0, tokens, dense),
    ):
        for same in equal_groups(kind, shared):
            own, table = group_table(same, shared, device)
            groups.append(own)
            attends.append(attend)
            tables.append(table.flatten())
            spans.append((begin, end))
    rows, place = _placed(first, sorted_rows, tables, spans)
    return [_Part(*part) for part in zip(groups, rows, attends, strict=True)], place


@compiled
def _placed(
    first: Tensor, rows: list[Tensor], tables: list[Tensor], spans: list[tuple[int, int]]
) -> tuple[list[Tensor], Tensor]:
    """The rows of each part, and the place of each row in the concatenated parts.

    `rows` belong to the sorted queries. Every other part has the heads of one table and the tokens of one span.
    """
    batch, tokens, heads = first.shape
    row = torch.arange(batch * tokens, device=first.device).view(batch, tokens, 1) * heads
    rows = [*rows, *(row[:, slice(*span)] + table for table, span in zip(tables, spans, strict=True))]
    found = torch.cat([own.flatten() for own in rows])
    place = found.new_empty(batch * tokens * heads + 1)  # the last place is for padding entries
    return rows, place.scatter(0, found, torch.arange(len(found), device=first.device))[:-1]


def _wants_gradients(*states: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in states)


def _dense(query: Tensor, key: Tensor, value: Tensor, scaling: float, causal: Callable) -> Outputs:
    """Causal attention of the first tokens, `[B, tokens, heads, D]`; nothing is merged into it, so no log-sum-exp."""
    end = query.shape[1]
    return causal(query.transpose(1, 2), key[:, :, :end], value[:, :, :end], scaling)[0].transpose(1, 2), None


def _windowed(query: Tensor, key: Tensor, value: Tensor, window: int, scaling: float, windowed: Callable) -> Outputs:
    """Attention of the last tokens, `[B, tokens, heads, D]`, to windows, and its log-sum-exp."""
    begin = max(key.shape[2] - query.shape[1] - window + 1, 0)
    out, lse = windowed(query.transpose(1, 2), key[:, :, begin:], value[:, :, begin:], scaling, window)
    return out.transpose(1, 2), lse.transpose(1, 2)


@compiled
def _weights(
    place: Tensor,
    rows: list[Tensor],
    lses: list[Tensor],
    first: Tensor,
    query: Tensor,
    sinks: list[Tensor],
    far: list[Tensor],
    scaling: float,
) -> Tensor:
    """Softmax weights of the part's output, the sinks and the distant token, `[B, T, H, all]`.

    `query` holds rows of queries; `sinks` holds keys `[B, H, sinks, D]`; `far` holds the distant token's scores
    `[B, T, H]`, `seen.start` and `seen.hidden`. Either list may be empty.
    """
    scores = [_together(place, rows, lses).view(*first.shape, 1)]
    for keys in sinks:
        by_token = query.view(*first.shape, keys.shape[-1]).to(scores[0].dtype)
        found = torch.stack([(by_token * key.unsqueeze(1)).sum(-1) for key in keys.unbind(2)], dim=-1) * scaling
        number = torch.arange(keys.shape[2], device=keys.device)
        scores.append(found.masked_fill(first.unsqueeze(-1) <= number, -torch.inf))
    if far:
        score, start, hidden = far
        score = (score + hidden.clamp_min(1).log()).to(scores[0].dtype)
        scores.append(torch.where((first > start) & (hidden > 0), score, -torch.inf).unsqueeze(-1))
    return torch.cat(scores, dim=-1).softmax(-1)


@compiled
def _weighted(
    place: Tensor, rows: list[Tensor], outputs: list[Tensor], weights: Tensor, values: list[Tensor]
) -> Tensor:
    """The weighted sum of the joined outputs and of `values`, each `[B, 1, H, D]` or `[H, D]`: `[B, T, H, D]`."""
    out = _together(place, rows, outputs)
    own, *others = weights.unsqueeze(-2).unbind(-1)  # each [B, T, H, 1]
    merged = out.view(*own.shape[:-1], out.shape[-1]) * own
    for weight, value in zip(others, values, strict=True):
        merged = merged + weight * value
    return merged.to(out.dtype)


@compiled
def _taken(states: Tensor, rows: Sequence[Tensor]) -> list[Tensor]:
    """The rows of each part; padding entries get an arbitrary row."""
    return [states[own.clamp_max(len(states) - 1)] for own in rows]


@compiled
def _joined(parts: list[Tensor], place: Tensor) -> Tensor:
    """The rows at `place` in the concatenated parts, without concatenating them."""
    joined, begin = None, 0
    for part in parts:
        is_own = (place >= begin) & (place < begin + len(part))
        taken = part[torch.where(is_own, place - begin, 0)]
        joined = taken if joined is None else torch.where(is_own[:, None], taken, joined)
        begin += len(part)
    return joined


def _together(place: Tensor, rows: list[Tensor], parts: list[Tensor]) -> Tensor:
    """`_joined` with gradients, for which it needs the rows of each part."""
    if _wants_gradients(*parts):
        return _Together.apply(place, *rows, *parts)
    return _joined(parts, place)  # dynamo would not trace the other


class _Apart(torch.autograd.Function):
    """`_taken`, where each row is in at most one part."""

    @staticmethod
    def forward(ctx, states: Tensor, place: Tensor, *rows: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(place)
        return tuple(_taken(states, rows))

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (place,) = ctx.saved_tensors
        return _joined(list(gradients), place), None, *[None] * len(gradients)


class _Together(torch.autograd.Function):
    """`_joined`; the arguments are `place`, the rows of each part, and the parts."""

    @staticmethod
    def forward(ctx, place: Tensor, *rows_and_parts: Tensor) -> Tensor:
        count = len(rows_and_parts) // 2
        ctx.save_for_backward(*rows_and_parts[:count])
        return _joined(list(rows_and_parts[count:]), place)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of each part; padding entries see no key, so their gradient does not matter."""
        rows = ctx.saved_tensors
        return None, *[None] * len(rows), *_taken(gradient, rows)
