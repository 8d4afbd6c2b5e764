"""PyTorch's flash attention on a CPU, in parts that are merged: documents, windows with a distant token, gradients.

Given the outputs and the log-sum-exp of all keys, the kernel's gradients of some keys are their share of the whole.

Shapes: B batch, T queries, S keys (of the cache and of this pass), H query heads, KV key-value heads, D head size, N
blocks, K keys of a block.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from moh_llm.modeling.interval_attention_moh import Distant
from moh_llm.modeling.seen_moh import Seen

_BLOCK = 128  # queries of a block at most: fewer read fewer keys that they do not see, but copy each key more often
_MULTIPLE = 16  # keys of a block are a multiple of this: with others AMX and masks of bfloat16 take 1.4 times as long
_CHUNK, _LEAST_CHUNKS = 2048, 4096  # queries of a part of causal attention, and those that are worth parting
flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # returns the log-sum-exp, too
_flash_gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def kept(seen: Seen, name: Any, make: Callable[[], Any]) -> Any:
    """What `make` gives, made once for all layers of a pass."""
    if seen.scratch is None:
        return make()
    if name not in seen.scratch:
        seen.scratch[name] = make()
    return seen.scratch[name]


def merge(
    one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to two sets of keys, given each one's outputs `[..., D]` and log-sum-exp of the scores `[...]`."""
    weight = torch.sigmoid(other[1] - one[1]).unsqueeze(-1).to(one[0].dtype)
    return one[0].lerp(other[0], weight), torch.logaddexp(one[1], other[1])


def places_of(heads: Iterable[int]) -> slice | torch.Tensor:
    """Ids of heads as a slice where they are neighbours, which costs no copy, else as a tensor."""
    ids = list(heads)
    if ids and ids == list(range(ids[0], ids[-1] + 1)):
        return slice(ids[0], ids[-1] + 1)
    return torch.tensor(ids, dtype=torch.long)


def take(tensor: torch.Tensor, dim: int, places: slice | torch.Tensor) -> torch.Tensor:
    """The entries at these places of a dimension."""
    if isinstance(places, slice):
        return tensor.narrow(dim, places.start, places.stop - places.start)
    return tensor.index_select(dim, places)


def put(tensor: torch.Tensor, dim: int, places: slice | torch.Tensor, entries: torch.Tensor) -> None:
    """Write what `take` reads."""
    if isinstance(places, slice):
        take(tensor, dim, places).copy_(entries)
    else:
        tensor.index_copy_(dim, places, entries)


def states_of(
    heads: list[int], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries of these heads, and keys and values that as many of them in a row share."""
    count, groups = query.shape[1], key.shape[1]
    if len(heads) == count:
        return query, key, value
    shared = count // groups
    of_heads = [head // shared for head in heads]
    whole = sorted(set(of_heads))
    if len(whole) * (each := len(heads) // len(whole)) == len(heads) and of_heads[::each] == whole:
        of_heads = whole
    # Outputs get the strides of a copy, in which a token's heads are neighbours.
    own = take(query.transpose(1, 2), 2, places_of(heads)).transpose(1, 2)
    if len(of_heads) == len(set(of_heads)):
        places: slice | torch.Tensor = places_of(of_heads)
        return own, take(key, 1, places), take(value, 1, places)
    index = torch.tensor(of_heads)
    return own, key.index_select(1, index), value.index_select(1, index)


def causal_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> torch.Tensor:
    """Attention `[B, T, H, D]` of the last T of S tokens to all before them and themselves. For inference.

    The kernel gives each thread as many queries, in order of rows and heads, and later queries see more keys. So where
    threads do not divide the number of heads, one thread has the later queries of a head. Queries in parts, of which
    all but their own keys are read without a mask, are shared out evenly.
    """
    length, before = query.shape[2], key.shape[2] - query.shape[2]
    uneven = query.shape[0] * query.shape[1] % torch.get_num_threads() and length >= _LEAST_CHUNKS
    chunk, outputs = _CHUNK if uneven else length, []
    for begin in range(0, length, chunk):
        rows, seen = slice(begin, begin + chunk), before + begin
        end = min(seen + chunk, key.shape[2])
        part = flash_attention(
            query[:, :, rows], key[:, :, seen:end], value[:, :, seen:end], is_causal=True, scale=scaling
        )
        if seen:
            states = query[:, :, rows], key[:, :, :seen], value[:, :, :seen]
            part = merge(part, flash_attention(*states, scale=scaling))
        outputs.append(part[0])
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)).transpose(1, 2)


class _OfSpans(torch.autograd.Function):
    """Causal attention `[B, H, T, D]` of each of these spans, rows and their tokens, to itself; zero elsewhere."""

    @staticmethod
    def forward(
        ctx,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        spans: list[tuple[slice, slice]],
        scaling: float,
    ) -> torch.Tensor:
        """Outputs."""
        if _is_whole(spans, query):
            out, sums = flash_attention(query, key, value, is_causal=True, scale=scaling)
        else:
            out, sums = torch.zeros_like(query), query.new_zeros(query.shape[:3], dtype=_sums(query.dtype))
            for rows, tokens in spans:
                states = (tensor[rows, :, tokens] for tensor in (query, key, value))
                out[rows, :, tokens], sums[rows, :, tokens] = flash_attention(*states, is_causal=True, scale=scaling)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.spans, ctx.scaling = spans, scaling
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of queries, keys and values."""
        query, key, value, out, sums = ctx.saved_tensors
        how = 0.0, True
        if _is_whole(ctx.spans, query):
            found = _flash_gradients(gradient.contiguous(), query, key, value, out, sums, *how, scale=ctx.scaling)
            return *found, None, None
        found = tuple(torch.zeros_like(tensor) for tensor in (query, key, value))
        for rows, tokens in ctx.spans:
            states = (tensor[rows, :, tokens] for tensor in (gradient, query, key, value, out, sums))
            parts = _flash_gradients(*states, *how, scale=ctx.scaling)
            for whole, part in zip(found, parts, strict=True):
                whole[rows, :, tokens] = part
        return *found, None, None


def _is_whole(spans: list[tuple[slice, slice]], query: torch.Tensor) -> bool:
    """Whether spans are all rows and tokens of queries `[B, H, T, D]`."""
    return spans == [(slice(None), slice(0, query.shape[2]))]


def _sums(dtype: torch.dtype) -> torch.dtype:
    """In which the kernel gives the log-sum-exp."""
    return torch.promote_types(dtype, torch.float32)


def attention_of_spans(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spans: list[tuple[slice, slice]], scaling: float
) -> torch.Tensor:
    """Causal attention `[B, T, H, D]` within spans of rows and tokens, zero elsewhere, with gradients."""
    return _OfSpans.apply(query, key, value, spans, scaling).transpose(1, 2)


class Band(NamedTuple):
    """Keys of blocks of queries of a pass, without its first `lead` queries; T' queries are left.

    Attributes:
        index: keys of each block, sinks and a window, `[B or 1, N, K]`.
        shows: whether a query sees them, `[B or 1, N, block, K]`.
        added: what is added to the score of the distant token, `[B or 1, T', 1]`.
    """

    index: torch.Tensor
    shows: torch.Tensor
    added: torch.Tensor

    @classmethod
    def of(cls, seen: Seen, count: int) -> "Band":
        """The band of these queries and so many keys."""
        last, start, near, sink_end, hidden = (
            tensor[:, seen.lead :] for tensor in (seen.last, seen.start, seen.near, seen.sink_end, seen.hidden)
        )
        block = min(last.shape[1], seen.window, _BLOCK)
        width = -(-(seen.sinks + seen.window + block - 1) // _MULTIPLE) * _MULTIPLE
        last, start, near, sink_end = (_in_blocks(tensor, block) for tensor in (last, start, near, sink_end))
        band = last[:, :, :1] - seen.window + 1 + torch.arange(width - seen.sinks)
        sinks = start[:, :, :1] + torch.arange(seen.sinks)
        index = torch.cat([sinks, band.expand(len(sinks), -1, -1, -1)], dim=-1)  # [B or 1, N, 1, K]
        shows = (index <= last) & (index >= start) & ((index >= near) | (index < sink_end))
        shows &= (torch.arange(width) >= seen.sinks) | (index < band[..., :1])  # else a sink is seen in the band
        added = hidden.clamp_min(1).double().log().masked_fill(hidden < 1, -torch.inf)
        return cls(index[:, :, 0].clamp(0, count - 1), shows, added)

    def mask(self, batch: int, heads: int, dtype: torch.dtype) -> torch.Tensor:
        """What is added to scores of so many heads that share keys, `[B * N, 1, heads * block, K]`."""
        mask = torch.zeros(self.shows.shape, dtype=dtype).masked_fill_(~self.shows, -torch.inf)
        return mask.expand(batch, -1, -1, -1).flatten(0, 1).repeat(1, heads, 1).unsqueeze(1)

    def read(self, states: torch.Tensor, groups: slice | torch.Tensor) -> torch.Tensor:
        """Keys or values `[B, KV, S, D]` of each block and these groups, `[B * N, groups, K, D]`."""
        rows, count, width = self.index.shape
        first = isinstance(groups, slice) or count * width > states.shape[2]  # which makes a smaller copy
        by_token = (take(states, 1, groups) if first else states).transpose(1, 2)
        index = self.index.flatten(1)
        if rows == 1:
            found = by_token.index_select(1, index[0])  # a token's keys of all heads at once
        else:
            found = by_token.gather(1, index[:, :, None, None].expand(-1, -1, *by_token.shape[2:]))
        found = found.unflatten(1, (count, width)).transpose(2, 3).flatten(0, 1)
        return found if first else take(found, 1, groups)


def _in_blocks(tensor: torch.Tensor, block: int) -> torch.Tensor:
    """`[B, T, ...]` as `[B, N, block, ...]`; the last block repeats the last entry."""
    if missing := -tensor.shape[1] % block:
        tensor = torch.cat([tensor, tensor[:, -1:].expand(-1, missing, *tensor.shape[2:])], dim=1)
    return tensor.unflatten(1, (-1, block))


def near_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    heads: Iterable[int],
    seen: Seen,
    scaling: float,
    distant: Distant | None,
) -> tuple[list[int], torch.Tensor]:
    """What these heads give where they are off, but for the first `seen.lead` queries, `[B, T', heads, D]`.

    Returns the heads in the order of outputs, too: groups in which as many heads are asked for are computed together.
    """
    shared = query.shape[1] // key.shape[1]
    by_group: dict[int, list[int]] = {}
    for head in heads:
        by_group.setdefault(head // shared, []).append(head)
    order, outputs = [], []
    band = kept(seen, "band", lambda: Band.of(seen, key.shape[2]))
    for count in sorted({len(own) for own in by_group.values()}):
        groups = [group for group, own in by_group.items() if len(own) == count]
        own = [head for group in groups for head in by_group[group]]
        name = "mask", len(query), count, query.dtype
        mask = kept(seen, name, lambda: band.mask(len(query), count, query.dtype))  # noqa: B023
        places = places_of(own)
        states = (
            take(query.transpose(1, 2), 2, places)[:, seen.lead :],
            *(band.read(tensor, places_of(groups)) for tensor in (key, value)),
        )
        token = None
        if distant is not None:
            score = take(distant[0], -1, places)[:, seen.lead :] + band.added.to(_sums(query.dtype))
            token = score, take(distant[1], 0, places)
        order += own
        outputs.append(_of_blocks(*states, mask, band.shows.shape[2], scaling, token))
    return order, outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def _of_blocks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    block: int,
    scaling: float,
    distant: Distant | None,
) -> torch.Tensor:
    """Attention `[B, T, H, D]` of queries `[B, T, H, D]` to keys of blocks `[B * N, KV, K, D]` and a distant token.

    The distant token has scores `[B, T, H]`, -inf where there is none, and values `[H, D]`.
    """
    batch, length, heads, size = query.shape
    groups, missing = key.shape[1], -length % block

    def blocks(tensor: torch.Tensor) -> torch.Tensor:
        """`[B, T, H, X]` as `[B * N, KV, H / KV * block, X]`."""
        tensor = pad(tensor, (0, 0, 0, 0, 0, missing)).unflatten(1, (-1, block)).flatten(0, 1)
        return tensor.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)

    token = (None, None)
    if distant is not None:
        token = blocks(distant[0].unsqueeze(-1))[..., 0], distant[1].view(groups, heads // groups, 1, size)
    out = _AttentionAndDistant.apply(blocks(query), key, value, mask, scaling, *token)
    out = out.view(batch, -1, groups, heads // groups, block, size).permute(0, 1, 4, 2, 3, 5)
    return out.reshape(batch, -1, heads, size)[:, :length]


class _AttentionAndDistant(torch.autograd.Function):
    """Attention of M heads that share keys, where each has one more entry of the softmax: its distant token's.

    Queries and outputs are `[B, KV, M * T, D]`, the mask is added to scores and has no gradient. Scores of the distant
    tokens are `[B, KV, M * T]`, their values `[KV, M, 1, D]`.
    """

    @staticmethod
    def forward(
        ctx,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor,
        scaling: float,
        score: torch.Tensor | None,
        far: torch.Tensor | None,
    ) -> torch.Tensor:
        """Outputs."""
        out, sums = flash_attention(query, key, value, attn_mask=mask, scale=scaling)
        if score is not None:
            weights = torch.sigmoid(score - sums).unsqueeze(-1).to(out.dtype)
            out, weights = (tensor.unflatten(2, (far.shape[1], -1)) for tensor in (out, weights))
            out = out.lerp(far.to(out.dtype), weights).flatten(2, 3)
            sums = torch.logaddexp(score, sums)
        ctx.save_for_backward(query, key, value, mask, out, sums, score, far)
        ctx.scaling = scaling
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of queries, keys, values, and of the distant tokens' scores and values."""
        query, key, value, mask, out, sums, score, far = ctx.saved_tensors
        gradient, of_score, of_far = gradient.contiguous(), None, None
        found = _flash_gradients(gradient, query, key, value, out, sums, 0.0, False, attn_mask=mask, scale=ctx.scaling)
        if score is not None:
            weights = (score - sums).exp().to(sums.dtype)
            given, out, weights = (tensor.unflatten(2, (far.shape[1], -1)) for tensor in (gradient, out, weights))
            of_score = weights * (given * (far.to(out.dtype) - out)).sum(-1, dtype=sums.dtype)
            of_score = of_score.flatten(2, 3).to(score.dtype)
            of_far = torch.einsum("bkmt,bkmtd->kmd", weights.to(given.dtype), given).unsqueeze(2).to(far.dtype)
        return *found, None, None, of_score, of_far
