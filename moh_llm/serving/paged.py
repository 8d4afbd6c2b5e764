"""Local attention over an engine's paged cache: which keys the new tokens of each request see, and where they lie.

Shapes: T new tokens of all requests, side by side, S keys that are read, KV key-value heads, N tokens of a block,
D head size.
"""

from collections.abc import Callable

import torch

from moh_llm.modeling.documents_moh import Band, Requests

_DIGIT = 256  # the numbers below are exact in every dtype of a cache that is not quantised

Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


def near_keys(
    token_edges: list[int],
    lengths: list[int],
    window: int,
    sinks: int,
    all_on_until: int,
    total: int,
    device: torch.device | str = "cpu",
) -> tuple[Requests, torch.Tensor, torch.Tensor]:
    """The keys that local attention of new tokens reads: each request's first ones, and its last ones.

    Args:
        token_edges: the first new token of each request among all of them, and the end of the last one.
        lengths: tokens of each request, the new ones included.
        window, sinks, all_on_until: as in `Band.of`.
        total: T, padding after the last request's tokens included.
        device: of the results.

    Returns:
        The requests, whose bands count the keys that are read, side by side; and of each key its request and its
        position there, `[S]` each.
    """
    parts: list[tuple[slice | torch.Tensor, Band]] = []
    all_on = torch.ones(1, total, dtype=torch.bool, device=device)
    of_request, positions, count = [], [], 0
    steps: list[int] = []  # requests with one new token, which make one batch

    def add(request: int, begin: int, length: int) -> int:
        """Read a request's first keys and those from `begin` on; returns how many keys are read before them."""
        nonlocal count
        read = torch.cat([torch.arange(sinks).clamp_max(length - 1), torch.arange(begin, length)])
        of_request.append(torch.full_like(read, request))
        positions.append(read)
        count += len(read)
        return count - len(read)

    for request, (first, last, length) in enumerate(zip(token_edges[:-1], token_edges[1:], lengths, strict=True)):
        if last - first == 1 and length > max(all_on_until, window + sinks):
            steps.append(request)
        elif last > first:
            own = torch.arange(length - (last - first), length, device=device)[None]
            band = Band.of(own, torch.zeros_like(own), window, sinks, all_on_until)
            if band is not None:
                all_on[:, first:last] = band.all_on
                begin = max(0, length - (last - first) + band.lead - window + 1)
                band = band._replace(step=None).near(begin, sinks)
                band = band._replace(index=band.index + add(request, begin, length))
                parts.append((slice(first + band.lead, last), band))
    if steps:
        # As if rows were padded on the left, so that all tokens have the position of the longest request's.
        their = torch.tensor([lengths[request] for request in steps], device=device)
        end = their.max().view(1, 1)
        band = Band.of(end - 1, end - their[:, None], window, sinks)
        rows = [add(request, lengths[request] - window, lengths[request]) for request in steps]
        index = torch.tensor(rows, device=device)[:, None, None] + torch.arange(band.index.shape[-1], device=device)
        tokens = torch.tensor([token_edges[request] for request in steps], device=device)
        all_on[:, tokens] = False
        parts.append((tokens, band._replace(index=index, step=None)))
    if not parts:
        positions = of_request = [torch.zeros(0, dtype=torch.int64)]
    return Requests(parts, all_on), torch.cat(of_request).to(device), torch.cat(positions).to(device)


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
