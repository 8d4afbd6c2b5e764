"""`interval_attention` on a CPU, by PyTorch's flash attention kernel.

Inference computes full attention for the queries that are on (for all queries of a head if selecting them saves no
time), and windowed attention for the heads that are off for some query. A decoding step reads a key-value head only if
one of its query heads is on.

Training computes full attention for heads that may be on, and windowed attention for heads that may be off. For the
backward pass a layer keeps queries, outputs and log-sum-exp of both kinds, keys and values, and a copy of the keys and
values that windows read. Until the gradient of the gates is computed, it also keeps both outputs of every head.

Shapes: B batch, T queries, S keys (of the cache and of this pass), H query heads, KV key-value heads, D head size.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from moh_llm.attention.call import Call
from moh_llm.attention.cpu_near import near_attention
from moh_llm.attention.cpu_parts import AttentionOfSpans, causal_attention, kept, places_of, put, states_of, take
from moh_llm.attention.cpu_selected import attention_of_step, equal_runs, write_selected
from moh_llm.modeling.seen_moh import Seen, can_be_read

_LEAST_QUERIES = 1024  # in a shorter document selecting queries saves no time
# Measured cost of selecting, in queries of dense attention. It is higher with AMX, which makes only the products
# faster.
_OVERHEAD, _OVERHEAD_AMX = 400, 3300


def why_not(call: Call) -> str | None:
    """Why `cpu_attention` does not take this call; None if it does."""
    if call.query.device.type != "cpu":
        return "the tensors are not on a CPU"
    if not can_be_read(call.query):
        return "the model is being compiled"
    if call.seen.visible is not None or not call.seen.is_consecutive:
        return "keys of other tokens lie between those that a query sees"
    if call.query.shape[2] < call.key.shape[2] and call.wants_gradients:
        return "it has no gradients through a cache"
    return None


def cpu_attention(call: Call) -> Tensor:
    """`interval_attention` of a call that `why_not` does not refuse, `[B, T, H, D]`."""
    query, seen, on = call.query, call.seen, call.first <= call.seen.start
    if not call.wants_gradients:
        of, full, near = (seen.scratch or {}).pop("both", (None, None, None))
        if of is query:  # the training step already computed it, for the gate's gradient
            return torch.where(on.unsqueeze(-1), full, near)
    cast = Call(*(_as_sdpa_casts(tensor, query.dtype) for tensor in call[:3]), *call[3:])
    if call.wants_gradients:
        full, near = _in_training(cast)
        if seen.scratch is not None:
            seen.scratch["both"] = query, full.detach(), near.detach()
        return torch.where(on.unsqueeze(-1), full, near)
    return attention_of_step(cast, on) if query.shape[2] == 1 else _in_inference(cast, on)


def _as_sdpa_casts(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast as SDPA does: to autocast's dtype, or else the queries' dtype; with a last dimension of stride 1."""
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
    tensor = tensor.to(dtype)
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


class _Document(NamedTuple):
    """A document in some rows: its queries `first` to `end`, the first of which (to `middle`) have all heads on.

    `start` is the document's first key.
    """

    rows: slice
    first: int
    middle: int
    end: int
    start: int


def _documents(seen: Seen, length: int) -> tuple[list[_Document], Tensor | None]:
    """Documents of more than one token, and the queries that see only their own key, `[B or 1, T]`."""
    if seen.is_causal:
        lead = 0 if seen.all_on is None else int(seen.all_on[0].sum())  # `seen.lead` is not counted for one query
        return [_Document(slice(None), 0, lead, length, 0)], None
    starts, last = seen.start[..., 0], seen.last[..., 0]
    leads = torch.zeros_like(starts) if seen.all_on is None else seen.all_on.expand(len(starts), -1).long()
    changes = pad(starts.diff(dim=-1) != 0, (1, 1), value=True)
    alone = (starts == last) & changes[:, :-1] & changes[:, 1:]  # padding, for example
    found = []
    for row, (own, lead, skipped) in enumerate(zip(starts.tolist(), leads.tolist(), alone.tolist(), strict=True)):
        rows = slice(row, row + 1) if len(starts) > 1 else slice(None)
        for first, end in equal_runs(own):
            if not skipped[first]:
                found.append(_Document(rows, first, first + sum(lead[first:end]), end, own[first]))
    return found, alone if bool(alone.any()) else None


def _of_lone(value: Tensor, seen: Seen, heads: int) -> Tensor:
    """Outputs of queries that see only their own key, `[B, T, H, D]`."""
    own = value.index_select(2, seen.last[0, :, 0]).transpose(1, 2)
    return own.repeat_interleave(heads // value.shape[1], 2)


def _in_training(call: Call) -> tuple[Tensor, Tensor]:
    """Full attention of heads that may be on, and windowed attention of heads that may be off, `[B, T, H, D]` each."""
    query, key, value, _, seen, scaling, *_ = call
    batch, heads, length, size = query.shape
    documents, alone = kept(seen, "documents", lambda: _documents(seen, length))
    always, never = call.kinds or ((), ())

    def full_of(ids: list[int], spans: list[tuple[slice, slice]]) -> Tensor:
        """Full attention of these heads up to the end of the last span, `[B, end, len(ids), D]`."""
        end = max(tokens.stop for _, tokens in spans)
        states = (tensor[:, :, :end] for tensor in states_of(ids, query, key, value))
        return AttentionOfSpans.apply(*states, spans, scaling).transpose(1, 2)

    def spread(ids: list[int], tensor: Tensor) -> Tensor:
        """Scatter `[B, T, len(ids), D]` into zeros `[B, T, H, D]`."""
        if len(ids) == heads and ids == sorted(ids):
            return tensor
        zeros = tensor.new_zeros(batch, tensor.shape[1], heads, size)
        return zeros.index_copy(2, torch.tensor(ids, dtype=torch.long), tensor)

    full = query.new_zeros(batch, length, heads, size)
    ids = [head for head in range(heads) if head not in never]
    spans = [(document.rows, slice(document.first, document.end)) for document in documents]
    if ids and spans:
        found = full_of(ids, spans)
        full = spread(ids, pad(found, (0, 0, 0, 0, 0, length - found.shape[1])))
    spans = [(rows, slice(first, middle)) for rows, first, middle, *_ in documents if first < middle]
    if never and spans:
        found = full_of(list(never), spans)
        led = full[:, : found.shape[1]].index_copy(2, torch.tensor(never), found)
        full = torch.cat([led, full[:, found.shape[1] :]], dim=1)
    if alone is not None:
        full = torch.where(alone[..., None, None], _of_lone(value, seen, heads), full)
    local = [head for head in range(heads) if head not in always]
    if not seen.window or not local or seen.lead == length:
        return full, full.new_zeros(()).expand(full.shape)
    near = spread(*near_attention(call, local))
    return full, pad(near, (0, 0, 0, 0, seen.lead, 0))


def _in_inference(call: Call, on: Tensor) -> Tensor:
    """`cpu_attention` of more than one query per row; `on` `[B, T, H]` says which heads are on."""
    seen, always = call.seen, call.kinds[0] if call.kinds else ()
    batch, heads, length, size = call.query.shape
    out = call.query.new_zeros(batch, length, heads, size)
    documents, alone = kept(seen, "documents", lambda: _documents(seen, length))
    for document in documents:
        _write_document(out, call, on, document, always)
    if alone is not None:
        out = torch.where(alone[..., None, None], _of_lone(call.value, seen, heads), out)
    off = ~on[:, seen.lead :]
    if not seen.window:
        return out.masked_fill_(~on.unsqueeze(-1), 0)
    some = off.flatten(0, 1).any(0).tolist()
    local = [head for head in range(heads) if some[head] and head not in always]
    if local:
        order, near = near_attention(call, local)
        later, places = out[:, seen.lead :], places_of(order)
        put(later, 2, places, torch.where(take(off, 2, places).unsqueeze(-1), near, take(later, 2, places)))
    return out


def _write_document(out: Tensor, call: Call, on: Tensor, document: _Document, always: tuple[int, ...]) -> None:
    """Write full attention of one document to `out` `[B, T, H, D]` where heads are on.

    A head is computed for all queries if selecting the ones that are on, `[B, T, H]`, would not save time.
    """
    rows, first, middle, end, start = document
    keys = slice(start, int(call.seen.last[0, 0, 0]) + end)  # the last of them belongs to the last query
    out, on, query = out[rows, first:end], on[rows, first:end], call.query[rows, :, first:end]
    key, value, scaling = call.key[rows, :, keys], call.value[rows, :, keys], call.scaling
    batch, heads, length, _ = query.shape
    lead = middle - first
    counts = on[:, lead:].sum((0, 1)).tolist()
    overhead = _OVERHEAD_AMX if key.dtype == torch.bfloat16 and _has_amx() else _OVERHEAD
    least = batch * (length - lead - overhead) if length >= _LEAST_QUERIES else 0
    dense = [head for head in range(heads) if lead < length and (head in always or counts[head] >= max(1, least))]
    others = [head for head in range(heads) if head not in dense]
    if dense:
        put(out, 2, places_of(dense), causal_attention(*states_of(dense, query, key, value), scaling))
    if lead and others:
        seen = key.shape[2] - length + lead
        states = query[:, :, :lead], key[:, :, :seen], value[:, :, :seen]
        put(out[:, :lead], 2, places_of(others), causal_attention(*states_of(others, *states), scaling))
    if any(counts[head] for head in others):
        selected = on[:, lead:].index_fill(-1, torch.tensor(dense, dtype=torch.long), False)
        write_selected(out[:, lead:], query[:, :, lead:], key, value, selected, scaling)


@functools.cache
def _has_amx() -> bool:
    return bool(getattr(torch.cpu, "get_capabilities", dict)().get("amx_bf16"))  # missing in older versions of PyTorch
