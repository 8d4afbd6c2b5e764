"""`interval_attention` on a CPU: PyTorch's flash attention for what is on, in training for what may be on.

Inference attends for selected queries alone, by unmasked attention over blocks. Heads that share keys and values are
one list of (token, head) in the order of tokens. A query sees all keys of earlier blocks: the keys are halved again and
again, and each time the queries of the second half attend to the first half without a mask. Within a block there is
one. Parts are merged by the log-sum-exp of their scores. In decoding a key-value head is read where one of its query
heads is on.

Training keeps, for the backward pass of each layer: queries, outputs and log-sum-exp of heads that are always on or
routed, and of those that are not always on; keys and values, and of the latter heads a copy of those that blocks read;
which heads are on. Until the gate's gradient is taken there are outputs of both kinds for all heads, too.

Shapes: B batch, T queries, S keys (of the cache and of this pass), H query heads, KV key-value heads, D head size.
"""

import functools
import itertools
import math
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from moh_llm.attention.cpu_parts import (
    attention_of_spans,
    causal_attention,
    flash_attention,
    kept,
    merge,
    near_attention,
    places_of,
    put,
    states_of,
    take,
)
from moh_llm.modeling.interval_attention_moh import Distant
from moh_llm.modeling.seen_moh import Seen, can_be_read

_BLOCK = 256  # tokens between which a mask is used: fewer waste fewer scores, more leave larger products
_LEAST_QUERIES, _LEAST_KEYS = 1024, 512  # that are worth selecting: of a prefill, and keys of a decoding step
# Over the number of queries: what selecting costs beyond its share of dense attention, as measured. AMX makes products
# faster, and not what this does beside them.
_OVERHEAD, _OVERHEAD_AMX = 400, 3300
_PARTS = 8  # of the keys of a decoding step, at most
Kinds = tuple[tuple[int, ...], tuple[int, ...]]


def why_not(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    first: torch.Tensor,
    seen: Seen,
    scaling: float,
    distant: Distant | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> str | None:
    """Why `cpu_attention` does not take these arguments; None: it does."""
    if query.device.type != "cpu":
        return "not on a CPU"
    if not can_be_read(query):
        return "is being compiled"
    if dropout:
        return "dropout"
    if seen.visible is not None or not seen.is_consecutive:
        return "keys of other tokens lie between those that a query sees"
    if query.shape[2] < key.shape[2] and _needs_gradients(query, key, value, distant):
        return "gradients through a cache"
    return None


def _needs_gradients(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, distant: Distant | None) -> bool:
    given = query, key, value, *(distant or ())
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)


def cpu_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    first: torch.Tensor,
    seen: Seen,
    scaling: float,
    distant: Distant | None = None,
    dropout: float = 0.0,
    kinds: Kinds | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """`interval_attention` of arguments for which `why_not` gives None."""
    on, kinds = first <= seen.start, kinds or ((), ())
    if not _needs_gradients(query, key, value, distant):
        of, full, near = (seen.scratch or {}).pop("both", (None, None, None))
        if of is query:  # the other half of a training step, for the gate's gradient
            return torch.where(on.unsqueeze(-1), full, near)
    cast = (_as_sdpa_casts(tensor, query.dtype) for tensor in (query, key, value))
    given = *cast, on, seen, scaling, distant
    if _needs_gradients(query, key, value, distant):
        full, near = _in_training(*given, kinds)
        if seen.scratch is not None:
            seen.scratch["both"] = query, full.detach(), near.detach()
        return torch.where(on.unsqueeze(-1), full, near)
    return _of_step(*given) if query.shape[2] == 1 else _in_inference(*given, kinds)


def _as_sdpa_casts(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What SDPA computes with: under autocast its dtype, else that of queries; in kernels' layout."""
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
    tensor = tensor.to(dtype)
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


class _Document(NamedTuple):
    """Queries of a document in some rows: the first one, those up to `middle`, which have all heads on, and the end.

    `start` is its first key.
    """

    rows: slice
    first: int
    middle: int
    end: int
    start: int


def _documents(seen: Seen, length: int) -> tuple[list[_Document], torch.Tensor | None]:
    """The documents of more than one token of a pass, and which queries see their own key alone, `[B or 1, T]`."""
    if seen.is_causal:
        return [_Document(slice(None), 0, seen.lead, length, 0)], None
    starts, last = seen.start[..., 0], seen.last[..., 0]
    leads = torch.zeros_like(starts) if seen.all_on is None else seen.all_on.expand(len(starts), -1).long()
    changes = pad(starts.diff(dim=-1) != 0, (1, 1), value=True)
    alone = (starts == last) & changes[:, :-1] & changes[:, 1:]  # padding is of this kind
    found = []
    for row, (own, lead, skipped) in enumerate(zip(starts.tolist(), leads.tolist(), alone.tolist(), strict=True)):
        rows = slice(row, row + 1) if len(starts) > 1 else slice(None)
        for first, end in _equal(own):
            if not skipped[first]:
                found.append(_Document(rows, first, first + sum(lead[first:end]), end, own[first]))
    return found, alone if bool(alone.any()) else None


def _of_lone(value: torch.Tensor, seen: Seen, heads: int) -> torch.Tensor:
    """What queries that see their own key alone give, `[B, T, H, D]`."""
    own = value.index_select(2, seen.last[0, :, 0]).transpose(1, 2)
    return own.repeat_interleave(heads // value.shape[1], 2)


def _in_training(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    on: torch.Tensor,
    seen: Seen,
    scaling: float,
    distant: Distant | None,
    kinds: Kinds,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What heads that may be on give, and what those that may be off do, `[B, T, H, D]`; zero of the others."""
    batch, heads, length, size = query.shape
    documents, alone = kept(seen, "documents", lambda: _documents(seen, length))
    always, never = kinds

    def full_of(ids: list[int], ends: list[int]) -> torch.Tensor:
        """Full attention of these heads, up to these ends of documents."""
        spans = [
            (document.rows, slice(document.first, end))
            for document, end in zip(documents, ends, strict=True)
            if document.first < end
        ]
        last = max((tokens.stop for _, tokens in spans), default=0)
        states = (tensor[:, :, :last] for tensor in states_of(ids, query, key, value))
        return attention_of_spans(*states, spans, scaling)

    def spread(ids: list[int], tensor: torch.Tensor) -> torch.Tensor:
        """`[B, T, len(ids), D]` as `[B, T, H, D]`."""
        if len(ids) == heads and ids == sorted(ids):
            return tensor
        zeros = tensor.new_zeros(batch, tensor.shape[1], heads, size)
        return zeros.index_copy(2, torch.tensor(ids, dtype=torch.long), tensor)

    ids = [head for head in range(heads) if head not in never]
    ends = [document.end for document in documents]
    full = query.new_zeros(batch, length, heads, size)
    if ids and documents:
        found = full_of(ids, ends)
        full = spread(ids, pad(found, (0, 0, 0, 0, 0, length - found.shape[1])))
    middles = [document.middle for document in documents]
    if never and any(document.first < document.middle for document in documents):
        found = full_of(list(never), middles)
        led = full[:, : found.shape[1]].index_copy(2, torch.tensor(never), found)
        full = torch.cat([led, full[:, found.shape[1] :]], dim=1)
    if alone is not None:
        full = torch.where(alone[..., None, None], _of_lone(value, seen, heads), full)
    local = [head for head in range(heads) if head not in always]
    if not seen.window or not local or seen.lead == length:
        return full, full.new_zeros(()).expand(full.shape)
    near = spread(*near_attention(query, key, value, local, seen, scaling, distant))
    return full, pad(near, (0, 0, 0, 0, seen.lead, 0))


def _in_inference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    on: torch.Tensor,
    seen: Seen,
    scaling: float,
    distant: Distant | None,
    kinds: Kinds,
) -> torch.Tensor:
    """`cpu_attention` of several queries of a row."""
    batch, heads, length, size = query.shape
    out = query.new_zeros(batch, length, heads, size)
    documents, alone = kept(seen, "documents", lambda: _documents(seen, length))
    before = int(seen.last[0, 0, 0])
    for document in documents:
        rows, first, _, end, start = document
        states = (tensor[rows, :, start : before + end] for tensor in (key, value))
        tokens = slice(first, end)
        _of_document(out[rows, tokens], query[rows, :, tokens], *states, on[rows, tokens], document, scaling, kinds[0])
    if alone is not None:
        out = torch.where(alone[..., None, None], _of_lone(value, seen, heads), out)
    off = ~on[:, seen.lead :]
    if not seen.window:
        return out.masked_fill_(~on.unsqueeze(-1), 0)
    some = off.flatten(0, 1).any(0).tolist()
    local = [head for head in range(heads) if some[head] and head not in kinds[0]]
    if local:
        order, near = near_attention(query, key, value, local, seen, scaling, distant)
        later, places = out[:, seen.lead :], places_of(order)
        put(later, 2, places, torch.where(take(off, 2, places).unsqueeze(-1), near, take(later, 2, places)))
    return out


def _of_document(
    out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    on: torch.Tensor,
    document: _Document,
    scaling: float,
    always: tuple[int, ...],
) -> None:
    """Write full attention of a document where heads are on, and where less than all is worth no selecting.

    Of its queries; `out` is `[B, T, H, D]`, `on` `[B, T, H]`. Its keys `[B, KV, S, D]` end with its last query's.
    """
    batch, heads, length, _ = query.shape
    lead = document.middle - document.first
    counts = on[:, lead:].sum((0, 1)).tolist()
    least = 1
    if length >= _LEAST_QUERIES:
        least = max(
            1, batch * (length - lead - (_OVERHEAD_AMX if key.dtype == torch.bfloat16 and _has_amx() else _OVERHEAD))
        )
    dense = [head for head in range(heads) if lead < length and (head in always or counts[head] >= least)]
    others = [head for head in range(heads) if head not in dense]
    if dense:
        put(out, 2, places_of(dense), causal_attention(*states_of(dense, query, key, value), scaling))
    if lead and others:
        seen = key.shape[2] - length + lead
        states = query[:, :, :lead], key[:, :, :seen], value[:, :, :seen]
        put(out[:, :lead], 2, places_of(others), causal_attention(*states_of(others, *states), scaling))
    if any(counts[head] for head in others):
        selected = on[:, lead:].index_fill(-1, torch.tensor(dense, dtype=torch.long), False)
        _of_selected(out[:, lead:], query[:, :, lead:], key, value, selected, scaling)


@functools.cache
def _has_amx() -> bool:
    return bool(getattr(torch.cpu, "get_capabilities", dict)().get("amx_bf16"))  # not there in older versions


def _of_selected(
    out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    selected: torch.Tensor,
    scaling: float,
) -> None:
    """Write head outputs `[B, T, H, D]` where `selected` `[B, T, H]` is true; the last key is the last query's."""
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


def _of_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    on: torch.Tensor,
    seen: Seen,
    scaling: float,
    distant: Distant | None,
) -> torch.Tensor:
    """`cpu_attention` of one query per row, which reads a key-value head where one of its query heads is on."""
    batch, heads, _, size = query.shape
    groups = key.shape[1]
    runs, end, sees_all = kept(seen, "runs", lambda: _runs(seen, batch))
    if sees_all is not None:  # local attention is full attention there
        on = on | sees_all
    query = query.reshape(batch, groups, 1, -1, size)
    flags = on.view(batch, groups, -1).any(-1)
    is_off = not bool(on.all())
    out = query.new_zeros(query.shape)
    near = query.new_zeros(query.shape) if is_off and seen.window else None
    for rows, start, band, hidden in runs:
        taken = [tensor[rows, :, start:end].flatten(0, 1).unsqueeze(1) for tensor in (key, value)]
        own = query[rows].flatten(0, 1)
        _decode(out[rows].flatten(0, 1), own, *taken, flags[rows].flatten().tolist(), scaling)
        if near is not None and hidden > 0:
            taken = [torch.cat([tensor[rows, :, part] for part in band], dim=2) for tensor in (key, value)]
            found, sums = flash_attention(query[rows, :, 0], *taken, scale=scaling)
            if distant is not None:
                weights = torch.sigmoid((distant[0][rows] + math.log(hidden)).view(sums.shape) - sums).to(found.dtype)
                found = found.lerp(distant[1].to(found.dtype).view(groups, -1, size), weights.unsqueeze(-1))
            near[rows, :, 0] = found
    out = out.view(batch, 1, heads, size)
    if not is_off:
        return out
    return torch.where(on.unsqueeze(-1), out, 0.0 if near is None else near.view(out.shape))


def _runs(seen: Seen, batch: int) -> tuple[list[tuple[slice, int, tuple[slice, slice], int]], int, torch.Tensor | None]:
    """Neighbouring rows of a step whose documents begin at the same key.

    Returns rows, that key, where keys of local attention are, and how many others there are; the key after the last
    one; and which rows see all keys whatever their heads, if any do.
    """
    starts, nears, hidden = (tensor[:, 0, 0].expand(batch).tolist() for tensor in (seen.start, seen.near, seen.hidden))
    end, found = int(seen.last[0, 0, 0]) + 1, []
    for first, last in _equal(starts):
        start = starts[first]
        band = slice(start, start + seen.sinks), slice(nears[first], end)
        found.append((slice(first, last), start, band, hidden[first]))
    sees_all = seen.hidden < 1 if seen.window and min(hidden) < 1 else None
    return found, end, sees_all


def _decode(
    out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    flags: list[bool],
    scaling: float,
) -> None:
    """Write attention of queries `[N, 1, M, D]` to keys `[N, 1, S, D]` of N key-value heads, where flags are true.

    A call is for as many key-value heads as there are threads, or a multiple of that, and reads keys where they lie,
    once for all heads of a group. Of those that are left over all threads read a part.
    """
    threads = torch.get_num_threads()
    whole, left = _calls(flags, threads)
    for places in whole:
        out[places] = flash_attention(query[places], key[places], value[places], scale=scaling)[0]
    for places in left:
        out[places] = _in_parts(query[places], key[places], value[places], threads, scaling)


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
