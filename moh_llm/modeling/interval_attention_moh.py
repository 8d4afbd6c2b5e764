"""The operation of a Mixture-of-Head layer: attention in which every query of a head has its own first key.

`interval_attention` calls a faster implementation if one is registered, as `import moh_llm` does. This file holds the
reference: PyTorch's `scaled_dot_product_attention` in blocks of queries, on any device, with gradients.

Shapes: B batch, T queries, S keys (of the cache and of this pass), H query heads, KV key-value heads, D head size.
"""

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout as drop
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .seen_moh import Seen, can_be_read

NAME = "moh_interval"  # the faster implementation's name in transformers' registry of attention functions
_ROWS, _BLOCK = 512, 128  # queries per block of full attention, and of windowed attention
_WIDER = 8  # the distant token widens the heads by this: kernels want head sizes that are multiples of 8
Distant = tuple[Tensor, Tensor]
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # SDPA's kernel, which also returns the log-sum-exp


def interval_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first: Tensor,
    seen: Seen,
    scaling: float,
    distant: Distant | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> Tensor:
    """Attention in which every query of a head sees the keys from its own first key on, the sinks, and a distant token.

    Query t of head h sees the keys s <= `last[t]` with s >= `first[t, h]` or `start[t]` <= s < `sink_end[t]`. If this
    hides n > 0 keys, the softmax has one more entry, the distant token, whose score is increased by log n.

    Args:
        query: `[B, H, T, D]`, after rotary embedding. Consecutive heads share a key-value head.
        key, value: `[B, KV, S, D]`, including the keys and values of a cache.
        first: first key of each query and head, `[B, T, H]`; see `Seen.first`.
        seen: the keys that queries see, whatever the head.
        scaling: factor of the scores.
        distant: scores of the distant token `[B, T, H]` (already scaled) and its values `[H, D]`.
        dropout: dropout probability of the attention weights.
        kwargs: for a registered implementation: `kinds`, ids of the heads that are always on and of those that are
            never on; `module`, the layer.

    Returns:
        Head outputs `[B, T, H, D]`; zero where a query sees no key.
    """
    attend = ALL_ATTENTION_FUNCTIONS.get(NAME)
    if attend is None:
        return reference_attention(query, key, value, first, seen, scaling, distant, dropout)
    return attend(query, key, value, first, seen, scaling, distant, dropout, **kwargs)


def reference_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first: Tensor,
    seen: Seen,
    scaling: float,
    distant: Distant | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """`interval_attention` in plain PyTorch. Memory is linear in T, except with `seen.visible`."""
    if seen.visible is not None:
        return masked_attention(query, key, value, first, seen, scaling, distant, dropout)
    on = first <= seen.start
    if can_be_read(on) and on.is_cpu and not (torch.is_grad_enabled() or torch.is_autocast_enabled("cpu")):
        full = _of_selected_queries(query, key, value, on, seen, scaling)
    else:
        full = _of_all_queries(query, key, value, seen, scaling, dropout)
    near = full.new_zeros(())
    if seen.window:
        near = near_attention(query, key, value, seen, scaling, distant, dropout)
    return torch.where(on.unsqueeze(-1), full, near)


def masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first: Tensor,
    seen: Seen,
    scaling: float,
    distant: Distant | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """`interval_attention` by its definition: all scores, a mask, a softmax. Supports every mask."""
    count = key.shape[2] if seen.visible is None else min(key.shape[2], seen.visible.shape[-1])
    places = torch.arange(count, device=key.device)
    shared = query.shape[1] // key.shape[1]
    key, value = (states[:, :, :count].repeat_interleave(shared, 1) for states in (key, value))
    outputs = []
    for rows in torch.arange(query.shape[2], device=query.device).split(_ROWS // 2):
        last, start, sink_end, own, hidden = (
            tensor[:, rows].transpose(1, 2).unsqueeze(-1)  # [B or 1, 1 or H, rows, 1]
            for tensor in (seen.last, seen.start, seen.sink_end, first, seen.hidden)
        )
        shows = (places <= last) & ((places >= own) | ((places >= start) & (places < sink_end)))
        scores = query[:, :, rows] @ key.transpose(2, 3) * scaling
        if seen.visible is not None:
            mask = (seen.visible[:, None, None] if seen.visible.dim() == 2 else seen.visible[:, :, rows])[..., :count]
            shows = shows & (mask > -torch.inf if mask.is_floating_point() else mask)
            scores = scores + mask if mask.is_floating_point() else scores
        scores = scores.masked_fill(~shows, -torch.inf)
        if distant is not None:
            score = distant[0][:, rows].transpose(1, 2).unsqueeze(-1) + _log(hidden, scores.dtype)
            scores = torch.cat([scores, score.masked_fill((own <= start) | (hidden < 1), -torch.inf)], dim=-1)
        nothing = (scores == -torch.inf).all(-1, keepdim=True)
        scores = scores.masked_fill(nothing, 0)  # else its softmax would be NaN
        weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).masked_fill(nothing, 0)
        weights = (drop(weights, dropout) if dropout else weights).to(value.dtype)
        out = weights[..., :count] @ value
        if distant is not None:
            out = out + weights[..., -1:] * distant[1].unsqueeze(1).to(value.dtype)
        outputs.append(out)
    return torch.cat(outputs, dim=2).transpose(1, 2)


def _log(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Logarithm of the number of hidden keys, in float32 or wider; 0 if there are none."""
    return hidden.clamp_min(1).to(torch.promote_types(dtype, torch.float32)).log()


def _of_all_queries(query: Tensor, key: Tensor, value: Tensor, seen: Seen, scaling: float, dropout: float) -> Tensor:
    """Causal attention of each query to its whole document, `[B, T, H, D]`."""
    length, shared = query.shape[2], query.shape[1] // key.shape[1]
    how: dict = {"dropout_p": dropout, "scale": scaling}
    how["enable_gqa"] = True if shared > 1 else False  # noqa: SIM210 (the comparison may be symbolic)
    if seen.is_causal and length == key.shape[2]:
        return scaled_dot_product_attention(query, key, value, is_causal=True, **how).transpose(1, 2)
    if not query.is_cpu:  # GPU kernels with a mask do not support grouped heads
        key, value, how["enable_gqa"] = *(states.repeat_interleave(shared, 1) for states in (key, value)), False
    outputs, places = [], torch.arange(key.shape[2], device=key.device)
    for begin in range(0, length, _ROWS):
        last, start = (tensor[:, begin : begin + _ROWS, 0, None] for tensor in (seen.last, seen.start))
        end = int(last.max()) + 1 if can_be_read(last) and last.is_cpu else len(places)
        mask = ((places[:end] <= last) & (places[:end] >= start)).unsqueeze(1)
        states = query[:, :, begin : begin + _ROWS], key[:, :, :end], value[:, :, :end]
        outputs.append(scaled_dot_product_attention(*states, attn_mask=mask, **how))
    return torch.cat(outputs, dim=2).transpose(1, 2)


def _of_selected_queries(query: Tensor, key: Tensor, value: Tensor, on: Tensor, seen: Seen, scaling: float) -> Tensor:
    """`_of_all_queries` where `on` `[B, T, H]`, zero elsewhere: saves time in inference on a CPU."""
    batch, heads, length, size = query.shape
    shared = heads // key.shape[1]
    by_token, out = query.transpose(1, 2), query.new_zeros(batch, length, heads, size)
    for row in range(batch):
        for begin in range(0, length, _ROWS):
            part = slice(begin, begin + _ROWS)
            last, start = (tensor[row % len(tensor), part] for tensor in (seen.last, seen.start))  # [rows, 1]
            low, high = int(start.min()), int(last.max()) + 1
            # Every query of the block sees all keys before this one.
            own = int(last.min()) if int(start.max()) == low else low
            places = torch.arange(own, high)
            mask = torch.zeros(len(last), len(places), dtype=query.dtype)
            mask.masked_fill_((places > last) | (places < start), -torch.inf)
            for group in range(key.shape[1]):
                chosen = on[row, begin : begin + _ROWS, group * shared : (group + 1) * shared].nonzero()
                if not len(chosen):
                    continue
                tokens, ids = chosen[:, 0], chosen[:, 1] + group * shared
                listed = by_token[row, begin + tokens, ids][None, None]
                states = [tensor[row, group, low:high][None, None] for tensor in (key, value)]
                later = (tensor[:, :, own - low :] for tensor in states)
                found, total = _flash(listed, *later, attn_mask=mask[tokens][None, None], scale=scaling)
                if own > low:  # merge the two parts of the softmax by log-sum-exp
                    part, of_part = _flash(listed, *(tensor[:, :, : own - low] for tensor in states), scale=scaling)
                    found = found.lerp(part, torch.sigmoid(of_part - total).unsqueeze(-1).to(found.dtype))
                out[row, begin + tokens, ids] = found[0, 0]
    return out


def near_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Seen,
    scaling: float,
    distant: Distant | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """`interval_attention` with every head off, `[B, T, H, D]`.

    A block of queries reads the sinks of its first query's document and the keys of all its windows (which include the
    sinks of later documents). Heads that share keys are concatenated along the queries. The distant token is one more
    key; its score is an extra entry of the query vectors.
    """
    if not seen.is_consecutive and can_be_read(seen.last):
        return _near_of_requests(query, key, value, seen, scaling, distant, dropout)
    batch, heads, length, size = query.shape
    groups, count = key.shape[1], key.shape[2]
    block = min(length, seen.window, _BLOCK) if seen.is_consecutive else 1
    last, start, near, sink_end, hidden = (
        in_blocks(tensor, block) for tensor in (seen.last, seen.start, seen.near, seen.sink_end, seen.hidden)
    )
    band = last[:, :, :1] - seen.window + 1 + torch.arange(seen.window - 1 + block, device=key.device)
    sinks = start[:, :, :1] + torch.arange(seen.sinks, device=key.device)
    index = torch.cat([sinks, band.expand(len(sinks), -1, -1, -1)], dim=-1)  # [B or 1, N, 1, K]
    shows = (index <= last) & (index >= start) & ((index >= near) | (index < sink_end))
    is_sink = torch.arange(index.shape[-1], device=key.device) < seen.sinks
    shows &= ~is_sink | (index < band[..., :1])  # a sink inside the window counts once
    index = index[:, :, 0].clamp(0, count - 1)

    def taken(states: Tensor) -> Tensor:
        """Gather keys or values of each block, `[B * N, KV, K, D]`."""
        by_token = states.transpose(1, 2).expand(batch, -1, -1, -1)
        if len(index) == 1:
            found = by_token.index_select(1, index.flatten())
        else:
            places = index.flatten(1)[:, :, None, None].expand(-1, -1, groups, states.shape[-1])
            found = by_token.gather(1, places)
        return found.unflatten(1, index.shape[1:]).transpose(2, 3).flatten(0, 1)

    queries, keys, values = in_blocks(query.transpose(1, 2), block), taken(key), taken(value)
    if distant is not None:
        score = (distant[0] + _log(seen.hidden, query.dtype)) / scaling
        queries = torch.cat([queries, in_blocks(score.to(query.dtype), block).unsqueeze(-1)], dim=-1)
        queries, keys, values = pad(queries, (0, _WIDER - 1)), *(pad(s, (0, _WIDER, 0, 1)) for s in (keys, values))
        keys[..., -1, size] = values[..., -1, size] = 1
        shows = torch.cat([shows, hidden.expand(len(shows), -1, -1, -1) > 0], dim=-1)
    shared = heads // groups
    queries = queries.flatten(0, 1).unflatten(2, (groups, shared)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    mask = shows.expand(batch, -1, -1, -1).flatten(0, 1).repeat(1, shared, 1).unsqueeze(1)
    out = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, dropout_p=dropout, scale=scaling)
    out = out.unflatten(2, (shared, block)).permute(0, 3, 1, 2, 4).reshape(batch, -1, heads, out.shape[-1])[:, :length]
    if distant is None:
        return out
    return out[..., :size] + out[..., size : size + 1] * distant[1].to(out.dtype)


def in_blocks(tensor: Tensor, block: int) -> Tensor:
    """Split `[B, T, ...]` into blocks `[B, N, block, ...]`, repeating the last entry to fill the last block."""
    if missing := -tensor.shape[1] % block:
        tensor = torch.cat([tensor, tensor[:, -1:].expand(-1, missing, *tensor.shape[2:])], dim=1)
    return tensor.unflatten(1, (-1, block))


def _near_of_requests(
    query: Tensor, key: Tensor, value: Tensor, seen: Seen, scaling: float, distant: Distant | None, dropout: float
) -> Tensor:
    """`near_attention` of concatenated requests; requests of equal length become the rows of one batch."""
    edges = [0, *((seen.last[0, :, 0].diff() != 1).nonzero()[:, 0] + 1).tolist(), query.shape[2]]
    out = query.new_empty(*query.transpose(1, 2).shape[:3], value.shape[3])
    begins: dict[int, list[int]] = {}
    for begin, end in itertools.pairwise(edges):
        begins.setdefault(end - begin, []).append(begin)
    for count, found in begins.items():
        tokens = torch.tensor(found, device=query.device)[:, None] + torch.arange(count, device=query.device)
        fields = ("last", "start", "near", "sink_end", "hidden")
        own = seen._replace(is_consecutive=True, **{name: getattr(seen, name)[0, tokens] for name in fields})
        token = None if distant is None else (distant[0][0, tokens], distant[1])
        states = query[0, :, tokens].transpose(0, 1), key, value
        out[0, tokens] = near_attention(*states, own, scaling, token, dropout).to(out.dtype)
    return out
