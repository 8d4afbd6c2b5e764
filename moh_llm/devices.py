"""Device, compute dtype and memory of the machine, and the processes that a launcher started."""

import functools
import os
import platform
import time
from pathlib import Path
from typing import TYPE_CHECKING

from moh_llm.errors import UserError

if TYPE_CHECKING:
    import torch


_GIB = 1 << 30


def choose_device(name: str | None = None) -> "torch.device":
    """Return the named device, or by default the accelerator (CUDA, ROCm, XPU, MPS) if there is one, else the CPU.

    Raises:
        UserError: torch cannot use the device.
    """
    import torch

    if name is None:
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return found or torch.device("cpu")
    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {name}: torch cannot use it ({str(error).splitlines()[0]})") from error
    return torch.device(name)


def own_device() -> "torch.device":
    """The device of this process: with several accelerators, the one of its local rank."""
    import torch

    device, number = choose_device(), _number("LOCAL_RANK")
    if device.type == "cpu" or number >= torch.accelerator.device_count():
        return device
    return torch.device(device.type, number)


def name_device(device: "torch.device") -> str:
    """The name of a GPU; for a CPU its model (or architecture) and torch's number of threads."""
    import torch

    if device.type in ("cuda", "xpu"):
        return getattr(torch, device.type).get_device_name(device)
    if device.type != "cpu":
        return str(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    threads = torch.get_num_threads()
    return f"{next(names, platform.machine())}, {threads} thread{'s' if threads > 1 else ''}"


def synchronize(device: "torch.device") -> None:
    """Wait for the work that was launched on an accelerator; does nothing on a CPU."""
    import torch

    if device.type not in ("cpu", "meta"):
        torch.accelerator.synchronize(device)


def empty_cache() -> None:
    """Empty the memory cache of the accelerator, if there is one."""
    import torch

    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


# ---- float64


def float64_device(device: "torch.device") -> "torch.device":
    """The device for float64 computations: the device itself, or the CPU if the device has no float64."""
    import torch

    if device.type == "mps":
        return torch.device("cpu")
    if device.type == "xpu" and not torch.xpu.get_device_properties(device).has_fp64:
        return torch.device("cpu")
    return device


def wide(tensor: "torch.Tensor") -> "torch.Tensor":
    """Convert a tensor to float64, on the CPU if its device has no float64."""
    return tensor.to(float64_device(tensor.device)).double()


# ---- compute dtype

COMPUTE_DTYPE = "MOH_LLM_COMPUTE_DTYPE"  # environment variable that replaces "auto"
_ROWS, _WIDTH = 128, 512  # initial size of the timed products
_MOST_ROWS = 1 << 16
_LEAST_SECONDS = 0.004  # shorter float32 products would mostly measure the start of threads and kernels
_FASTER = 0.8  # bfloat16 is chosen if it takes less than this share of float32's time


def compute_dtype(device: "torch.device", asked: str = "auto") -> "torch.dtype":
    """Choose the dtype in which models are computed: bfloat16 if its products are fast on the device, else float32.

    This is the only place that decides it. Weights on disk keep their dtype.

    Args:
        device: device that models run on.
        asked: name of a dtype, or "auto", for which the environment variable `COMPUTE_DTYPE` is read first.

    Raises:
        UserError: the environment variable does not name a dtype.
    """
    import torch

    if asked == "auto":
        asked = os.environ.get(COMPUTE_DTYPE) or "auto"
        if asked not in ("auto", "bfloat16", "float16", "float32"):
            raise UserError(f"{COMPUTE_DTYPE}={asked} must be auto, bfloat16, float16 or float32")
    if asked != "auto":
        return getattr(torch, asked)
    return torch.bfloat16 if computes_bfloat16_fast(device) else torch.float32


@functools.cache
def computes_bfloat16_fast(device: "torch.device") -> bool:
    """Time whether a linear layer, forward and backward, is faster in bfloat16 than in float32.

    CPUs without bfloat16 instructions, and older GPUs, emulate bfloat16 and take up to 36 times as long. The test takes
    at most about half a second.
    """
    import torch

    rows = _ROWS
    while rows < _MOST_ROWS and _product_seconds(device, rows, (torch.float32,))[0] < _LEAST_SECONDS:
        rows *= 2
    try:
        seconds = _product_seconds(device, rows, (torch.float32, torch.bfloat16))
    except (RuntimeError, TypeError):  # the backend does not support the dtype
        return False
    return seconds[1] < _FASTER * seconds[0]


def _product_seconds(device: "torch.device", rows: int, dtypes: "tuple[torch.dtype, ...]") -> list[float]:
    """The best time of the three products of a linear layer, per dtype, in seconds; the first round is a warm-up."""
    import torch

    best = [float("inf")] * len(dtypes)
    shapes = (rows, _WIDTH), (_WIDTH, _WIDTH), (rows, _WIDTH)
    operands = [[torch.ones(shape, device=device, dtype=dtype) for shape in shapes] for dtype in dtypes]
    for number in range(4):
        for place, (states, weight, gradient) in enumerate(operands):
            synchronize(device)
            started = time.perf_counter()
            _ = states @ weight.T, gradient @ weight, gradient.T @ states
            synchronize(device)
            if number:
                best[place] = min(best[place], time.perf_counter() - started)
    return best


# ---- memory


def memory_bytes() -> int:
    """Memory of the machine in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_memory(needed: int, what: str, way_out: str) -> None:
    """Raise UserError if ``what`` needs more bytes than the machine has."""
    available = memory_bytes()
    if needed > available:
        raise UserError(
            f"{what} needs about {needed / _GIB:,.0f} GiB of memory, but there are {available / _GIB:,.1f}; {way_out}"
        )


# ---- launchers: several processes that are not connected would each do the whole job in the same folder

# Variables of srun and MPI launchers: number of processes -> rank. SLURM_NTASKS is not among them, because it is also
# set in batch scripts and interactive allocations, where a single process runs.
_STARTERS = {
    "SLURM_STEP_NUM_TASKS": "SLURM_PROCID",
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",
    "PMI_SIZE": "PMI_RANK",
}
_WAY_OUT = "start them with accelerate launch or torchrun, once on each machine (recipes/launch)"


def world_size() -> int:
    """Number of processes of this job, as set by accelerate launch or torchrun; 1 without such a launcher.

    Raises:
        UserError: another launcher started several processes that are not connected, or variables are missing.
    """
    if "WORLD_SIZE" in os.environ:
        started = max(1, _number("WORLD_SIZE"))
        if started > 1 and (absent := [name for name in ("RANK", "MASTER_ADDR") if name not in os.environ]):
            _refuse(
                "RANK", f"WORLD_SIZE={started}, but {' and '.join(absent)} are not set, so the processes cannot connect"
            )
        return started
    for count, rank in _STARTERS.items():
        if (started := _number(count)) > 1:
            _refuse(rank, f"{count}={started}: {started} processes were started that are not connected")
    return 1


def check_group(size: int) -> None:
    """Raise UserError if the number of connected processes, ``size``, differs from `world_size`."""
    if size != (started := world_size()):
        what = f"form a group of {size}" if size > 1 else "are not connected"
        _refuse("RANK", f"WORLD_SIZE={started}: {started} processes were started, and they {what}")


def _refuse(rank: str, what: str) -> None:
    """Raise UserError on the first process; end the others silently."""
    if _number(rank) > 0:
        raise SystemExit(2)
    raise UserError(f"{what}; {_WAY_OUT}, or unset the variable to run one process alone")


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else 0
