"""Attention of selected queries on a CPU, for inference, and of a decoding step to selected key-value heads.

Selected queries of heads that share keys form one list of (token, head) pairs in token order. The keys are halved
recursively: at each level the queries of the second half attend to the first half without a mask. Only within a block
is there a mask. The results are merged by log-sum-exp. Queries that are not selected cost nothing.

Shapes: B batch, T queries, S keys (of the cache and of this pass), H query heads, KV key-value heads, D head size.
"""

import itertools

import torch
from torch import Tensor

from moh_llm.attention.call import Call
from moh_llm.attention.cpu_parts import flash_attention, kept, merge, sums_dtype
from moh_llm.modeling.seen_moh import Seen

_BLOCK = 256  # tokens of a block with a mask: smaller blocks waste fewer scores, larger ones make larger products
_PARTS = 8  # most parts into which a decoding step splits its keys


def write_selected(out: Tensor, query: Tensor, key: Tensor, value: Tensor, selected: Tensor, scaling: float) -> None:
    """Write head outputs `[B, T, H, D]` where `selected` `[B, T, H]`; the last key belongs to the last query."""
    heads, length = query.shape[1:3]
    by_token, shared = query.transpose(1, 2), heads // key.shape[1]
    for row in range(len(query)):
        for group in range(key.shape[1]):
            chosen = selected[row, :, group * shared : (group + 1) * shared].nonzero()
            if len(chosen):
                tokens, own = chosen[:, 0], chosen[:, 1] + group * shared
                states = (tensor[row, group][None, None] for tensor in (key, value))
                positions = tokens + key.shape[2] - length
                found = _attend(by_token[row, tokens, own][None, None], *states, positions, scaling)
                out[row, tokens, own] = found[0, 0]


def _attend(query: Tensor, key: Tensor, value: Tensor, positions: Tensor, scaling: float) -> Tensor:
    """Causal attention `[1, 1, N, D]` of queries at increasing `positions` `[N]` to keys `[1, 1, S, D]`."""
    length, begin = key.shape[2], int(positions[0]) // _BLOCK * _BLOCK
    edges = [*range(begin, length, _BLOCK), length]
    cuts = torch.searchsorted(positions, torch.tensor(edges)).tolist()
    out, total = torch.empty_like(query), query.new_empty(query.shape[:3], dtype=sums_dtype(query.dtype))
    later = torch.full((_BLOCK, _BLOCK), -torch.inf, dtype=query.dtype).triu(1)

    def part(rows: slice, first: int, last: int, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        states = query[:, :, rows], key[:, :, first:last], value[:, :, first:last]
        return flash_attention(*states, attn_mask=mask, scale=scaling)

    def halve(low: int, high: int) -> None:
        """Attend from the queries of blocks `low` to `high` to the keys of the same blocks."""
        rows = slice(cuts[low], cuts[high])
        if rows.start == rows.stop:
            return
        if high - low == 1:
            mask = later.index_select(0, positions[rows] % _BLOCK)[:, : edges[high] - edges[low]]
            out[:, :, rows], total[:, :, rows] = part(rows, edges[low], edges[high], mask)
            return
        middle = (low + high) // 2
        halve(low, middle)
        halve(middle, high)
        add(slice(cuts[middle], cuts[high]), edges[low], edges[middle])

    def add(rows: slice, first: int, last: int) -> None:
        """Merge attention of `rows` to the keys from `first` to `last`, all of which these queries see."""
        if rows.start < rows.stop and first < last:
            whole = merge((out[:, :, rows], total[:, :, rows]), part(rows, first, last))
            out[:, :, rows], total[:, :, rows] = whole

    halve(0, len(edges) - 1)
    add(slice(0, len(positions)), 0, begin)  # keys before the first query's block
    return out


def attention_of_step(call: Call, on: Tensor) -> Tensor:
    """`interval_attention` of one query per row; reads a key-value head only if one of its query heads is on."""
    query, key, value, _, seen, scaling, distant, *_ = call
    batch, heads, _, size = query.shape
    groups = key.shape[1]
    runs, end, sees_all = kept(seen, "runs", lambda: _runs(seen, batch))
    if sees_all is not None:  # rows that hide no key: windowed attention is full attention
        on = on | sees_all
    query = query.reshape(batch, groups, 1, -1, size)
    flags = on.view(batch, groups, -1).any(-1)
    is_off = not bool(on.all())
    out = query.new_zeros(query.shape)
    near = query.new_zeros(query.shape) if is_off and seen.window else None
    for rows, start, band, added in runs:
        taken = [tensor[rows, :, start:end].flatten(0, 1).unsqueeze(1) for tensor in (key, value)]
        own = query[rows].flatten(0, 1)
        _write_step(out[rows].flatten(0, 1), own, *taken, flags[rows].flatten().tolist(), scaling)
        if near is not None and added is not None:
            taken = [torch.cat([tensor[rows, :, part] for part in band], dim=2) for tensor in (key, value)]
            found, sums = flash_attention(query[rows, :, 0], *taken, scale=scaling)
            if distant is not None:
                scores = (distant[0][rows] + added.to(sums.dtype)).view(sums.shape)
                weights = torch.sigmoid(scores - sums).to(found.dtype)
                found = found.lerp(distant[1].to(found.dtype).view(groups, -1, size), weights.unsqueeze(-1))
            near[rows, :, 0] = found
    out = out.view(batch, 1, heads, size)
    if not is_off:
        return out
    return torch.where(on.unsqueeze(-1), out, 0.0 if near is None else near.view(out.shape))


def _runs(
    seen: Seen, batch: int
) -> tuple[list[tuple[slice, int, tuple[slice, slice], Tensor | None]], int, Tensor | None]:
    """Group neighbouring rows of a decoding step whose documents begin at the same key.

    Returns:
        For each group its rows, that first key, the slices of sinks and window, and the logarithm of the number of
        hidden keys `[rows, 1, 1]` (None if no row hides keys; with a cache that keeps only first and last tokens, rows
        that begin together can hide different numbers). Then the key after the last one, and the rows that hide no key.
    """
    starts, nears, hidden = (tensor[:, 0, 0].expand(batch).tolist() for tensor in (seen.start, seen.near, seen.hidden))
    end, found = int(seen.last[0, 0, 0]) + 1, []
    added = seen.hidden.clamp_min(1).double().log().expand(batch, 1, 1)
    for first, last in equal_runs(list(zip(starts, nears, strict=True))):
        start, rows = starts[first], slice(first, last)
        band = slice(start, start + seen.sinks), slice(nears[first], end)
        found.append((rows, start, band, added[rows] if max(hidden[rows]) > 0 else None))
    sees_all = seen.hidden < 1 if seen.window and min(hidden) < 1 else None
    return found, end, sees_all


def _write_step(out: Tensor, query: Tensor, key: Tensor, value: Tensor, flags: list[bool], scaling: float) -> None:
    """Write attention of queries `[N, 1, M, D]` to keys `[N, 1, S, D]` of the key-value heads whose flag is true.

    One call computes a multiple of the number of threads of key-value heads, without copying keys. For the remaining
    heads the keys are split among the threads.
    """
    threads = torch.get_num_threads()
    whole, left = _calls(flags, threads)
    for places in whole:
        out[places] = flash_attention(query[places], key[places], value[places], scale=scaling)[0]
    for places in left:
        out[places] = _in_parts(query[places], key[places], value[places], threads, scaling)


def _in_parts(queries: Tensor, keys: Tensor, values: Tensor, threads: int, scaling: float) -> Tensor:
    """Attention of queries `[N, 1, H, D]` to keys `[N, 1, S, D]`, with the keys split among the threads."""
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
    """Slices of set flags whose lengths are multiples of `threads`, and slices of the remaining set flags."""
    whole, left = [], []
    for first, last in equal_runs(flags):
        if flags[first]:
            middle = last - (last - first) % threads
            whole += [slice(first, middle)] if first < middle else []
            left += [slice(middle, last)] if middle < last else []
    if threads == 2:  # any two places form a slice with a step
        while len(left) > 1:
            one, other = left.pop(0).start, left.pop(0).start
            whole.append(slice(one, other + 1, other - one))
    return whole, left


def equal_runs(numbers: list) -> list[tuple[int, int]]:
    """Start and end of each run of equal neighbours."""
    edges = [0, *(i for i in range(1, len(numbers)) if numbers[i] != numbers[i - 1]), len(numbers)]
    return list(itertools.pairwise(edges))
