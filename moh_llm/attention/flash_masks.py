"""Which keys an entry sees, for the compiler of flash-attn-4: `flash.py` imports it with that package.

Functions without closures: kernels on disk are found again by their source.
"""

from cutlass import Int32, cute
from flash_attn.cute.utils import scalar_to_ssa


@cute.jit
def is_seen(row, group, entry, place, lengths, bounds):
    """Keys up to `last` from `low` on; `bounds` are `[B, G, N]`."""
    last = scalar_to_ssa(bounds[0][row[0], group[0], entry[0]], Int32)
    low = scalar_to_ssa(bounds[1][row[0], group[0], entry[0]], Int32)
    return (place <= last) & (place >= low)


@cute.jit
def is_seen_or_sink(row, group, entry, place, lengths, bounds):
    """Those, and sinks: keys up to `last` from `start` on and before `sink_end`."""
    last = scalar_to_ssa(bounds[0][row[0], group[0], entry[0]], Int32)
    low = scalar_to_ssa(bounds[1][row[0], group[0], entry[0]], Int32)
    start = scalar_to_ssa(bounds[2][row[0], group[0], entry[0]], Int32)
    sink_end = scalar_to_ssa(bounds[3][row[0], group[0], entry[0]], Int32)
    return (place <= last) & ((place >= low) | ((place >= start) & (place < sink_end)))
