"""What this machine has, and refusing what cannot fit into it before anything is computed."""

import os
import shutil
from pathlib import Path

from moh_llm.errors import UserError

_GIB = 1 << 30
_WORKERS_PER_CORE = 8


def memory_bytes() -> int:
    """Memory of this machine, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_memory(needed: int, what: str, way_out: str, available: int | None = None) -> None:
    """Raise UserError where ``what`` needs more bytes than the machine has, or than are ``available``."""
    available = memory_bytes() if available is None else available
    if needed > available:
        raise UserError(
            f"{what} needs about {needed / _GIB:,.0f} GiB of memory, and there are {available / _GIB:,.1f}; {way_out}"
        )


def check_disk(needed: int, place: Path, what: str, way_out: str) -> None:
    """Raise UserError where ``what`` needs more bytes than are free on the disk of ``place``, which need not exist."""
    there = next(parent for parent in (place.resolve(), *place.resolve().parents) if parent.exists())
    disk = shutil.disk_usage(there)
    if disk.total and needed > (free := disk.free):  # a file system of kernel objects has no size
        raise UserError(
            f"{what} needs about {needed / _GIB:,.0f} GiB on the disk of {there}, where {free / _GIB:,.1f} are free; "
            f"{way_out}"
        )


def check_workers(number: int, name: str) -> None:
    """Raise UserError for far more processes than there are cores."""
    cores = os.cpu_count() or 1
    if number > _WORKERS_PER_CORE * cores:
        raise UserError(f"{name}={number}: this machine has {cores} cores; take at most {_WORKERS_PER_CORE * cores}")
