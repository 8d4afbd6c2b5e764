"""Theoretical cost of a MoH model against its dense base: parameters, and FLOPs of a forward pass."""

from collections.abc import Sequence
from typing import Any

from moh_llm.flops import forward_flops
from moh_llm.modeling import MoHLlamaConfig

LENGTHS = (2048, 8192, 32768)


def arithmetic(config: MoHLlamaConfig, dense_parameters: int, routing_shapes: Sequence[int]) -> dict[str, Any]:
    """The record that `conversion.json` keeps under "arithmetic".

    Args:
        config: the converted model's config.
        dense_parameters: number of weights of the base.
        routing_shapes: numbers of weights of each routing tensor.
    """
    flops = {}
    for length in LENGTHS:
        dense, moh = forward_flops(config, length, dense=True), forward_flops(config, length)
        flops[str(length)] = {"dense": dense, "moh": moh, "ratio": round(moh / dense, 4)}
    return {
        "parameters": {"dense": dense_parameters, "moh": dense_parameters + sum(routing_shapes)},
        "forward_flops": flops,
        "assumes": "what can be skipped of heads that are off is; keys, values and fallbacks are computed",
    }
