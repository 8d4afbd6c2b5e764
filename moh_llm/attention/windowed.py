"""Sliding-window attention by PyTorch's FlashAttention 2, on NVIDIA GPUs from Ampere on.

Shapes: B batch, T queries, S keys (S >= T; the last query sees the last key), H query heads, KV key-value heads, D head
size.
"""

from typing import Any

import torch
from torch import Tensor

from .call import FLOAT16


def why_not_windowed(device: torch.device, dtype: torch.dtype, size: int) -> str | None:
    """Why PyTorch's FlashAttention 2 does not run heads of this size on this device; None if it does."""
    if device.type != "cuda" or torch.version.cuda is None:
        return "FlashAttention runs on NVIDIA GPUs only"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "FlashAttention needs an Ampere GPU or a later one"
    if dtype not in FLOAT16:
        return f"FlashAttention takes bfloat16 and float16, not {str(dtype)[6:]}"
    if size % 8 or size > 256:
        return f"FlashAttention takes head sizes that are multiples of 8, up to 256, not {size}"
    return None


def windowed_attention(query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int) -> tuple[Tensor, Tensor]:
    """Attention of each query to the last `window` keys up to its own.

    `query` is `[B, H, T, D]`, `key` and `value` are `[B, KV, S, D]`. Returns outputs `[B, H, T, D]` and their
    log-sum-exp `[B, H, T]`, float32. Both have gradients, so that parts of one softmax can be merged afterwards.
    """
    return _Windowed.apply(query, key, value, scaling, window)


def with_gradient_of_lse(out: Tensor, grad: Tensor, grad_lse: Tensor) -> Tensor:
    """Change `out` so that a backward kernel without a log-sum-exp gradient still accounts for `grad_lse`.

    The gradient of a score is weight * (grad · value - grad · out + grad_lse). The kernel reads `out` only for its
    product with `grad`, so `out` is shifted along `grad`. For merged parts grad_lse is grad · (out - merged), so the
    shift is no longer than the outputs themselves and rounds like them.
    """
    wide, change = grad.float(), grad_lse.float().unsqueeze(-1)
    change = change / wide.square().sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    return (out - change * wide).to(out.dtype)


class _Windowed(torch.autograd.Function):
    """`windowed_attention`, given query, key, value, scaling and window."""

    @staticmethod
    def forward(ctx, *args: Any) -> tuple[Tensor, Tensor]:
        *states, scaling, window = args
        lengths = (None, None, states[0].shape[2], states[1].shape[2], 0.0, False)
        how = {"scale": scaling, "window_size_left": window - 1, "window_size_right": 0}
        by_token = [tensor.transpose(1, 2) for tensor in states]
        out, lse, *random, _ = torch.ops.aten._flash_attention_forward(*by_token, *lengths, False, **how)
        out = out.transpose(1, 2)
        ctx.save_for_backward(*states, out, lse, *random)
        ctx.lengths, ctx.how = lengths, how
        return out, lse

    @staticmethod
    def backward(ctx, grad: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        *states, out, lse, seed, offset = ctx.saved_tensors
        out = with_gradient_of_lse(out, grad, grad_lse)
        by_token = [tensor.transpose(1, 2) for tensor in (grad, *states, out)]
        gradients = torch.ops.aten._flash_attention_backward(*by_token, lse, *ctx.lengths, seed, offset, **ctx.how)
        return *(tensor.transpose(1, 2) for tensor in gradients), None, None
