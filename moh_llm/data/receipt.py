"""What training read, or will have read: tokens per source, share, epochs, repeats."""

from typing import Any

from moh_llm.data.stream import BlockStream


def make_receipt(stream: BlockStream, blocks: int) -> dict[str, dict[str, Any]]:
    """Per source, what the first `blocks` blocks hold.

    `weight` planned share, `tokens` and `share` realised, `epochs` passes through the source,
    `repeated_tokens` those read for a second or later time.
    """
    receipt = {}
    for number, (source, count) in enumerate(zip(stream.sources, stream.counts(blocks), strict=True)):
        has = stream.blocks_per_epoch(number)
        receipt[source.name] = {
            "weight": round(source.weight, 6),
            "tokens": count * stream.block_length,
            "share": round(count / blocks, 6) if blocks else 0.0,
            "epochs": round(count / has, 4),
            "repeated_tokens": max(0, count - has) * stream.block_length,
        }
    return receipt
