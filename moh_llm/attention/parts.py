"""Interval attention on a GPU as few calls of fast kernels.

Of one document without padding heads that are always on are dense attention, and those that are never on windows, where
PyTorch has a kernel for them. All other queries are sorted.

Rows of queries `[B * T * H, D]` are taken apart into the parts' queries, and the parts' outputs are put together
again; each is the gradient of the other. Sinks are keys like others in the sorted call, and are merged with windows.
The distant token is merged afterwards: with a score s it has the share sigmoid(s - lse) of the softmax.

Shapes: B batch, T queries, S keys, H query heads, KV key-value heads, D head size; G, N as in plan.py.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.autograd.function import once_differentiable

from moh_llm.modeling.interval_attention_moh import Distant
from moh_llm.modeling.seen_moh import Seen

from .compiled import compiled
from .plan import Plan, group_table, plan_of
from .windowed import why_not_windowed

Outputs = tuple[torch.Tensor, torch.Tensor | None]


class Calls(NamedTuple):
    """The kernels of a backend.

    Attributes:
        sorted: query, key, value, plan, scaling -> outputs and log-sum-exp; see `flex.sorted_attention`.
        causal: query `[B, H, T, D]`, key, value `[B, KV, T, D]`, scaling -> outputs, and log-sum-exp or None.
        windowed: query, key, value `[B, KV, S, D]`, window, scaling -> outputs and log-sum-exp; see `windowed.py`.
    """

    sorted: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Plan, float], Outputs]
    causal: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], Outputs]
    windowed: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, float], Outputs]


Kinds = tuple[tuple[int, ...], tuple[int, ...]]


def attention_of_parts(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    first: torch.Tensor,
    seen: Seen,
    scaling: float,
    distant: Distant | None,
    kinds: Kinds | None,
    calls: Calls,
) -> torch.Tensor:
    """`interval_attention` without `seen.visible` and dropout, by a backend's kernels: `[B, T, H, D]`."""
    batch, heads, tokens, size = query.shape
    always, never = kinds or ((), ())
    if not (seen.is_causal and tokens == key.shape[2]):
        always = never = ()
    elif not seen.window or why_not_windowed(query.device, query.dtype, size) is not None:
        never = ()
    parts = _parts(first, seen, (always, never), key, scaling, calls, _wants_gradients(query, key, value))

    rows, states = [part.rows.flatten() for part in parts], query.transpose(1, 2).reshape(-1, size)
    place = _places(rows, len(states))
    queries = _apart(states, place, rows)
    outputs, lses = [], []
    for part, own in zip(parts, queries, strict=True):
        taken = (
            states if len(part.groups) == states.shape[1] else states.index_select(1, part.groups)
            for states in (key, value)
        )
        out, lse = part.attend(own.view(*part.rows.shape, size), *taken)
        outputs.append(out.reshape(-1, size))
        lses += [] if lse is None else [lse.reshape(-1, 1)]
    if distant is None or not lses:
        together = _together(place, rows, outputs)
    else:
        score, far = distant
        is_far = (first > seen.start) & (seen.hidden > 0)
        together = _with_distant(place, rows, outputs, lses, is_far, score, seen.hidden, far)
    return together.view(batch, tokens, heads, size)


class _Part(NamedTuple):
    """Queries that one call computes.

    Attributes:
        groups: the key-value heads that it reads, `[G]`.
        rows: the rows of its queries, `[B, G, N]` of sorted ones, `[B, tokens, heads]` of others.
        attend: gives outputs in this order, and their log-sum-exp or None, of queries, keys and values.
    """

    groups: torch.Tensor
    rows: torch.Tensor
    attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]


def _parts(
    first: torch.Tensor,
    seen: Seen,
    kinds: Kinds,
    key: torch.Tensor,
    scaling: float,
    calls: Calls,
    gradients: bool,
) -> list[_Part]:
    """The parts of all queries, those with a log-sum-exp first."""
    batch, tokens, heads = first.shape
    always, never = kinds
    others = tuple(head for head in range(heads) if head not in always and head not in never)
    shared, device = heads // key.shape[1], first.device
    parts = []
    if others:
        groups, table = group_table(others, shared, device)
        plan = plan_of(first, seen, table, key.shape[2], gradients)
        parts.append(_Part(groups, plan.rows, lambda *states: calls.sorted(*states, plan, scaling)))

    def add(kind: tuple[int, ...], begin: int, end: int, attend: Callable) -> None:
        """The part of these heads and tokens; of no more heads in one group than in another."""
        if begin < end:
            groups, table = group_table(kind, shared, device)
            row = torch.arange(batch, device=device)[:, None] * tokens + torch.arange(begin, end, device=device)
            parts.append(_Part(groups, row[..., None] * heads + table.flatten(), attend))

    for kind in _equal_groups(never, shared):
        add(kind, seen.lead, tokens, lambda *states: _windowed(*states, seen, scaling, calls.windowed))
    for kind in _equal_groups(never, shared):
        add(kind, 0, min(seen.lead, tokens), lambda *states: _dense(*states, scaling, calls.causal))
    for kind in _equal_groups(always, shared):
        add(kind, 0, tokens, lambda *states: _dense(*states, scaling, calls.causal))
    return parts


def _wants_gradients(*states: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in states)


def _dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, causal: Callable) -> Outputs:
    """Causal attention of the first tokens, `[B, tokens, heads, D]`. These have no distant token."""
    end = query.shape[1]
    return causal(query.transpose(1, 2), key[:, :, :end], value[:, :, :end], scaling)[0].transpose(1, 2), None


def _windowed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: Seen, scaling: float, windowed: Callable
) -> Outputs:
    """Attention of the last tokens, `[B, tokens, heads, D]`, to windows and sinks, and its log-sum-exp."""
    query, begin = query.transpose(1, 2), max(key.shape[2] - query.shape[1] - seen.window + 1, 0)
    out, lse = windowed(query, key[:, :, begin:], value[:, :, begin:], seen.window, scaling)
    if seen.sinks:
        near = seen.near[:1, -query.shape[2] :, 0].contiguous()
        sinks = (
            states[:, :, : seen.sinks].repeat_interleave(query.shape[1] // key.shape[1], 1) for states in (key, value)
        )
        out, lse = _with_sinks(out, lse, query, *sinks, near, scaling)
    return out.transpose(1, 2), lse.transpose(1, 2)


@compiled
def _with_sinks(
    out: torch.Tensor,
    lse: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    near: torch.Tensor,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs `[B, H, T, D]` and log-sum-exp with sinks `[B, H, sinks, D]`, where they are before `near` `[1, T]`."""
    scores = (query.unsqueeze(3).float() * key.unsqueeze(2).float()).sum(-1) * scaling  # [B, H, T, sinks]
    scores = scores.masked_fill(torch.arange(key.shape[2], device=key.device) >= near[..., None], -torch.inf)
    total = torch.cat([lse.unsqueeze(-1), scores], dim=-1).logsumexp(-1)
    sinks = ((scores - total.unsqueeze(-1)).exp().unsqueeze(-1) * value.unsqueeze(2)).sum(3)
    return (out * (lse - total).exp().unsqueeze(-1) + sinks).to(out.dtype), total


def _equal_groups(heads: tuple[int, ...], shared: int) -> list[tuple[int, ...]]:
    """The heads, those together whose groups have the same number of them."""
    groups, kinds = defaultdict(list), defaultdict(list)
    for head in heads:
        groups[head // shared].append(head)
    for group in groups.values():
        kinds[len(group)] += group
    return [tuple(kind) for kind in kinds.values()]


@compiled
def _with_distant(
    place: torch.Tensor,
    rows: list[torch.Tensor],
    outputs: list[torch.Tensor],
    lses: list[torch.Tensor],
    is_far: torch.Tensor,
    score: torch.Tensor,
    hidden: torch.Tensor,
    far: torch.Tensor,
) -> torch.Tensor:
    """Outputs put together, `[B * T, H, D]`, with the share of the distant token where `is_far` `[B, T, H]`.

    `lses` are those of the first parts. `score` `[B, T, H]` and `far` `[H, D]` are the token's scores and values.
    """
    out = _together(place, rows, outputs).view(-1, *far.shape)
    lse = _together(place, rows[: len(lses)], lses).view(-1, *is_far.shape[1:])
    # Minus infinity is chosen last, so that no gradient is infinity times zero.
    excess = torch.where(is_far, score + hidden.clamp_min(1).log() - lse, -torch.inf)
    share = excess.sigmoid().view(*out.shape[:2], 1)
    return (out + share * (far - out)).to(out.dtype)


def _places(rows: list[torch.Tensor], size: int) -> torch.Tensor:
    """Where each of `size` rows is in the parts one after the other, given the row of each entry; `size` is none."""
    rows = torch.cat(rows)
    return rows.new_empty(size + 1).scatter_(0, rows, torch.arange(len(rows), device=rows.device))[:-1]


def _taken(states: torch.Tensor, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Rows of each part; any row where there is none."""
    return [states[own.clamp_max(len(states) - 1)] for own in rows]


@compiled
def _joined(parts: list[torch.Tensor], place: torch.Tensor) -> torch.Tensor:
    """Rows at these places in the parts one after the other; any where parts do not reach as far."""
    joined, begin = None, 0
    for part in parts:
        is_own = (place >= begin) & (place < begin + len(part))
        taken = part[torch.where(is_own, place - begin, 0)]
        joined = taken if joined is None else torch.where(is_own[:, None], taken, joined)
        begin += len(part)
    return joined


def _together(place: torch.Tensor, rows: list[torch.Tensor], parts: list[torch.Tensor]) -> torch.Tensor:
    """`_joined`, given the rows of each part, too, for gradients."""
    if _wants_gradients(*parts):
        return _Together.apply(place, *rows, *parts)
    return _joined(parts, place)  # dynamo would not trace the other


def _apart(states: torch.Tensor, place: torch.Tensor, rows: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """`_taken`, given where rows are, too, for gradients."""
    return _Apart.apply(states, place, *rows) if _wants_gradients(states) else _taken(states, rows)


class _Apart(torch.autograd.Function):
    """`_taken`, of rows that are each in one part at most."""

    @staticmethod
    def forward(ctx, states: torch.Tensor, place: torch.Tensor, *rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The rows of each part."""
        ctx.save_for_backward(place)
        return tuple(_taken(states, rows))

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradient of `states`."""
        (place,) = ctx.saved_tensors
        return _joined(list(gradients), place), None, *[None] * len(gradients)


class _Together(torch.autograd.Function):
    """`_joined`, given the rows of each part and then the parts."""

    @staticmethod
    def forward(ctx, place: torch.Tensor, *rows_and_parts: torch.Tensor) -> torch.Tensor:
        """The rows one after the other."""
        count = len(rows_and_parts) // 2
        ctx.save_for_backward(*rows_and_parts[:count])
        return _joined(list(rows_and_parts[count:]), place)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradient of each part. What fills up sees nothing, so that its own does not matter."""
        rows = ctx.saved_tensors
        return None, *[None] * len(rows), *_taken(gradient, rows)
