"""Theoretical cost of a MoH model against its dense base: parameters, and FLOPs of a forward pass.

Counts two operations per multiply-add of the matrix products; norms, rotary embedding and softmax
are left out. It assumes a kernel that skips heads that are off: their queries, scores, weighted
sums and rows of the output projection. Keys and values are always computed.
"""

from collections.abc import Sequence
from typing import Any

from moh_llm.modeling import MoHLlamaConfig

LENGTHS = (2048, 8192, 32768)


def forward_flops(config: MoHLlamaConfig, length: int, dense: bool = False) -> int:
    """FLOPs of one forward pass over a sequence of `length` tokens, as MoH or with all heads and no router."""
    hidden, size = config.hidden_size, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    context = (length + 1) / 2  # mean number of positions that a token attends to
    total = 0.0
    plan = zip(config.shared_heads_per_layer, config.active_heads_per_layer, strict=True)
    for shared, active in plan:
        on = heads if dense else active
        macs = 2 * on * hidden * size + 2 * kv_heads * hidden * size + 2 * on * size * context
        macs += 3 * hidden * config.intermediate_size
        if not dense:
            macs += _routing_macs(config, heads - len(shared))
        total += macs
    return round(2 * length * (total + hidden * config.vocab_size))


def _routing_macs(config: MoHLlamaConfig, routed: int) -> int:
    """Multiply-adds per token of a layer's router and stand-ins."""
    router = {"query_norm": 0, "linear": config.hidden_size * routed}.get(
        config.router_type, config.hidden_size * (config.num_attention_heads + 2)
    )
    stand_in = (config.hidden_size + config.head_dim) * routed if config.head_stand_in != "none" else 0
    return router + stand_in


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
        "assumes": "heads that are off are skipped; keys and values are always computed",
    }
