"""Compile functions on a GPU, once for all sizes that change between calls."""

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

import torch
from torch.utils._pytree import tree_leaves
from torch.utils._triton import has_triton

P, R = ParamSpec("P"), TypeVar("R")
OPTIONS: dict[str, Any] = {}  # for `torch.compile`; tests set a backend here
DEVICES = ["cuda", "xpu"]  # device types that Triton supports


def can_compile(device: torch.device) -> bool:
    """Whether Triton is installed and supports this GPU."""
    return device.type != "cuda" or has_triton()


def compiled(function: Callable[P, R], **options: Any) -> Callable[P, R]:
    """Compile `function` for tensors on a GPU, unless a compiler is already tracing it.

    Args:
        function: takes and returns tensors.
        options: options of Inductor.

    All sizes of index and flag tensors are dynamic, and so is the first half of the dimensions of other tensors (rows,
    tokens, blocks; not heads and head sizes). By default dynamo recompiles for each new size, or for two sizes that
    happen to be equal, and gives up after eight compilations.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
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
