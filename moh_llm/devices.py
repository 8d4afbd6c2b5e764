"""Device, compute dtype, memory, disk and cores of the machine, and the processes that a launcher started."""

import functools
import os
import platform
import re
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from moh_llm.errors import UserError

if TYPE_CHECKING:
    import torch

_WORKERS_PER_CORE = 8


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
    """The device of that name; None: the accelerator (CUDA, ROCm, XPU, MPS) if torch finds one, else the CPU.

    Raises:
        UserError: torch does not know that device or does not have it.
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
    """The device of this process: `choose_device`'s; of several accelerators the one of its number on this machine."""
    import torch

    device, number = choose_device(), _number("LOCAL_RANK")
    if device.type == "cpu" or number >= torch.accelerator.device_count():
        return device
    return torch.device(device.type, number)


def name_device(device: "torch.device") -> str:
    """The GPU's name; for a CPU its model, or its architecture, and the number of threads that torch uses."""
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
    """Wait for what was launched on an accelerator; on a CPU nothing is left to wait for."""
    import torch

    if device.type not in ("cpu", "meta"):
        torch.accelerator.synchronize(device)


def empty_cache() -> None:
    """Return the accelerator's unused memory to it, if there is one."""
    import torch

    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def accelerator_memory(index: int = 0) -> int | None:
    """Bytes of memory of an accelerator; None where there is none, or its backend does not say."""
    import torch

    if not torch.accelerator.is_available():
        return None
    properties = getattr(torch.get_device_module(), "get_device_properties", None)
    if properties is None:  # MPS, which shares the machine's memory
        return memory_bytes()
    return properties(index).total_memory


# ---- float64


def float64_device(device: "torch.device") -> "torch.device":
    """A device where float64 of that device's tensors can be computed: itself, or the CPU where it has no float64."""
    import torch

    if device.type == "mps":
        return torch.device("cpu")
    if device.type == "xpu" and not torch.xpu.get_device_properties(device).has_fp64:
        return torch.device("cpu")
    return device


def wide(tensor: "torch.Tensor") -> "torch.Tensor":
    """float64 of a tensor: on its device, or on the CPU where the device has no float64."""
    return tensor.to(float64_device(tensor.device)).double()


# ---- compute dtype

COMPUTE_DTYPE = "MOH_LLM_COMPUTE_DTYPE"  # environment variable: what "auto" stands for
_ROWS, _WIDTH = 128, 512  # of the timed products, at first
_MOST_ROWS = 1 << 16
_LEAST_SECONDS = 0.004  # of float32's products: in less, many cores and GPUs spend most of the time on starting
_FASTER = 0.8  # share of float32's time that bfloat16 must stay below


def compute_dtype(device: "torch.device", asked: str = "auto") -> "torch.dtype":
    """The dtype that models are computed in on a device: bfloat16 where its products are fast, else float32.

    The one place where this is decided. Weights on disk keep their dtype.

    Args:
        device: where models run.
        asked: "auto", or the name of a dtype. For "auto" the environment variable `COMPUTE_DTYPE` is asked first.

    Raises:
        UserError: the environment variable names no dtype.
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
    """Whether a linear layer, forward and backward, takes less time in bfloat16 than in float32.

    It is timed: CPUs with AVX2 or AVX-512 alone, and older GPUs, accept bfloat16 and emulate it, at up to 36 times the
    time. Takes about half a second at most.
    """
    import torch

    rows = _ROWS
    while rows < _MOST_ROWS and _product_seconds(device, rows, (torch.float32,))[0] < _LEAST_SECONDS:
        rows *= 2
    try:
        seconds = _product_seconds(device, rows, (torch.float32, torch.bfloat16))
    except (RuntimeError, TypeError):  # the backend lacks the dtype
        return False
    return seconds[1] < _FASTER * seconds[0]


def _product_seconds(device: "torch.device", rows: int, dtypes: "tuple[torch.dtype, ...]") -> list[float]:
    """For each dtype the least seconds of the three products of a linear layer; the first round warms up."""
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


# ---- GPUs by name


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


# ---- memory, disk, cores


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
    """Raise UserError where ``what`` needs more bytes than are free on the disk of ``place``, which need not exist.

    A disk that cannot be written is told as such, whatever is free on it.
    """
    place = Path(os.path.realpath(place))
    there = next(parent for parent in (place, *place.parents) if parent.exists())
    if os.statvfs(there).f_flag & os.ST_RDONLY:
        raise UserError(f"cannot write {place}: the disk of {there} is read-only; name another place")
    disk = shutil.disk_usage(there)
    if disk.total and needed > (free := disk.free):  # a file system of kernel objects has no size
        raise UserError(
            f"{what} needs about {_size(needed)} on the disk of {there}, where {_size(free)} are free; free some "
            f"space, name another place, or {way_out}"
        )


def _size(number: int) -> str:
    """Bytes in GiB, or in MiB where they are less than one."""
    return f"{number / _GIB:,.1f} GiB" if number >= _GIB else f"{number / 2**20:,.1f} MiB"


def check_workers(number: int, name: str) -> None:
    """Raise UserError for far more processes than there are cores."""
    cores = os.cpu_count() or 1
    if number > _WORKERS_PER_CORE * cores:
        raise UserError(f"{name}={number}: this machine has {cores} cores; take at most {_WORKERS_PER_CORE * cores}")


# ---- processes of a launcher: processes that are not connected would each do the whole job, in the same folder

# How many processes srun and MPI's starters started, and which one this is. SLURM_NTASKS says nothing: it is also set
# in the script of a batch job and in an interactive allocation, where a single process runs.
_STARTERS = {
    "SLURM_STEP_NUM_TASKS": "SLURM_PROCID",
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",
    "PMI_SIZE": "PMI_RANK",
}
_WAY_OUT = "start them with accelerate launch or torchrun, once on each machine (recipes/launch)"


def world_size() -> int:
    """The processes of this job, as accelerate launch or torchrun passes it to each of them; 1 without such a launcher.

    Raises:
        UserError: another launcher started several processes that are not connected, or the variables for a
            process's rank and the meeting place are missing.
    """
    if "WORLD_SIZE" in os.environ:
        started = max(1, _number("WORLD_SIZE"))
        if started > 1 and (absent := [name for name in ("RANK", "MASTER_ADDR") if name not in os.environ]):
            _refuse("RANK", f"WORLD_SIZE={started}, but {' and '.join(absent)} are not set: no process finds another")
        return started
    for count, rank in _STARTERS.items():
        if (started := _number(count)) > 1:
            _refuse(rank, f"{count}={started}: {started} processes were started that are not connected")
    return 1


def check_group(size: int) -> None:
    """Compare the number of processes that found each other with `world_size`.

    Raises:
        UserError: they differ.
    """
    if size != (started := world_size()):
        what = f"form a group of {size}" if size > 1 else "are not connected"
        _refuse("RANK", f"WORLD_SIZE={started}: {started} processes were started, and they {what}")


def _refuse(rank: str, what: str) -> None:
    """Raise UserError on the first process, and end the others silently."""
    if _number(rank) > 0:
        raise SystemExit(2)
    raise UserError(f"{what}; {_WAY_OUT}, or unset the variable to run one process alone")


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else 0
