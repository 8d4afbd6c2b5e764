"""Attention of heads that are off over an engine's paged cache: which keys the new tokens see, and where they lie.

Shapes: T new tokens of all requests, side by side, S keys that are read, H query heads, KV key-value heads, N tokens of
a block, D head size.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from moh_llm.attention.call import Call
from moh_llm.modeling.interval_attention_moh import near_attention
from moh_llm.modeling.seen_moh import Seen

_DIGIT = 256  # the numbers below are exact in every dtype of a cache that is not quantised

Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
Read = Callable[[nn.Module], tuple[torch.Tensor, torch.Tensor]]


def near_keys(
    token_edges: torch.Tensor, lengths: torch.Tensor, window: int, sinks: int, all_on_until: int, total: int
) -> tuple[Seen, torch.Tensor, torch.Tensor]:
    """The keys that heads that are off read: each request's first ones, and its last ones.

    Args:
        token_edges: the first new token of each request among all of them, and the end of the last one.
        lengths: tokens of each request, the new ones included.
        window, sinks, all_on_until: as in `Seen.from_positions`.
        total: T, padding after the last request's tokens included.

    Returns:
        What the new tokens see of the keys that are read, which lie side by side; and of each key its request and its
        position there, `[S]` each.
    """
    new = token_edges.diff()
    begin = (lengths - new - window + 1).clamp_min(0)  # of the recent keys
    slots = max(1, sinks)  # places before them, so that no window begins where the request does
    counts = (slots + lengths - begin).masked_fill(new == 0, 0)
    starts = counts.cumsum(0) - counts
    request = torch.repeat_interleave(torch.arange(len(lengths), device=new.device), counts)
    rank = torch.arange(len(request), device=new.device) - starts[request]
    is_first = rank < slots
    position = torch.where(is_first, rank.minimum(lengths[request] - 1), rank - slots + begin[request])

    tokens = torch.arange(total, device=new.device)
    of = torch.searchsorted(token_edges[1:], tokens, right=True).clamp_max(len(lengths) - 1)
    own = tokens - token_edges[of] + (lengths - new)[of]
    start, hidden = starts[of], own + 1 - window - sinks
    all_on = (hidden <= max(0, all_on_until - window - sinks)) | (tokens >= token_edges[-1])
    last = start + slots + own - begin[of]
    near = torch.maximum(last - window + 1, start + slots)
    others = (~all_on).nonzero()
    lead = int(others[0]) if len(others) else total
    fields = (tensor[None, :, None] for tensor in (last, start, near, start + sinks, hidden))
    return Seen(*fields, window, sinks, all_on[None], lead, is_consecutive=False), request, position


class EngineKeys(NamedTuple):
    """What stands in for keys in a layer whose engine keeps them itself: those of the new tokens `[1, KV, T, D]`.

    `read` gives the keys and values `[1, KV, S, D]` that `near_keys` counts, of a layer, after the engine's attention.
    """

    key: torch.Tensor
    value: torch.Tensor
    read: Read

    def attend(
        self, attention: Callable[..., torch.Tensor], call: Call, module: nn.Module | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """`interval_attention` `[1, T, H, D]`: the engine's own attention where a head is on."""
        query, _, _, first, seen, scaling, distant, dropout, _ = call
        engine = ALL_ATTENTION_FUNCTIONS[module.config._attn_implementation]
        full, _ = engine(module, query, self.key, self.value, None, dropout=dropout, scaling=scaling, **kwargs)
        near = near_attention(query, *self.read(module), seen, scaling, distant, dropout)
        return torch.where((first <= seen.start).unsqueeze(-1), full.reshape(near.shape), near)


class EngineCache:
    """What a step's layers are given as `cache`. `read` is that of `EngineKeys`."""

    def __init__(self, read: Read):
        self.read = read

    def update(self, key: torch.Tensor, value: torch.Tensor, *_: object) -> tuple[EngineKeys, EngineKeys]:
        keys = EngineKeys(key, value, self.read)
        return keys, keys


class PagedLayout:
    """Where a block of a paged cache has the key and the value of each token, which engines do as their kernels want.

    It is found out by writing: each number gets its own index as a value, and is looked for.

    Args:
        cache: of a layer `[blocks, KV, N, 2 D]`, whose blocks are dense.
        size: D.
        write: writes keys and values `[N, KV, D]` to slots `[N]` of a cache, as the engine does.

    Raises:
        ValueError: the cache does not hold keys and values as they are.
    """

    def __init__(self, cache: torch.Tensor, size: int, write: Write):
        groups, tokens = cache.shape[1:3]
        total = 2 * groups * tokens * size
        scratch = torch.empty_strided((1, *cache.shape[1:]), cache.stride(), dtype=cache.dtype, device=cache.device)
        if scratch.numel() != total or not cache.is_floating_point():  # 8-bit numbers lie in a cache of bytes
            raise self._fault()
        block, found = scratch.as_strided((total,), (1,)), torch.zeros(total, dtype=torch.int64, device=cache.device)
        block.zero_()
        numbers = torch.arange(total, device=cache.device)
        for power in range(8):
            scale = _DIGIT**power
            if scale >= total:
                break
            digits = (numbers // scale % _DIGIT).to(cache.dtype).view(2, tokens, groups, size)
            write(digits[0], digits[1], scratch, torch.arange(tokens, device=cache.device))
            found += block.long() * scale
        if not torch.equal(found.sort().values, numbers):
            raise self._fault()
        # [2, N, KV, D] to [2, KV, N, D]
        self.places = found.argsort().view(2, tokens, groups, size).transpose(1, 2).contiguous()
        self.tokens = tokens

    @staticmethod
    def _fault() -> ValueError:
        needs = "local fallbacks need a cache that keeps keys and values as they are"
        return ValueError(f"{needs}; leave out --kv-cache-dtype")

    def offsets(self, cache: torch.Tensor, blocks: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Where in memory the keys and the values of tokens lie, `[2, 1, KV, S, D]`.

        `blocks` `[S]` is the number of each token's block, and `positions` `[S]` that of the token in its request.
        """
        inside = self.places.index_select(2, positions % self.tokens)
        return (inside + (blocks.long() * cache.stride(0))[:, None]).unsqueeze(1)


def take(cache: torch.Tensor, offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values `[1, KV, S, D]` at what `PagedLayout.offsets` gives."""
    memory = cache.as_strided(((cache.shape[0] - 1) * cache.stride(0) + cache[0].numel(),), (1,))
    keys, values = memory.take(offsets)
    return keys, values
