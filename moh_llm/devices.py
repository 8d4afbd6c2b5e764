"""The device to compute on, and what is known of GPUs by name: peak in dense bfloat16 products, and memory."""

import re
from typing import TYPE_CHECKING, NamedTuple

from moh_llm.errors import UserError

if TYPE_CHECKING:
    import torch


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


def choose_device(name: str | None = None) -> "torch.device":
    """The device of that name; None: the GPU if torch finds one, else the CPU.

    Raises:
        UserError: torch does not know that device or does not have it.
    """
    import torch

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {name}: torch cannot use it ({str(error).splitlines()[0]})") from error
    return torch.device(name)


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
