"""PyTorch's flash attention kernel for CPUs: merging its results, and causal attention of documents with gradients.

Shapes: B batch, T queries, S keys (of the cache and of this pass), H query heads, KV key-value heads, D head size.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moh_llm.modeling.seen_moh import Seen

_CHUNK, _LEAST_CHUNKS = 2048, 4096  # queries per chunk of causal attention; shorter texts are not chunked
flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # also returns the log-sum-exp
flash_gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def kept(seen: Seen, name: Any, make: Callable[[], Any]) -> Any:
    """Return `make()`, computed once for all layers of a pass, which share `seen`."""
    of, found = (seen.scratch or {}).get(name, (None, None))
    if of is not seen.last:  # a copy by `_replace` has the same scratch
        found = make()
        if seen.scratch is not None:
            seen.scratch[name] = seen.last, found
    return found


def merge(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Merge the attention to two sets of keys, each given as outputs `[..., D]` and log-sum-exp `[...]`."""
    weight = torch.sigmoid(other[1] - one[1]).unsqueeze(-1).to(one[0].dtype)
    return one[0].lerp(other[0], weight), torch.logaddexp(one[1], other[1])


def places_of(heads: Iterable[int]) -> slice | Tensor:
    """Ids of heads as a slice if they are consecutive (indexing then makes no copy), else as a tensor."""
    ids = list(heads)
    if ids and ids == list(range(ids[0], ids[-1] + 1)):
        return slice(ids[0], ids[-1] + 1)
    return torch.tensor(ids, dtype=torch.long)


def take(tensor: Tensor, dim: int, places: slice | Tensor) -> Tensor:
    """Select the entries at `places` of a dimension."""
    if isinstance(places, slice):
        return tensor.narrow(dim, places.start, places.stop - places.start)
    return tensor.index_select(dim, places)


def put(tensor: Tensor, dim: int, places: slice | Tensor, entries: Tensor) -> None:
    """Write entries to where `take` reads them."""
    if isinstance(places, slice):
        take(tensor, dim, places).copy_(entries)
    else:
        tensor.index_copy_(dim, places, entries)


def states_of(heads: list[int], query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The queries of `heads`, and their keys and values with an equal number of query heads per key-value head."""
    count, groups = query.shape[1], key.shape[1]
    if len(heads) == count:
        return query, key, value
    of_heads = [head // (count // groups) for head in heads]
    whole = sorted(set(of_heads))
    if of_heads == sorted(whole * (len(heads) // len(whole))):
        of_heads = whole
    # The kernel's output inherits these strides, in which a token's heads are contiguous.
    own = take(query.transpose(1, 2), 2, places_of(heads)).transpose(1, 2)
    places = places_of(of_heads)
    return own, take(key, 1, places), take(value, 1, places)


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Causal attention `[B, T, H, D]` of the last T of S tokens, for inference.

    The kernel gives every thread the same number of queries, in order of rows and heads, but later queries see more
    keys. If the number of threads does not divide the number of heads, one thread gets the late queries of a head and
    the others wait. Chunks of queries, which read all earlier keys without a mask, balance the work.
    """
    length, before = query.shape[2], key.shape[2] - query.shape[2]
    uneven = query.shape[0] * query.shape[1] % torch.get_num_threads() and length >= _LEAST_CHUNKS
    chunk, outputs = _CHUNK if uneven else length, []
    for begin in range(0, length, chunk):
        rows, seen = slice(begin, begin + chunk), before + begin
        end = min(seen + chunk, key.shape[2])
        own = query[:, :, rows]
        part = flash_attention(own, key[:, :, seen:end], value[:, :, seen:end], is_causal=True, scale=scaling)
        if seen:
            part = merge(part, flash_attention(own, key[:, :, :seen], value[:, :, :seen], scale=scaling))
        outputs.append(part[0])
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)).transpose(1, 2)


class AttentionOfSpans(torch.autograd.Function):
    """Causal attention `[B, H, T, D]` within each span of rows and tokens; zero elsewhere."""

    @staticmethod
    def forward(
        ctx, query: Tensor, key: Tensor, value: Tensor, spans: list[tuple[slice, slice]], scaling: float
    ) -> Tensor:
        if _is_whole(spans, query):
            out, sums = flash_attention(query, key, value, is_causal=True, scale=scaling)
        else:
            out, sums = torch.zeros_like(query), query.new_zeros(query.shape[:3], dtype=sums_dtype(query.dtype))
            for rows, tokens in spans:
                states = (tensor[rows, :, tokens] for tensor in (query, key, value))
                out[rows, :, tokens], sums[rows, :, tokens] = flash_attention(*states, is_causal=True, scale=scaling)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.spans, ctx.scaling = spans, scaling
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, sums = ctx.saved_tensors
        if _is_whole(ctx.spans, query):
            found = _causal_gradients(gradient.contiguous(), query, key, value, out, sums, ctx.scaling)
            return *found, None, None
        found = tuple(torch.zeros_like(tensor) for tensor in (query, key, value))
        for rows, tokens in ctx.spans:
            states = (tensor[rows, :, tokens] for tensor in (gradient, query, key, value, out, sums))
            for whole, part in zip(found, _causal_gradients(*states, ctx.scaling), strict=True):
                whole[rows, :, tokens] = part
        return *found, None, None


def _causal_gradients(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, scaling: float
) -> tuple[Tensor, ...]:
    """Gradients of queries, keys and values.

    The backward kernel gives whole key-value heads to threads. If the number of threads does not divide them, every
    query head gets its own copy of keys and values, which balances the work.
    """
    shared = query.shape[1] // key.shape[1]
    if shared == 1 or not len(key) * key.shape[1] % torch.get_num_threads():
        return flash_gradients(gradient, query, key, value, out, sums, 0.0, True, scale=scaling)
    key, value = (tensor.repeat_interleave(shared, 1) for tensor in (key, value))
    found = flash_gradients(gradient, query, key, value, out, sums, 0.0, True, scale=scaling)
    return found[0], *(tensor.unflatten(1, (-1, shared)).sum(2) for tensor in found[1:])


def _is_whole(spans: list[tuple[slice, slice]], query: Tensor) -> bool:
    """Whether the spans are one span of all rows and tokens of `query` `[B, H, T, D]`."""
    return spans == [(slice(None), slice(0, query.shape[2]))]


def sums_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the kernel's log-sum-exp."""
    return torch.promote_types(dtype, torch.float32)
