"""Interval attention on a GPU as few calls of fast kernels: dense for heads that are always on, sorted for the others.

Rows of queries `[B * T * H, D]` are taken apart into the parts' queries, and the parts' outputs are put together
again; each is the gradient of the other. Sinks are keys like others in the sorted call. The distant token is merged
afterwards: with a score s it has the share sigmoid(s - lse) of the softmax.

Shapes: B batch, T queries, S keys, H query heads, KV key-value heads, D head size; G, N as in plan.py.
"""

from collections import defaultdict
from collections.abc import Callable

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention

from moh_llm.modeling.interval_attention_moh import Distant
from moh_llm.modeling.seen_moh import Seen

from .compiled import compiled
from .plan import Plan, group_table, plan_of

SortedCall = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, Plan, float], tuple[torch.Tensor, torch.Tensor]
]  # query, key, value, plan, scaling -> outputs and log-sum-exp; see `flex.sorted_attention`
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
    sorted_call: SortedCall,
) -> torch.Tensor:
    """`interval_attention` without `seen.visible` and dropout, by `sorted_call` and dense attention: `[B, T, H, D]`."""
    batch, heads, tokens, size = query.shape
    always, _ = kinds or ((), ())
    if not (seen.is_causal and tokens == key.shape[2]):
        always = ()
    others = tuple(head for head in range(heads) if head not in always)
    shared, device = heads // key.shape[1], query.device

    parts, plan = [], None
    if others:
        groups, table = group_table(others, shared, device)
        gradients = torch.is_grad_enabled() and any(states.requires_grad for states in (query, key, value))
        plan = plan_of(first, seen, table, key.shape[2], gradients)
        parts.append((groups, plan.rows))
    for kind in _equal_groups(always, shared):
        groups, table = group_table(kind, shared, device)
        token = torch.arange(batch * tokens, device=device).view(batch, tokens, 1)
        parts.append((groups, token * heads + table.flatten()))

    rows, states = [own.flatten() for _, own in parts], query.transpose(1, 2).reshape(-1, size)
    place = _places(rows, len(states))
    queries = _Apart.apply(states, place, *rows)
    outputs, lse = [], None
    for (groups, own), taken in zip(parts, queries, strict=True):
        keys, values = (
            states if len(groups) == states.shape[1] else states.index_select(1, groups) for states in (key, value)
        )
        taken = taken.view(*own.shape, size)
        if plan is not None and own is plan.rows:
            out, lse = sorted_call(taken, keys, values, plan, scaling)
        else:
            gqa = own.shape[-1] > len(groups)
            out = scaled_dot_product_attention(
                taken.transpose(1, 2), keys, values, is_causal=True, scale=scaling, enable_gqa=gqa
            ).transpose(1, 2)
        outputs.append(out.reshape(-1, size))
    if distant is None or lse is None:
        together = _together(place, rows, outputs)
    else:
        score, far = distant
        is_far = (first > seen.start) & (seen.hidden > 0)
        together = _with_distant(place, rows, outputs, lse.flatten(), is_far, score, seen.hidden, far)
    return together.view(batch, tokens, heads, size)


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
    lse: torch.Tensor,
    is_far: torch.Tensor,
    score: torch.Tensor,
    hidden: torch.Tensor,
    far: torch.Tensor,
) -> torch.Tensor:
    """Outputs put together, `[B * T, H, D]`, with the share of the distant token where `is_far` `[B, T, H]`.

    `lse` is that of the first part. `score` `[B, T, H]` and `far` `[H, D]` are the token's scores and values.
    """
    out = _together(place, rows, outputs).view(-1, *far.shape)
    lse = _together(place, rows[:1], [lse[:, None]]).view(-1, *is_far.shape[1:])
    # Minus infinity is chosen last, so that no gradient is infinity times zero.
    excess = torch.where(is_far, score + hidden.clamp_min(1).log() - lse, -torch.inf)
    share = excess.sigmoid().view(*out.shape[:2], 1)
    return (out + share * (far - out)).to(out.dtype)


def _places(rows: list[torch.Tensor], size: int) -> torch.Tensor:
    """Where each of `size` rows is in the parts one after the other, given the row of each entry; `size` is none."""
    rows = torch.cat(rows)
    return rows.new_empty(size + 1).scatter_(0, rows, torch.arange(len(rows), device=rows.device))[:-1]


def _taken(states: torch.Tensor, rows: list[torch.Tensor]) -> list[torch.Tensor]:
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
    if torch.is_grad_enabled() and any(part.requires_grad for part in parts):
        return _Together.apply(place, *rows, *parts)
    return _joined(parts, place)  # dynamo would not trace the other


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
