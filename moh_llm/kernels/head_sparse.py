"""Causal attention that computes, of each head, only the queries that selected it (`attn_implementation="moh_sparse"`).

Shapes: B batch, T query positions, S keys (S - T of them from a cache), H query heads, G heads of
keys and values, D head size. Query t stands at key S - T + t.

Of each head the selected positions are listed in order. A tile is a run of such a list: its queries
are gathered, keys are read up to the last of these positions, outputs are scattered. What no token
selected is neither read nor computed, and its output is zero. Shared heads have all positions.

The kernels are written in Triton; without it this file can be imported, and says what is lacking when it is used.
"""

import contextlib
import functools
import math
from typing import Any

import torch
from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from moh_llm.kernels.head_sparse_decoding import head_sparse_decoding
from moh_llm.kernels.head_sparse_kernels import (
    Lists,
    all_positions,
    forward_kernel,
    key_gradient_kernel,
    query_gradient_kernel,
    selected_positions,
    triton,
)

NAME = "moh_sparse"


@functools.cache
def _shared_memory(device: torch.device) -> int:
    """Bytes of fast memory that a program may take."""
    if device.type != "cuda":
        return 1 << 20  # the interpreter has no limit
    return triton.runtime.driver.active.utils.get_device_properties(device.index)["max_shared_mem"]


def tiles(kernel: str, head_size: int, dtype: torch.dtype, shared_memory: int) -> dict[str, int]:
    """Tile sizes and launch options: the largest that hardly spill registers and fit into `shared_memory` bytes."""
    if dtype == torch.float32:
        return {"BM": 16 if kernel == "keys" else 32, "BN": 32, "num_warps": 8, "num_stages": 1}
    if head_size > 128:
        return {"BM": 32, "BN": 32, "num_warps": 8, "num_stages": 1}
    if shared_memory >= 200 << 10:  # data-centre GPUs since Hopper
        return {"BM": 128, "BN": 64, "num_warps": 8, "num_stages": 3}
    return {"BM": 64, "BN": 64 if kernel == "forward" else 32, "num_warps": 4, "num_stages": 2}


def _settings(
    kernel: str, q: torch.Tensor, k: torch.Tensor, first: torch.Tensor | None, key_mask: torch.Tensor | None
) -> dict[str, Any]:
    """Compile-time arguments of a kernel ("forward", "queries" or "keys")."""
    size = q.shape[-1]
    precision = "ieee" if q.dtype == torch.float32 else "tf32"  # only float32 has the choice
    return {
        "H": q.shape[1],
        "G": k.shape[1],
        "D": size,
        "BD": max(16, triton.next_power_of_2(size)),
        "HAS_FIRST": first is not None,
        "HAS_MASK": key_mask is not None,
        "PRECISION": "interpreted" if triton.knobs.runtime.interpret else precision,
    } | tiles(kernel, size, q.dtype, _shared_memory(q.device))


def _pointers(other: torch.Tensor, *tensors: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """Kernel arguments for optional tensors; a missing one is `other`, which the kernel does not read."""
    return tuple(other if tensor is None else tensor for tensor in tensors)


def _seen_until(first: torch.Tensor, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Per key `[B, S]`: before which query all have seen it, and before which the last does that sees it.

    Of both only the side of documents is meant, `first <= key`; causality is the kernel's.
    """
    places = torch.arange(keys, device=first.device, dtype=first.dtype).expand(first.shape[0], -1).contiguous()
    whole = torch.searchsorted(first.cummax(-1).values, places, right=True, out_int32=True)
    latest = first.flip(-1).cummin(-1).values.flip(-1).contiguous()
    return whole, torch.searchsorted(latest, places, right=True, out_int32=True)


def _strides(*tensors: torch.Tensor) -> tuple[int, ...]:
    return tuple(stride for tensor in tensors for stride in tensor.stride()[:3])


def first_seen(first: torch.Tensor) -> torch.Tensor:
    """The first token `[B, T]` (int32) that each one sees, given which are the first of their documents `[B, T]`."""
    places = torch.arange(first.shape[-1], device=first.device)
    return torch.where(first, places, 0).cummax(-1).values.to(torch.int32)


class _SelectedAttention(torch.autograd.Function):
    """Head outputs `[B, H, T, D]` of listed queries, zero elsewhere; gradients of listed queries only.

    With `gated` they are times their gate, which gets a gradient where it is listed. `computed` are
    the lists of what is computed going forward, `lists` of what has a gradient.
    """

    @staticmethod
    def forward(ctx, q, k, v, gate, lists: Lists, computed: Lists, first, key_mask, scaling: float, gated: bool):
        (batch, heads, length, _), keys = q.shape, k.shape[2]
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        out = q.new_zeros(batch, length, heads, q.shape[-1]).transpose(1, 2)
        lse = torch.empty(batch, heads, length, device=q.device, dtype=torch.float32)
        rows, counts, _ = computed
        settings = _settings("forward", q, k, first, key_mask) | {"GATED": gated}
        forward_kernel[triton.cdiv(length, settings["BM"]), batch * heads](
            *(q, k, v, gate, rows, counts, *_pointers(counts, first, key_mask), out, lse),
            *_strides(q, k, v, out),
            *(length, keys, scaling * math.log2(math.e)),
            **settings,
        )
        ctx.save_for_backward(q, k, v, gate, out, lse, *lists, first, key_mask)
        ctx.scaling, ctx.gated = scaling, gated
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, gate, out, lse, rows, counts, before, first, key_mask = ctx.saved_tensors
        (batch, heads, length, _), (groups, keys) = q.shape, k.shape[1:3]
        grad = grad.transpose(1, 2).contiguous().transpose(1, 2)  # laid out as `out` is
        dq, delta = torch.zeros_like(out), torch.empty_like(lse)
        d_gate = torch.zeros_like(gate) if ctx.gated else None
        dk, dv = (torch.empty(x.shape, device=x.device, dtype=x.dtype) for x in (k, v))
        whole, until = (None, None) if first is None else _seen_until(first, keys)
        sizes = (length, keys, ctx.scaling * math.log2(math.e), ctx.scaling)
        settings = _settings("queries", q, k, first, key_mask) | {"GATED": ctx.gated}
        query_gradient_kernel[triton.cdiv(length, settings["BM"]), batch * heads](
            *(q, k, v, gate, rows, counts, *_pointers(counts, first, key_mask), out, lse, grad),
            *(dq, delta, *_pointers(gate, d_gate)),
            *_strides(q, k, v, out),
            *sizes,
            **settings,
        )
        settings = _settings("keys", q, k, first, key_mask) | {"GATED": ctx.gated}
        key_gradient_kernel[triton.cdiv(keys, settings["BN"]), batch * groups](
            *(q, k, v, gate, rows, counts, before, *_pointers(counts, first, whole, until, key_mask)),
            *(lse, grad, delta, dk, dv),
            *_strides(q, k, v, out, dk),
            *sizes,
            **settings,
        )
        return dq, dk, dv, d_gate, None, None, None, None, None, None


class _Gate(torch.autograd.Function):
    """Head outputs times their gate; zero where the gate is zero, also for outputs that are not finite."""

    @staticmethod
    def forward(ctx, heads: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(heads, gate)
        gate = gate.unsqueeze(-1)
        return torch.where(gate != 0, heads * gate, 0)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        heads, gate = ctx.saved_tensors
        return grad * gate.unsqueeze(-1), (grad * heads).sum(-1)


def head_sparse_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    gate: torch.Tensor,
    scaling: float,
    first: torch.Tensor | None = None,
    key_mask: torch.Tensor | None = None,
    all_heads: bool = False,
) -> torch.Tensor:
    """Gated head outputs g_h H_h `[B, T, H, D]` (Eq. 4), computed where the gate is not zero.

    The gradient of queries, keys and values is that of the masked path. So is the gate's with
    `all_heads`: it takes the outputs of heads that are off, too, which are then computed going
    forward, while the backward pass still skips them. Without, the gate of a head that is off gets
    no gradient from that head's output.

    Args:
        queries: `[B, H, T, D]`, after rotary embedding.
        keys, values: `[B, G, S, D]`.
        gate: `[B, T, H]`, zero where a head is off.
        scaling: of the scores before the softmax.
        first: int32 `[B, T]`, the first key that a query sees; None: the first of all.
        key_mask: `[B, S]`, zero where a key is padding.
        all_heads: see above.
    """
    gate = gate.to(torch.float32).contiguous()
    lists = selected_positions(gate)
    if not all_heads:
        out = _SelectedAttention.apply(queries, keys, values, gate, lists, lists, first, key_mask, scaling, True)
        return out.transpose(1, 2)
    every = all_positions(*gate.shape, gate.device)
    out = _SelectedAttention.apply(queries, keys, values, gate.detach(), lists, every, first, key_mask, scaling, False)
    return _Gate.apply(out.transpose(1, 2), gate.to(out.dtype))


def what_lacks(device: torch.device) -> str | None:
    """A missing requirement of the kernels for tensors on `device`, in words."""
    if triton is None:
        return "Triton (pip install triton)"
    return None if device.type == "cuda" or triton.knobs.runtime.interpret else "a CUDA device"


def attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    head_gate: torch.Tensor,
    dropout: float = 0.0,
    is_first: torch.Tensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """The backend, as `ALL_ATTENTION_FUNCTIONS` calls it; what it returns is gated already.

    Without a mask and a cache the tokens in `is_first` `[B or 1, T]` begin another document, which sees
    nothing of those before it, as with the other backends.
    """
    if lacking := what_lacks(query.device):
        raise RuntimeError(f"attn_implementation={NAME!r} needs {lacking}; 'sdpa' and 'eager' run without")
    if dropout:
        raise ValueError(f"attn_implementation={NAME!r} has no dropout; set attention_dropout=0 or use 'sdpa'")
    padded = attention_mask is not None and attention_mask.shape[-1] > 0
    if padded and attention_mask.shape != (key.shape[0], key.shape[2]):
        raise ValueError(
            f"attn_implementation={NAME!r} takes a mask of padding [batch, keys], not {list(attention_mask.shape)} "
            f"for {key.shape[2]} keys; use 'sdpa' with other masks"
        )
    if torch.is_autocast_enabled(query.device.type):  # rotary embedding leaves queries and keys in float32
        query, key, value = (x.to(torch.get_autocast_dtype(query.device.type)) for x in (query, key, value))
    first = None
    if attention_mask is None and is_first is not None:
        first = first_seen(is_first).expand(query.shape[0], -1).contiguous()
    key_mask = attention_mask.to(torch.int8).contiguous() if padded else None
    # Triton starts kernels on the current device, which need not be that of a layer of a model on several.
    with torch.cuda.device(query.device) if query.is_cuda else contextlib.nullcontext():
        if query.shape[2] == 1 and not torch.is_grad_enabled():
            return head_sparse_decoding(query, key, value, head_gate, scaling, key_mask), None
        exact = module.sparse_gate_gradient == "exact" and torch.is_grad_enabled() and head_gate.requires_grad
        return head_sparse_attention(query, key, value, head_gate, scaling, first, key_mask, exact), None


def _padding(attention_mask: torch.Tensor | None = None, kv_length: int | None = None, **kwargs) -> torch.Tensor | None:
    """The mask that the backend gets, once for all layers: `[B, S]`, of padding; `[B, 0]` where there is none; or None.

    Whether there is padding is asked of the device, as transformers does for SDPA: without, no block
    needs a mask but at the edge. A graph that is being captured cannot be asked.
    """
    if attention_mask is None:
        return None
    mask = attention_mask[:, -kv_length:]
    unknown = torch.compiler.is_compiling() or (mask.is_cuda and torch.cuda.is_current_stream_capturing())
    return mask if unknown or not mask.all() else mask[:, :0]


ALL_ATTENTION_FUNCTIONS.register(NAME, attention_forward)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _padding)
