"""PyTorch's flash attention on a CPU: its kernel, parts of it merged, causal attention in halves, and gradients.

Given the outputs and the log-sum-exp of all keys, the kernel's gradients of some keys are their share of the whole.

Shapes: B batch, T queries, S keys (of the cache and of this pass), H query heads, KV key-value heads, D head size.
"""

import torch
from torch.autograd.function import once_differentiable

_LEAST_HALVES = 4096  # queries that are worth halving where threads have unequal shares of the work
_LEAST_HALF_GRADIENTS = 2048  # the same of a backward pass, whose heads no two threads share
_COST_OF_HALVES = 1.15  # of a backward pass, at most
flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # returns the log-sum-exp, too
_flash_gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def has_flash_attention(tensor: torch.Tensor) -> bool:
    """Whether `flash_attention` can be called: on a CPU, without gradients, outside of autocast and compiled code."""
    # Autocast leaves queries in another dtype than values, and does not cast the arguments of this function.
    varied = torch.is_grad_enabled() or torch.is_autocast_enabled("cpu")
    return not varied and has_flash_kernel(tensor)


def has_flash_kernel(tensor: torch.Tensor) -> bool:
    """Whether the functions of this file with gradients can be called: on a CPU, outside of compiled code."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def merge(
    one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to two sets of keys, given each one's outputs `[..., D]` and log-sum-exp of the scores `[...]`."""
    weight = torch.sigmoid(other[1] - one[1]).unsqueeze(-1).to(one[0].dtype)
    return one[0].lerp(other[0], weight), torch.logaddexp(one[1], other[1])


def is_uneven(queries: torch.Tensor, keys: torch.Tensor) -> bool:
    """Whether `halved_attention` takes less time than causal attention in one call, for queries `[B, H, T, D]`.

    `flash_attention` gives each thread as many queries, in order of rows and heads, and later queries see more keys. So
    where threads do not divide the number of heads, one thread has the later half of a head's queries.
    """
    rows, length, threads = queries.shape[0] * queries.shape[1], queries.shape[2], torch.get_num_threads()
    pays = length == keys.shape[2] >= _LEAST_HALVES and rows % threads and rows < 3 * threads
    return bool(pays) and has_flash_attention(queries)


def has_uneven_gradients(queries: torch.Tensor, keys: torch.Tensor) -> bool:
    """Whether the backward pass of `attention_with_halved_gradients` takes less time than that of one call.

    Going backward the kernel gives whole key-value heads to threads: of three on two threads one thread has two.
    """
    tasks, length, threads = keys.shape[0] * keys.shape[1], queries.shape[2], torch.get_num_threads()
    pays = length == keys.shape[2] >= _LEAST_HALF_GRADIENTS
    if not (pays and torch.is_grad_enabled() and has_flash_kernel(queries)):
        return False
    return _share_of_most(tasks, threads) > _COST_OF_HALVES * _share_of_most(2 * tasks, threads)


def _share_of_most(tasks: int, threads: int) -> float:
    """Tasks of the thread that has the most, over those of the average thread."""
    return -(-tasks // threads) * threads / tasks


def halved_attention(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> torch.Tensor:
    """Causal attention `[B, T, H, D]` of queries `[B, H, T, D]` and as many keys `[B, KV, T, D]`, in equal halves.

    The earlier and the later half are rows of one call, and the later one also attends to all keys before it.
    """
    first = queries.shape[2] // 2
    halves = (_halves(tensor) for tensor in (queries, keys, values))
    out, sums = (tensor.unflatten(0, (-1, 2)) for tensor in flash_attention(*halves, is_causal=True, scale=scaling))
    before = flash_attention(queries[:, :, first:], keys[:, :, :first], values[:, :, :first], scale=scaling)
    later, _ = merge((out[:, 1], sums[:, 1]), before)
    return torch.cat([out[:, 0, :, :first], later], dim=2).transpose(1, 2)


def attention_with_halved_gradients(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float
) -> torch.Tensor:
    """`halved_attention` going backward alone: outputs are those of one call, gradients are computed in halves."""
    return _HalvedGradients.apply(*_autocast(queries, keys, values), scaling).transpose(1, 2)


def attention_and_distant(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    distant: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """Attention of heads that share keys, where each has one more entry of the softmax: its distant token's.

    Args:
        queries: `[B, KV, M, T, D]`, of M heads that share keys and values.
        keys, values: `[B, KV, S, D]`.
        mask: added to the scores of the M heads' queries, `[B, 1, M * T, S]`; it has no gradient.
        scaling: factor of the scores.
        distant: scores of the distant tokens, already scaled, `[B, KV, M, T]`, -inf where there is none, and their
            values `[KV, M, 1, D]`.

    Returns:
        Head outputs `[B, KV, M, T, D]`.
    """
    size, heads = queries.shape, queries.shape[2]
    given = _autocast(queries.flatten(2, 3), keys, values)
    return _AttentionAndDistant.apply(*given, mask, scaling, heads, *(distant or (None, None))).view(size)


def _autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What autocast makes of the arguments of SDPA."""
    return tuple(tensor.to(dtype_of_attention(tensor)) for tensor in tensors)


def dtype_of_attention(tensor: torch.Tensor) -> torch.dtype:
    """What SDPA computes in, given its queries, keys or values."""
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else tensor.dtype


class _AttentionAndDistant(torch.autograd.Function):
    """See `attention_and_distant`; queries and outputs are `[B, KV, M * T, D]`."""

    @staticmethod
    def forward(
        ctx,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None,
        scaling: float,
        heads: int,
        scores: torch.Tensor | None,
        value: torch.Tensor | None,
    ) -> torch.Tensor:
        """Outputs."""
        out, sums = flash_attention(queries, keys, values, attn_mask=mask, scale=scaling)
        if scores is not None:
            weights = torch.sigmoid(scores.flatten(2, 3) - sums).unsqueeze(-1).to(out.dtype)
            out, weights = (tensor.unflatten(2, (heads, -1)) for tensor in (out, weights))
            out = out.lerp(value.to(out.dtype), weights).flatten(2, 3)
            sums = torch.logaddexp(scores.flatten(2, 3), sums)
        ctx.save_for_backward(queries, keys, values, mask, out, sums, scores, value)
        ctx.scaling, ctx.heads = scaling, heads
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of queries, keys, values, and of the distant tokens' scores and values."""
        queries, keys, values, mask, out, sums, scores, value = ctx.saved_tensors
        gradient, of_scores, of_value = gradient.contiguous(), None, None
        found = _flash_gradients(
            gradient, queries, keys, values, out, sums, 0.0, False, attn_mask=mask, scale=ctx.scaling
        )
        if scores is not None:
            given, out, sums = (tensor.unflatten(2, (ctx.heads, -1)) for tensor in (gradient, out, sums))
            weights = (scores - sums).exp()
            of_scores = weights * (given * (value.to(out.dtype) - out)).sum(-1, dtype=sums.dtype)
            of_value = torch.einsum("bkmt,bkmtd->kmd", weights.to(given.dtype), given).unsqueeze(2)
            of_scores, of_value = of_scores.to(scores.dtype), of_value.to(value.dtype)
        return *found, None, None, None, of_scores, of_value


class _HalvedGradients(torch.autograd.Function):
    """Causal attention with gradients of three parts: each half to itself, and the later one to the earlier one."""

    @staticmethod
    def forward(ctx, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> torch.Tensor:
        """Outputs `[B, H, T, D]`."""
        out, sums = flash_attention(queries, keys, values, is_causal=True, scale=scaling)
        ctx.save_for_backward(queries, keys, values, out, sums)
        ctx.scaling = scaling
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of queries, keys and values."""
        queries, keys, values, out, sums = ctx.saved_tensors
        length = queries.shape[2]
        first = length // 2

        def gradients(rows: list[torch.Tensor], read: list[torch.Tensor], is_causal: bool) -> list[torch.Tensor]:
            given, own, outputs, totals = (_halves(tensor) for tensor in rows)
            if rows[0].shape[2] % 2:  # the query that is in both halves counts once
                given = given.clone()
                given[::2, :, -1] = 0
            return _flash_gradients(given, own, *read, outputs, totals[..., 0], 0.0, is_causal, scale=ctx.scaling)

        rows = [gradient.contiguous(), queries, out, sums.unsqueeze(-1)]
        own = gradients(rows, [_halves(keys), _halves(values)], True)
        of_queries, of_keys, of_values = (_whole(tensor, length) for tensor in own)
        before = [tensor[:, :, :first].repeat_interleave(2, 0) for tensor in (keys, values)]
        later, *of_read = gradients([tensor[:, :, first:] for tensor in rows], before, False)
        of_queries[:, :, first:] += _whole(later, length - first)
        for whole, part in zip((of_keys, of_values), of_read, strict=True):
            whole[:, :, :first] += part.unflatten(0, (-1, 2)).sum(1)
        return of_queries, of_keys, of_values, None


def _halves(tensor: torch.Tensor) -> torch.Tensor:
    """The earlier and the later half of the tokens of `[B, H, T, D]` as rows `[2 * B, H, T - T // 2, D]`.

    Of an odd number the token in the middle is in both.
    """
    first = tensor.shape[2] // 2
    return tensor.unfold(2, tensor.shape[2] - first, first).permute(0, 2, 1, 4, 3).flatten(0, 1)


def _whole(halves: torch.Tensor, length: int) -> torch.Tensor:
    """What `_halves` made of `[B, H, length, D]`, without the token that is in both at the end of the earlier one."""
    earlier, later = halves.unflatten(0, (-1, 2)).unbind(1)
    return torch.cat([earlier[:, :, : length // 2], later], dim=2)
