"""Functions compiled on a GPU, once for all sizes that change from call to call."""

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

import torch
from torch.utils._pytree import tree_leaves
from torch.utils._triton import has_triton

P, R = ParamSpec("P"), TypeVar("R")
OPTIONS: dict[str, Any] = {}  # of `torch.compile`
DEVICES = ["cuda", "xpu"]  # where functions are compiled: where Triton is


def can_compile(device: torch.device) -> bool:
    """Whether Triton is installed and supports this GPU."""
    return device.type != "cuda" or has_triton()


def compiled(function: Callable[P, R], **options: Any) -> Callable[P, R]:
    """The function, compiled where its tensors are on a GPU and nothing compiles it already.

    `options` are those of Inductor.

    Sizes of indices and flags may change, and so may those of the first half of the dimensions of other tensors: rows,
    tokens, blocks, and not heads and head sizes. Dynamo would take each new one, or two that happen to be the same, for
    a reason to compile anew, and gives up after eight of them.
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
    """The function for so many tensors, as a copy: dynamo counts compilations of a function, whatever it is given."""
    own = FunctionType(function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__)
    return torch.compile(own, **(OPTIONS or {"options": options}))
