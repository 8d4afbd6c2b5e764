"""Causal attention of selected queries alone, by unmasked attention over blocks, for inference on a CPU.

Heads that share keys and values are one list of (token, head) in the order of tokens. A query sees all keys of earlier
blocks: the keys are halved again and again, and each time the queries of the second half attend to the first half
without a mask. Within a block there is one. Parts are merged by the log-sum-exp of their scores. What is not selected
costs nothing. In decoding a key-value head is read where one of its query heads is selected.

Shapes: B batch, T queries, S keys (of the cache and of this pass), H query heads, KV key-value heads, D head size.
"""

import functools
import itertools

import torch

from .cache_moh import can_be_read
from .flash_attention_moh import flash_attention, has_flash_attention, merge

_BLOCK = 256  # tokens between which a mask is used: fewer waste fewer scores, more leave larger products
_LEAST_QUERIES, _LEAST_KEYS = 1024, 512  # of a prefill, and of a decoding step
# Over the number of queries: what this costs beyond its share of dense attention, as measured. AMX makes products
# faster, and not what this does beside them.
_OVERHEAD, _OVERHEAD_AMX = 400, 3300
_PARTS = 8  # of the keys of a decoding step, at most


def may_select(implementation: str, inputs: torch.Tensor) -> bool:
    """Whether `selected_attention` may take the place of this attention: SDPA without gradients on a CPU."""
    return implementation == "sdpa" and inputs.device.type == "cpu" and not torch.is_grad_enabled()


def shows_whole_documents(mask: object, positions: torch.Tensor) -> bool:
    """Whether queries at `positions` `[1, T]` see all of their document: with no mask, or padding before all tokens."""
    if mask is None:
        return True
    is_readable = isinstance(mask, torch.Tensor) and can_be_read(mask) and can_be_read(positions)
    if not is_readable or mask.dim() != 2 or mask.shape[1] <= (last := int(positions[0, -1])):
        return False
    shown = mask[:, : last + 1] != 0
    return not bool((shown[:, :-1] & ~shown[:, 1:]).any())


def is_faster(gate: torch.Tensor, keys: torch.Tensor) -> bool:
    """Whether to take `selected_attention` for a gate `[B, T, H]` and these keys, not attention of all heads."""
    if not has_flash_attention(gate):
        return False
    length = gate.shape[1]
    if length == 1:
        return keys.shape[2] >= _LEAST_KEYS
    pays = length >= _LEAST_QUERIES and _dense_share(length, keys.dtype) > 0
    return pays and len(dense_heads(gate, keys)) < gate.shape[2]


def dense_heads(gate: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Ids of the heads of a gate `[B, T, H]` that are on for so many queries that dense attention takes less time."""
    least = gate[..., 0].numel() * _dense_share(gate.shape[1], keys.dtype)
    return (gate.count_nonzero((0, 1)) >= least).nonzero()[:, 0]


def _dense_share(length: int, dtype: torch.dtype) -> float:
    """From which share of a head's queries on dense attention takes less time; zero or less: always."""
    return 1 - (_OVERHEAD_AMX if dtype == torch.bfloat16 and _has_amx() else _OVERHEAD) / length


@functools.cache
def _has_amx() -> bool:
    return bool(getattr(torch.cpu, "get_capabilities", dict)().get("amx_bf16"))  # not there in older versions


def selected_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    selected: torch.Tensor,
    positions: torch.Tensor,
    starts: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """Head outputs where `selected` is true, and zero elsewhere; with one query per row any value elsewhere.

    Args:
        queries: `[B, H, T, D]`, after rotary embedding.
        keys, values: `[B, KV, S, D]`, those of a cache included; entries after a query are not read.
        selected: `[B, T, H]`, boolean.
        positions: index of each query among the keys, consecutive numbers `[1, T]`.
        starts: index of the first key of each query's document, `[B or 1, T]`, not decreasing. A query before its
            document's start is padding; its output is zero.
        scaling: factor of the scores.

    Returns:
        `[B, T, H, D]`.
    """
    batch, heads, length, size = queries.shape
    before, shared = int(positions[0, 0]), heads // keys.shape[1]
    if length == 1:
        selected = selected.view(batch, -1, shared).any(-1)
        return _decode(queries, keys, values, selected, before + 1, starts, scaling)
    by_token = queries.transpose(1, 2)
    out = queries.new_zeros(batch, length, heads, size)
    for row, row_starts in enumerate(starts.expand(batch, -1)):
        for first, last, start in _documents(row_starts, before):
            for group in range(keys.shape[1]):
                chosen = selected[row, first:last, group * shared : (group + 1) * shared].nonzero()
                if len(chosen):
                    tokens, own = chosen[:, 0] + first, chosen[:, 1] + group * shared
                    listed = by_token[row, tokens, own][None, None]
                    taken = (tensor[row, group, start : before + last][None, None] for tensor in (keys, values))
                    found = _attend(listed, *taken, tokens + before - start, scaling)
                    out[row, tokens, own] = found[0, 0]
    return out


def _documents(starts: torch.Tensor, before: int) -> list[tuple[int, int, int]]:
    """First query, the one after the last, and first key of each document of a row, given `starts` `[T]`."""
    changes = (starts.diff().nonzero()[:, 0] + 1).tolist()
    found = []
    for first, last in zip([0, *changes], [*changes, len(starts)], strict=True):
        start = int(starts[first])
        first = max(first, start - before)  # padding comes before the start
        if first < last:
            found.append((first, last, start))
    return found


def _attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Causal attention `[1, 1, N, D]` of queries at increasing `positions` `[N]` to keys `[1, 1, S, D]`."""
    length, begin = keys.shape[2], int(positions[0]) // _BLOCK * _BLOCK
    edges = [*range(begin, length, _BLOCK), length]
    cuts = torch.searchsorted(positions, torch.tensor(edges)).tolist()
    sums = torch.promote_types(queries.dtype, torch.float32)
    out, total = torch.empty_like(queries), torch.empty(queries.shape[:3], dtype=sums)
    whole = (length - begin) // _BLOCK
    rest, own = slice(cuts[whole], len(positions)), edges[whole]  # of the last block, which may be shorter
    if rest.start:
        first = torch.tensor(cuts[: whole + 1])
        blocks = (tensor[0, 0, begin:own].view(whole, 1, _BLOCK, -1) for tensor in (keys, values))
        out[0, 0, : rest.start], total[0, 0, : rest.start] = _in_blocks(
            queries[0, 0], *blocks, positions, first, scaling
        )
    if rest.start < rest.stop:
        taken = (tensor[:, :, own:] for tensor in (keys, values))
        mask = _causal(positions[rest], length - own, queries.dtype)[None, None]
        out[:, :, rest], total[:, :, rest] = flash_attention(queries[:, :, rest], *taken, attn_mask=mask, scale=scaling)

    def add(rows: slice, first: int, last: int) -> None:
        """Merge the attention of these queries to the keys from `first` to `last`, all of which they see."""
        if rows.start < rows.stop and first < last:
            part = flash_attention(
                queries[:, :, rows], *(tensor[:, :, first:last] for tensor in (keys, values)), scale=scaling
            )
            out[:, :, rows], total[:, :, rows] = merge((out[:, :, rows], total[:, :, rows]), part)

    def halve(low: int, high: int) -> None:
        if high - low == 1:
            return
        middle = (low + high) // 2
        halve(low, middle)
        halve(middle, high)
        add(slice(cuts[middle], cuts[high]), edges[low], edges[middle])

    halve(0, len(edges) - 1)
    add(slice(0, len(positions)), 0, begin)  # keys before the first query's block
    return out


def _in_blocks(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    first: torch.Tensor,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of queries `[N, D]` to the keys of their own block; keys and values of blocks are `[blocks, 1, K, D]`.

    `first` is where the queries of each block begin and, last, where they end, M. Blocks are a batch, where each has as
    many queries as the one with the most. Returns outputs `[M, D]` and the log-sum-exp of their scores `[M]`.
    """
    index = first[:-1, None] + torch.arange(int(first.diff().max()))
    places = index < first[1:, None]
    index = index.clamp_max(len(queries) - 1)
    mask = _causal(positions[index], keys.shape[2], queries.dtype)[:, None]
    out, total = flash_attention(queries[index][:, None], keys, values, attn_mask=mask, scale=scaling)
    return out[:, 0][places], total[:, 0][places]


def _causal(positions: torch.Tensor, length: int, dtype: torch.dtype) -> torch.Tensor:
    """What is added to scores `[..., length]` of queries at `positions` `[...]` and the first keys of their block."""
    rows = torch.full((_BLOCK, length), -torch.inf, dtype=dtype).triu(1)  # of which copies cost least
    return rows.index_select(0, (positions % _BLOCK).flatten()).view(*positions.shape, length)


def _decode(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    groups: torch.Tensor,
    end: int,
    starts: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """One query per row `[B, H, 1, D]` to the keys before `end`, where a key-value head is in `groups` `[B, KV]`.

    A call is for as many key-value heads as there are threads, or a multiple of that, and reads keys where they lie,
    once for all heads of a group. Of those that are left over all threads read a part.
    """
    batch, heads, _, size = queries.shape
    queries = queries.reshape(batch, keys.shape[1], 1, -1, size)
    out, threads = torch.zeros_like(queries), torch.get_num_threads()
    begins = starts[:, 0].tolist() if len(starts) == batch else starts[0].tolist() * batch
    for first, last in _equal(begins):
        start = begins[first]
        own, found = (tensor[first:last].flatten(0, 1) for tensor in (queries, out))
        taken = [tensor[first:last, :, start:end].flatten(0, 1).unsqueeze(1) for tensor in (keys, values)]
        whole, left = _calls(groups[first:last].flatten().tolist(), threads)
        for places in whole:
            found[places] = flash_attention(own[places], *(tensor[places] for tensor in taken), scale=scaling)[0]
        for places in left:
            found[places] = _in_parts(own[places], *(tensor[places] for tensor in taken), threads, scaling)
    return out.view(batch, 1, heads, size)


def _in_parts(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, threads: int, scaling: float
) -> torch.Tensor:
    """Attention of queries `[N, 1, H, D]` to keys `[N, 1, S, D]`, which each thread reads a part of."""
    length = keys.shape[2]
    parts = min(threads, _PARTS, length)
    whole = length // parts * parts
    taken = (tensor[:, 0, :whole].unflatten(1, (parts, -1)) for tensor in (keys, values))
    outputs, sums = flash_attention(queries.expand(-1, parts, -1, -1), *taken, scale=scaling)
    if whole < length:
        rest = flash_attention(queries, *(tensor[:, :, whole:] for tensor in (keys, values)), scale=scaling)
        outputs, sums = torch.cat([outputs, rest[0]], dim=1), torch.cat([sums, rest[1]], dim=1)
    return (outputs * sums.softmax(1).unsqueeze(-1)).sum(1, keepdim=True)


def _calls(flags: list[bool], threads: int) -> tuple[list[slice], list[slice]]:
    """Where flags are true: slices of a multiple of `threads`, and those that are left over."""
    whole, left = [], []
    for first, last in _equal(flags):
        if flags[first]:
            middle = last - (last - first) % threads
            whole += [slice(first, middle)] if first < middle else []
            left += [slice(middle, last)] if middle < last else []
    if threads == 2:  # two places are a slice, wherever they are
        while len(left) > 1:
            one, other = left.pop(0).start, left.pop(0).start
            whole.append(slice(one, other + 1, other - one))
    return whole, left


def _equal(numbers: list[int]) -> list[tuple[int, int]]:
    """First place and the one after the last of equal neighbours."""
    edges = [0, *(i for i in range(1, len(numbers)) if numbers[i] != numbers[i - 1]), len(numbers)]
    return list(itertools.pairwise(edges))
