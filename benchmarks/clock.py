"""Time of attention beyond its linear projections, and time with what was launched on an accelerator.

with attention_clock(model.model.layers) as clock:
    model(ids)
print(clock[0])
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


@contextmanager
def attention_clock(layers: Sequence[nn.Module]) -> Iterator[list[float]]:
    """One number that grows by the seconds that the layers' attention takes beyond its linear projections."""
    clock, handles = [0.0], []

    def add(sign: int) -> Any:
        def hook(*_: Any) -> None:
            clock[0] += sign * now()

        return hook

    for layer in layers:
        for sign, module in [(1, layer.self_attn), *((-1, getattr(layer.self_attn, name)) for name in _PROJECTIONS)]:
            handles.append(module.register_forward_pre_hook(add(-sign)))
            handles.append(module.register_forward_hook(add(sign)))
    try:
        yield clock
    finally:
        for handle in handles:
            handle.remove()


def now() -> float:
    """Seconds, after what was launched on an accelerator has ended."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()
