"""What a MoH model could save as a whole, by counting: no measurement, no weights, no device.

    python benchmarks/arithmetic.py                       # LLaMA3-8B
    python benchmarks/arithmetic.py --config out/moh      # any LLaMA-like or MoH folder's shape

- prefill: shares of a forward pass's FLOPs by part, and the whole with part of the heads relative to all of them, of
  the default conversion (linear router, one shared head, fallbacks): "least" skips what can be skipped
  (`moh_llm.flops.forward_parts`), "no fallbacks" is that without them, where a head that is off needs no output
  projection; "as computed" skips what is skipped today, scores and weighted sums.
- decode: bytes that a step reads, weights once and the cache of each row, in bf16; and with part of the groups of keys
  and values (`routing_granularity="kv_group"`) relative to all of them. Time follows bytes where memory is the limit.
"""

import argparse
import sys
from pathlib import Path

from transformers import AutoConfig, LlamaConfig

import moh_llm  # noqa: F401  (MoH configs load by its Auto classes)
from moh_llm.flops import computed_parts, forward_flops, forward_parts
from moh_llm.modeling import MoHLlamaConfig

LLAMA3_8B = LlamaConfig(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8,
)  # fmt: skip
SCORES, BYTES = "scores and weighted sums", 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, help="a model's folder (default: LLaMA3-8B)")
    parser.add_argument("--lengths", nargs="+", type=int, default=[2048, 8192, 32768, 131072])
    parser.add_argument("--shares", nargs="+", type=int, default=[90, 75, 50], help="percent of the heads, or groups")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 16, 64], help="rows that are decoded together")
    args = parser.parse_args()
    if not all(0 < share <= 100 for share in args.shares):
        parser.error(f"--shares {args.shares}: percent of the heads, above 0 and at most 100")
    config = AutoConfig.from_pretrained(args.config) if args.config else LLAMA3_8B
    prefill(config, args.lengths, args.shares)
    decode(config, args.lengths, args.shares, args.batch)
    return 0


def with_heads(config: LlamaConfig, share: int, fallback: str = "value") -> MoHLlamaConfig:
    """That shape with so many percent of the heads on in each layer, one shared, and a linear router."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    fields = {name: getattr(config, name) for name in (*names, "num_key_value_heads", "head_dim")}
    active = max(1, round(share * config.num_attention_heads / 100))
    plan = {"num_active_heads": active, "num_shared_heads": 1, "router_type": "linear", "head_fallback": fallback}
    return MoHLlamaConfig(**fields, **plan)


def prefill(config: LlamaConfig, lengths: list[int], shares: list[int]) -> None:
    """Print the table of FLOPs."""
    names = list(forward_parts(with_heads(config, 100), 1, dense=True))
    names = [name for name in names if name not in ("routing", "fallbacks")]  # which the dense model lacks
    ratios = [f"{share} %, {how}" for share in shares for how in ("no fallbacks", "least", "as computed")]
    table("prefill", ["tokens", *names, *ratios])
    for length in lengths:
        dense = forward_parts(with_heads(config, 100), length, dense=True)
        total = sum(dense.values())
        cells = [f"{dense[name] / total:.1%}" for name in names]
        for share in shares:
            moh = with_heads(config, share)
            without = forward_flops(with_heads(config, share, fallback="none"), length)
            computed = sum(computed_parts(moh, length).values())
            cells += [f"{flops / total:.3f}" for flops in (without, forward_flops(moh, length), computed)]
        print(" | ".join(["", f"{length:,}", *cells, ""]).strip())


def decode(config: LlamaConfig, contexts: list[int], shares: list[int], batches: list[int]) -> None:
    """Print the table of bytes."""
    parts = forward_parts(with_heads(config, 100), 1, dense=True)
    # A token's products read each weight once, at two operations.
    weights = sum(count for name, count in parts.items() if name != SCORES) // 2 * BYTES
    shape = with_heads(config, 100)
    per_token = 2 * shape.num_key_value_heads * shape.head_dim * shape.num_hidden_layers * BYTES
    table("decode", ["context", "rows", "weights, GB", "cache, GB", *(f"{share} % of the groups" for share in shares)])
    for context in contexts:
        for rows in batches:
            cache = context * rows * per_token
            ratios = [f"{(weights + cache * share / 100) / (weights + cache):.3f}" for share in shares]
            cells = [f"{context:,}", str(rows), f"{weights / 1e9:.2f}", f"{cache / 1e9:.2f}", *ratios]
            print(" | ".join(["", *cells, ""]).strip())


def table(title: str, names: list[str]) -> None:
    """Print the head of a Markdown table."""
    print(f"\n{title}\n")
    print(" | ".join(["", *names, ""]).strip())
    print("|" + "---|" * len(names))


if __name__ == "__main__":
    sys.exit(main())
