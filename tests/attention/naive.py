"""Interval attention as a plain loop over rows, queries and heads, and the `Seen` of texts laid out in rows.

Shapes: B batch, T queries, S keys (of the cache and of this pass), H query heads, KV key-value heads, D head size.
"""

import math

import torch

from moh_llm.modeling.seen_moh import Seen


def naive_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    first: torch.Tensor,
    seen: Seen,
    scaling: float,
    distant: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Head outputs `[B, T, H, D]` in the dtype of `query`, differentiable; give float64 for exactness.

    Query t of head h sees keys s with s <= last and (s >= first or start <= s < sink_end); where it is off (first is
    after start) and keys are hidden, the distant token, too. One that sees nothing gives zeros.

    Args:
        query: `[B, H, T, D]`.
        key: `[B, KV, S, D]`; so is `value`.
        first: the first key of each query and head, `[B, T, H]`.
        seen: as in `Seen`. Keys that `visible` hides are left out.
        scaling: of the products of queries and keys.
        distant: scores `[B, T, H]`, scaled, and values `[H, D]`.
    """
    batch, heads, queries, _ = query.shape
    shared = heads // key.shape[1]
    last, start, sink_end, hidden = (
        field.expand(batch, queries, heads).tolist() for field in (seen.last, seen.start, seen.sink_end, seen.hidden)
    )
    rows = []
    for b in range(batch):
        for t in range(queries):
            for h in range(heads):
                added = _added(seen.visible, b, h, t, key.shape[2])
                begin, low = start[b][t][h], int(first[b, t, h])
                places = [s for s in added if s <= last[b][t][h] and (s >= low or begin <= s < sink_end[b][t][h])]
                group, bias = h // shared, query.new_tensor([added[s] for s in places])
                places = torch.tensor(places, dtype=torch.long)
                scores = key[b, group, places] @ query[b, h, t] * scaling + bias
                values = value[b, group, places]
                if distant is not None and low > begin and hidden[b][t][h] > 0:
                    far = distant[0][b, t, h].to(query) + math.log(hidden[b][t][h])
                    scores, values = torch.cat([scores, far[None]]), torch.cat([values, distant[1][h].to(value)[None]])
                rows.append(scores.softmax(0) @ values if len(scores) else torch.zeros_like(query[b, h, t]))
    return torch.stack(rows).view(batch, queries, heads, -1)


def _added(visible: torch.Tensor | None, b: int, h: int, t: int, keys: int) -> dict[int, float]:
    """The keys that a mask shows a query of a head, and what it adds to the score of each."""
    if visible is None:
        return dict.fromkeys(range(keys), 0.0)
    row = visible[b] if visible.dim() == 2 else visible[b, h % visible.shape[1], t]
    if row.dtype == torch.bool:
        return dict.fromkeys(row.nonzero()[:, 0].tolist(), 0.0)
    return {s: added for s, added in enumerate(row.tolist()) if added > torch.finfo(row.dtype).min / 2}


def seen_of(
    rows: list[list[int]], queries: int | None = None, window: int = 8, sinks: int = 0, local_start: int = 0
) -> Seen:
    """The `Seen` of rows of texts, each given by the lengths of its documents, those of padding below zero.

    `[[-3, 10], [13]]` is a row with padding on the left and one without, `[[6, 7]]` two documents. A token of padding
    sees itself. The last `queries` tokens are the queries (all where None), the keys before them a cache. The first
    `local_start` tokens of a document have all heads on, and so have those that see every key. With `window=0` heads
    that are off see nothing.
    """
    starts = []
    for row in rows:
        begin, own = 0, []
        for length in row:
            own += range(begin, begin - length) if length < 0 else [begin] * length
            begin += abs(length)
        starts.append(own)
    keys = len(starts[0])
    queries = keys if queries is None else queries
    last = torch.arange(keys - queries, keys)[None, :, None]
    start = torch.tensor(starts)[:, keys - queries :, None]
    near = torch.maximum(last - window + 1, start)
    sink_end = torch.minimum(start + sinks, last + 1)
    hidden = near - start - sinks if window else torch.zeros_like(start)
    all_on = (last - start < max(local_start, window + sinks if window else 0))[..., 0]
    lead = int(all_on.all(0).int().cumprod(0).sum()) if queries > 1 else 0  # as `Seen.from_positions`
    is_causal = all(len(row) == 1 for row in rows) and queries == keys
    return Seen(last, start, near, sink_end, hidden, window, sinks, all_on, lead, is_causal)


def first_of(on: torch.Tensor, seen: Seen) -> torch.Tensor:
    """`seen.first(on)` where the tokens of `seen.all_on` have all heads on, given `on` `[B, T, H]`."""
    return seen.first(on | seen.all_on[..., None]).expand(on.shape)
