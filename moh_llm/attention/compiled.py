"""Compile functions on a GPU, once for all sizes that change between calls: rotary embedding, and those of backends."""

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils._triton import has_triton
from transformers.models.llama import modeling_llama as llama

from .call import FLOAT16

P, R = ParamSpec("P"), TypeVar("R")
OPTIONS: dict[str, Any] = {}  # for `torch.compile`; tests set a backend here
DEVICES = ["cuda", "xpu"]  # device types that Triton supports
ROTARY = "moh_rotary"  # name of `rotary_embedding` in transformers' registry of attention functions


def can_compile(device: torch.device) -> bool:
    """Whether Triton is installed and supports this GPU."""
    return device.type != "cuda" or has_triton()


def compiled(function: Callable[P, R], **options: Any) -> Callable[P, R]:
    """Compile a function of tensors for a GPU, with `options` of Inductor, unless a compiler is already tracing it.

    All sizes of index and flag tensors are dynamic, and so is the first half of the dimensions of other tensors (rows,
    tokens, blocks; not heads and head sizes). By default dynamo recompiles for each new size, or for two sizes that
    happen to be equal, and gives up after eight compilations.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if tensors[0].device.type not in DEVICES or torch.compiler.is_compiling():
            return function(*args, **kwargs)
        for tensor in tensors:
            changing = (tensor.dim() + 1) // 2 if tensor.is_floating_point() else tensor.dim()
            torch._dynamo.maybe_mark_dynamic(tensor, tuple(range(changing)))
        return _compile(function, len(tensors), **options)(*args, **kwargs)

    return call


@functools.cache
def _compile(function: Callable[P, R], count: int, **options: Any) -> Callable[P, R]:
    """A copy of the function per number of tensors, because dynamo counts recompilations per function."""
    own = FunctionType(function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__)
    return torch.compile(own, **(OPTIONS or {"options": options}))


def rotary_embedding(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Apply rotary embedding to queries `[B, H, T, D]` and keys `[B, KV, T, D]`, bit for bit as transformers does.

    `cos` and `sin` are `[B or 1, T, D]`. Single tokens are not compiled, since the call costs more than it saves.
    Neither is float32, where compiled code fuses a product and a sum and rounds once.
    """
    dtypes = {states.dtype for states in (query, key, cos, sin)}
    is_plain = len(dtypes) > 1 or query.dtype not in FLOAT16 or query.shape[2] == 1
    if is_plain or torch.compiler.is_compiling() or query.device.type not in DEVICES or not can_compile(query.device):
        return llama.apply_rotary_pos_emb(query, key, cos, sin)
    # Not views: dynamo guards on the base of a view.
    by_token = (states.transpose(1, 2).contiguous() for states in (query, key))
    query, key = _rotated(*(torch.ops.aten._unsafe_view(states, states.shape) for states in by_token), cos, sin)
    return query.transpose(1, 2), key.transpose(1, 2)


@functools.partial(compiled, emulate_precision_casts=True)  # rounds after each operation, as eager code does
def _rotated(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`rotary_embedding` of queries `[B, T, H, D]` and keys `[B, T, KV, D]`."""
    return llama.apply_rotary_pos_emb(query, key, cos, sin, unsqueeze_dim=2)
