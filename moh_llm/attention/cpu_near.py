"""Attention of heads that are off, on a CPU: sinks, a window and a distant token, in blocks of queries.

The distant token is merged with the result of PyTorch's flash kernel by log-sum-exp. In the backward pass the kernel is
given the merged outputs and log-sum-exp, so that its gradients are the share of the sinks and the window.

Shapes: B batch, T queries, S keys (of the cache and of this pass), H query heads, KV key-value heads, D head size, N
blocks, K keys of a block.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from moh_llm.attention.call import Call, equal_groups
from moh_llm.attention.cpu_parts import flash_attention, flash_gradients, kept, places_of, sums_dtype, take
from moh_llm.modeling.interval_attention_moh import Distant, in_blocks
from moh_llm.modeling.seen_moh import Seen

_BLOCK = 128  # most queries of a block: smaller blocks read fewer hidden keys, but copy each key more often
_MULTIPLE = 16  # keys of a block are a multiple of this: else AMX and bfloat16 masks take 1.4 times as long


class Band(NamedTuple):
    """The keys of each block of queries, for the T' queries after the first `lead` ones.

    Attributes:
        index: keys of each block (sinks, then a window), `[B or 1, N, K]`.
        shows: whether a query sees them, `[B or 1, N, block, K]`.
        added: term added to the score of the distant token, `[B or 1, T', 1]`.
    """

    index: Tensor
    shows: Tensor
    added: Tensor

    @classmethod
    def from_seen(cls, seen: Seen, count: int) -> "Band":
        """Make the band for the queries of `seen` and `count` keys."""
        last, start, near, sink_end, hidden = (
            tensor[:, seen.lead :] for tensor in (seen.last, seen.start, seen.near, seen.sink_end, seen.hidden)
        )
        block = min(last.shape[1], seen.window, _BLOCK)
        width = -(-(seen.sinks + seen.window + block - 1) // _MULTIPLE) * _MULTIPLE
        last, start, near, sink_end = (in_blocks(tensor, block) for tensor in (last, start, near, sink_end))
        band = last[:, :, :1] - seen.window + 1 + torch.arange(width - seen.sinks)
        sinks = start[:, :, :1] + torch.arange(seen.sinks)
        index = torch.cat([sinks, band.expand(len(sinks), -1, -1, -1)], dim=-1)  # [B or 1, N, 1, K]
        shows = (index <= last) & (index >= start) & ((index >= near) | (index < sink_end))
        shows &= (torch.arange(width) >= seen.sinks) | (index < band[..., :1])  # a sink inside the window counts once
        added = hidden.clamp_min(1).double().log().masked_fill(hidden < 1, -torch.inf)
        return cls(index[:, :, 0].clamp(0, count - 1), shows, added)

    def mask(self, batch: int, heads: int, dtype: torch.dtype) -> Tensor:
        """The additive mask for `heads` heads that share keys, `[B * N, 1, heads * block, K]`."""
        mask = torch.zeros(self.shows.shape, dtype=dtype).masked_fill_(~self.shows, -torch.inf)
        return mask.expand(batch, -1, -1, -1).flatten(0, 1).repeat(1, heads, 1).unsqueeze(1)

    def read(self, states: Tensor, groups: slice | Tensor) -> Tensor:
        """Gather keys or values `[B, KV, S, D]` of each block and `groups`, `[B * N, groups, K, D]`."""
        rows, count, width = self.index.shape
        first = isinstance(groups, slice) or count * width > states.shape[2]  # the smaller copy
        by_token = (take(states, 1, groups) if first else states).transpose(1, 2)
        index = self.index.flatten(1)
        if rows == 1:
            found = by_token.index_select(1, index[0])  # copies all heads of a token at once
        else:
            found = by_token.gather(1, index[:, :, None, None].expand(-1, -1, *by_token.shape[2:]))
        found = found.unflatten(1, (count, width)).transpose(2, 3).flatten(0, 1)
        return found if first else take(found, 1, groups)


def near_attention(call: Call, heads: Iterable[int]) -> tuple[list[int], Tensor]:
    """Outputs `[B, T', heads, D]` of `heads` where they are off, for the queries after the first `seen.lead` ones.

    Returns the heads in the order of the outputs, since groups of equal size are computed together, and the outputs.
    """
    query, key, value, _, seen, scaling, distant, *_ = call
    shared = query.shape[1] // key.shape[1]
    order, outputs = [], []
    band = kept(seen, "band", lambda: Band.from_seen(seen, key.shape[2]))
    for own in equal_groups(heads, shared):
        groups = list(dict.fromkeys(head // shared for head in own))
        count = len(own) // len(groups)
        name = "mask", len(query), count, query.dtype
        mask = kept(seen, name, lambda: band.mask(len(query), count, query.dtype))  # noqa: B023
        places = places_of(own)
        states = (
            take(query.transpose(1, 2), 2, places)[:, seen.lead :],
            *(band.read(tensor, places_of(groups)) for tensor in (key, value)),
        )
        token = None
        if distant is not None:
            score = take(distant[0], -1, places)[:, seen.lead :] + band.added.to(sums_dtype(query.dtype))
            token = score, take(distant[1], 0, places)
        order += own
        outputs.append(_of_blocks(*states, mask, band.shows.shape[2], scaling, token))
    return order, outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def _of_blocks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, block: int, scaling: float, distant: Distant | None
) -> Tensor:
    """Attention `[B, T, H, D]` of queries `[B, T, H, D]` to the keys of their blocks `[B * N, KV, K, D]`.

    The distant token has scores `[B, T, H]`, -inf where no key is hidden, and values `[H, D]`.
    """
    batch, length, heads, size = query.shape
    groups, missing = key.shape[1], -length % block

    def blocks(tensor: Tensor) -> Tensor:
        """Reshape `[B, T, H, X]` to `[B * N, KV, H / KV * block, X]`."""
        tensor = pad(tensor, (0, 0, 0, 0, 0, missing)).unflatten(1, (-1, block)).flatten(0, 1)
        return tensor.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)

    token = (None, None)
    if distant is not None:
        token = blocks(distant[0].unsqueeze(-1))[..., 0], distant[1].view(groups, heads // groups, 1, size)
    out = _AttentionAndDistant.apply(blocks(query), key, value, mask, scaling, *token)
    out = out.view(batch, -1, groups, heads // groups, block, size).permute(0, 1, 4, 2, 3, 5)
    return out.reshape(batch, -1, heads, size)[:, :length]


class _AttentionAndDistant(torch.autograd.Function):
    """Attention of M heads that share keys, with the distant token as one more entry of each softmax.

    Queries and outputs are `[B, KV, M * T, D]`. The additive mask has no gradient. The distant token has scores
    `[B, KV, M * T]` and values `[KV, M, 1, D]`.
    """

    @staticmethod
    def forward(
        ctx,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor,
        scaling: float,
        score: Tensor | None,
        far: Tensor | None,
    ) -> Tensor:
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
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of queries, keys, values, and the distant token's scores and values."""
        query, key, value, mask, out, sums, score, far = ctx.saved_tensors
        gradient, of_score, of_far = gradient.contiguous(), None, None
        found = flash_gradients(gradient, query, key, value, out, sums, 0.0, False, attn_mask=mask, scale=ctx.scaling)
        if score is not None:
            weights = (score - sums).exp().to(sums.dtype)
            given, out, weights = (tensor.unflatten(2, (far.shape[1], -1)) for tensor in (gradient, out, weights))
            of_score = weights * (given * (far.to(out.dtype) - out)).sum(-1, dtype=sums.dtype)
            of_score = of_score.flatten(2, 3).to(score.dtype)
            of_far = torch.einsum("bkmt,bkmtd->kmd", weights.to(given.dtype), given).unsqueeze(2).to(far.dtype)
        return *found, None, None, of_score, of_far
