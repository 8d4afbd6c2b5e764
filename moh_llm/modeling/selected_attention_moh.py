"""Causal attention of selected queries alone, by unmasked attention over blocks, for inference on a CPU.

Heads that share keys and values are one list of (token, head) in the order of tokens. A query sees all keys of earlier
blocks: the keys are halved again and again, and each time the queries of the second half attend to the first half
without a mask. Within a block there is one. Parts are merged by the log of their softmax's sum. What is not selected
costs nothing.

Shapes: B batch, T queries, S keys (of the cache and of this pass), H query heads, KV key-value heads, D head size.
"""

import torch

_BLOCK = 256  # tokens between which a mask is used: fewer waste fewer scores, more leave larger products
_LEAST = 1024  # queries
_OVERHEAD = 400  # over the number of queries: what this costs beyond its share of dense attention
_flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # returns the log-sum-exp, too


def is_faster(gate: torch.Tensor) -> bool:
    """Whether to take `selected_attention` for a gate `[B, T, H]`, rather than attention of all heads."""
    if gate.device.type != "cpu" or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    length = gate.shape[1]
    return length >= _LEAST and gate.count_nonzero() < gate.numel() * (1 - _OVERHEAD / length)


def selected_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    selected: torch.Tensor,
    positions: torch.Tensor,
    starts: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """Head outputs where `selected` is true, and zero elsewhere.

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
    by_token = queries.transpose(1, 2)
    out = queries.new_zeros(batch, length, heads, size)
    before, shared = int(positions[0, 0]), heads // keys.shape[1]
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
    out, total = torch.empty_like(queries), torch.empty(queries.shape[:3], dtype=torch.promote_types(queries.dtype, torch.float32))

    def within(block: int) -> None:
        """Queries of a block with the keys of it."""
        low, high, first, last = cuts[block], cuts[block + 1], edges[block], edges[block + 1]
        if low == high:
            return
        steps = torch.arange(first, last)
        mask = queries.new_zeros(high - low, last - first).masked_fill_(steps > positions[low:high, None], -torch.inf)
        rows = slice(low, high)
        out[:, :, rows], total[:, :, rows] = _flash_attention(
            queries[:, :, rows],
            *(tensor[:, :, first:last] for tensor in (keys, values)),
            attn_mask=mask[None, None],
            scale=scaling,
        )

    def add(rows: slice, first: int, last: int) -> None:
        """Merge the attention of these queries to the keys from `first` to `last`, all of which they see."""
        if rows.start == rows.stop or first == last:
            return
        part, sums = _flash_attention(
            queries[:, :, rows], *(tensor[:, :, first:last] for tensor in (keys, values)), scale=scaling
        )
        weight = torch.sigmoid(sums - total[:, :, rows]).unsqueeze(-1)
        out[:, :, rows] = out[:, :, rows].lerp(part, weight.to(part.dtype))
        total[:, :, rows] = torch.logaddexp(total[:, :, rows], sums)

    def halve(low: int, high: int) -> None:
        if high - low == 1:
            return within(low)
        middle = (low + high) // 2
        halve(low, middle)
        halve(middle, high)
        add(slice(cuts[middle], cuts[high]), edges[low], edges[middle])

    halve(0, len(edges) - 1)
    add(slice(0, len(positions)), 0, begin)  # keys before the first query's block
    return out
