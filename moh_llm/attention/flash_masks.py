"""Masks of sorted queries in the language of flash-attn-4, which `flash.py` imports together with that package.

The functions have no closures, because flash-attn-4 finds cached kernels by the source of the mask.
"""

from cutlass import Int32, cute
from flash_attn.cute.utils import scalar_to_ssa


@cute.jit
def is_seen(row, group, entry, place, lengths, bounds):
    """Keys from `low` to `last`; each bound is `[B, G, N]`."""
    last = scalar_to_ssa(bounds[0][row[0], group[0], entry[0]], Int32)
    low = scalar_to_ssa(bounds[1][row[0], group[0], entry[0]], Int32)
    return (place <= last) & (place >= low)


@cute.jit
def is_seen_or_sink(row, group, entry, place, lengths, bounds):
    """Keys from `low` to `last`, and sinks from `start` to before `sink_end`."""
    last = scalar_to_ssa(bounds[0][row[0], group[0], entry[0]], Int32)
    low = scalar_to_ssa(bounds[1][row[0], group[0], entry[0]], Int32)
    start = scalar_to_ssa(bounds[2][row[0], group[0], entry[0]], Int32)
    sink_end = scalar_to_ssa(bounds[3][row[0], group[0], entry[0]], Int32)
    return (place <= last) & ((place >= low) | ((place >= start) & (place < sink_end)))
