"""What is known of GPUs by name: their peak in dense bfloat16 products, and their memory."""

import re
from typing import NamedTuple


class Gpu(NamedTuple):
    """`peak`: FLOP/s of dense bfloat16 products, by the maker; `memory`: bytes that torch finds there, about."""

    peak: float
    memory: int


_GIB = 1 << 30

# By words of what torch.cuda.get_device_name says. A bare A100 is the one of 80 GB, a bare H100 the SXM module.
# Memory is rounded down: the driver, and ECC where there is no HBM, take their part of the nominal size.
GPUS = {
    "A10": Gpu(125e12, 22 * _GIB),
    "A100": Gpu(312e12, 79 * _GIB),
    "A100 40GB": Gpu(312e12, 39 * _GIB),
    "B200": Gpu(2250e12, 178 * _GIB),
    "H100": Gpu(989e12, 79 * _GIB),
    "H100 PCIe": Gpu(756e12, 79 * _GIB),
    "H100 NVL": Gpu(835e12, 93 * _GIB),
    "H20": Gpu(148e12, 95 * _GIB),
    "H200": Gpu(989e12, 139 * _GIB),
    "L4": Gpu(121e12, 22 * _GIB),
    "L40S": Gpu(362e12, 44 * _GIB),
    "RTX 4090": Gpu(165e12, 23 * _GIB),
}


def find_gpu(name: str) -> Gpu | None:
    """The GPU whose words all occur in ``name``, in any case and order; of several the one with most letters.

    Whole words: an L40 is no L4. None where none is known.
    """
    words = _words(name)
    known = [key for key in GPUS if _words(key) <= words]
    return GPUS[max(known, key=len)] if known else None


def peak_flops(name: str) -> float | None:
    """Peak FLOP/s of dense bfloat16 products of a GPU by its name, for instance as torch gives it; None: not known."""
    gpu = find_gpu(name)
    return gpu.peak if gpu else None


def _words(name: str) -> set[str]:
    return set(re.findall(r"[A-Z0-9]+", name.upper()))
