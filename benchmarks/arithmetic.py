"""What a MoH model of LLaMA3-8B's shape could save as a whole, by counting: no measurement, no weights, no device.

    python benchmarks/arithmetic.py

- prefill: shares of a forward pass's FLOPs by part, and the whole with part of the heads relative to all of them, with
  value fallbacks, a linear router and one shared head: "least" skips what can be skipped
  (`moh_llm.flops.forward_parts`), "no fallbacks" is that without them, where a head that is off needs no output
  projection.
- decode: bytes that a step reads, weights once and the cache of each row, in bf16; and with part of the groups of keys
  and values (`routing_granularity="kv_group"`) relative to all of them. Time follows bytes where memory is the limit.
"""

import argparse
import itertools
import sys

from moh_llm.flops import forward_flops, forward_parts
from moh_llm.modeling import MoHLlamaConfig

SHARES = 75, 50  # percent of the heads, or of the groups of keys and values
HEADS, LENGTHS, ROWS = 32, (2048, 8192, 32768, 131072), (1, 16, 64)
LLAMA3_8B = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
SCORES, BYTES = "scores and weighted sums", 2


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    prefill()
    decode()
    return 0


def with_heads(share: int, fallback: str = "value") -> MoHLlamaConfig:
    """The shape with so many percent of the heads on in each layer."""
    plan = {"num_active_heads": max(1, round(share * HEADS / 100)), "num_shared_heads": 1, "router_type": "linear"}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": 8}
    return MoHLlamaConfig(**LLAMA3_8B, **heads, **plan, head_fallback=fallback)


def prefill() -> None:
    """Print the table of FLOPs."""
    names = list(forward_parts(with_heads(100), 1, dense=True))
    names = [name for name in names if name not in ("routing", "fallbacks")]  # which the dense model lacks
    ratios = [f"{share} %, {how}" for share in SHARES for how in ("no fallbacks", "least")]
    rows = [["tokens", *names, *ratios]]
    for length in LENGTHS:
        dense = forward_parts(with_heads(100), length, dense=True)
        total = sum(dense.values())
        cells = [f"{dense[name] / total:.1%}" for name in names]
        for share in SHARES:
            without = forward_flops(with_heads(share, fallback="none"), length)
            cells += [f"{flops / total:.3f}" for flops in (without, forward_flops(with_heads(share), length))]
        rows.append([f"{length:,}", *cells])
    print_table("prefill", *rows)


def decode() -> None:
    """Print the table of bytes."""
    shape = with_heads(100)
    # A token's products read each weight once, at two operations.
    parts = forward_parts(shape, 1, dense=True)
    weights = sum(count for name, count in parts.items() if name != SCORES) // 2 * BYTES
    per_token = 2 * shape.num_key_value_heads * shape.head_dim * shape.num_hidden_layers * BYTES
    rows = [["context", "rows", "weights, GB", "cache, GB", *(f"{s} % of the groups" for s in SHARES)]]
    for context, count in itertools.product(LENGTHS, ROWS):
        cache = context * count * per_token
        ratios = [f"{(weights + cache * share / 100) / (weights + cache):.3f}" for share in SHARES]
        rows.append([f"{context:,}", str(count), f"{weights / 1e9:.2f}", f"{cache / 1e9:.2f}", *ratios])
    print_table("decode", *rows)


def print_table(title: str, *rows: list[str]) -> None:
    """Print a Markdown table; the first row is its head."""
    lines = [f"| {' | '.join(cells)} |" for cells in rows]
    print(f"\n{title}\n", lines[0], "|" + "---|" * len(rows[0]), *lines[1:], sep="\n")


if __name__ == "__main__":
    sys.exit(main())
