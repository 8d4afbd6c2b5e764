"""Device and compute dtype of the machine, and the processes that a launcher started."""

import functools
import os
import platform
import timeit
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from moh_llm.errors import UserError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


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
_FASTER = 0.8  # bfloat16 is chosen if it takes less than this share of float32's time


def compute_dtype(device: "torch.device", asked: str = "auto") -> "torch.dtype":
    """Choose the dtype in which models are computed: bfloat16 if its products are fast on the device, else float32.

    This is the only place that decides it. Weights on disk keep their dtype. ``asked`` names a dtype, or is "auto", for
    which the environment variable `COMPUTE_DTYPE` is read first.

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
    """Whether products of matrices are faster in bfloat16 than in float32.

    CUDA says whether the GPU has bfloat16. CPUs without bfloat16 instructions emulate it and take up to 36 times as
    long, and no function of torch tells all of them, so that a product is timed.
    """
    import torch

    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu":
        return True
    return _product_seconds(torch.bfloat16) < _FASTER * _product_seconds(torch.float32)


def _product_seconds(dtype: "torch.dtype") -> float:
    """The best of three times of a product on the CPU; the first one is a warm-up."""
    import torch

    states, weight = torch.ones(2048, 512, dtype=dtype), torch.ones(512, 512, dtype=dtype)
    return min(timeit.repeat(lambda: states @ weight.T, number=1, repeat=4)[1:])


# ---- launchers: several processes that are not connected would each do the whole job in the same folder

# Variables of srun and MPI launchers: the number of processes. SLURM_NTASKS is not among them, because it is also set
# in batch scripts and interactive allocations, where a single process runs.
_STARTED = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def world_size() -> int:
    """Number of processes of this job, as set by accelerate launch or torchrun; 1 without such a launcher.

    Raises:
        UserError: another launcher started several processes that are not connected.
    """
    if "WORLD_SIZE" in os.environ:
        return max(1, _number("WORLD_SIZE"))
    for name in _STARTED:
        if _number(name) > 1:
            _refuse(f"{name}={_number(name)}: {_number(name)} processes were started that are not connected")
    return 1


def check_group(size: int) -> None:
    """Raise UserError if the number of connected processes, ``size``, differs from `world_size`."""
    if size != (started := world_size()):
        _refuse(f"WORLD_SIZE={started}: {started} processes were started, and {size} of them are connected")


def _refuse(what: str) -> NoReturn:
    """Raise UserError; the processes other than the first of a job end silently."""
    if _number("RANK") > 0:
        raise SystemExit(2)
    raise UserError(f"{what}; start them with accelerate launch or torchrun, once on each machine (recipes/launch)")


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else 0


@dataclass(frozen=True)
class Team:
    """The connected processes of a job, and which of them this is."""

    rank: int = 0
    size: int = 1

    def gather(self, item: T) -> list[T]:
        """The item of every process, in the order of their ranks, on all of them."""
        if self.size == 1:
            return [item]
        import torch.distributed

        items: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(items, item)
        return items

    def broadcast(self, make: Callable[[], T]) -> T:
        """Call ``make`` on the first process and return its result on all; a UserError there ends all of them."""
        return self.gather(self.barrier(lambda: make() if self.rank == 0 else None))[0]  # type: ignore[return-value]

    def barrier(self, action: Callable[[], T]) -> T:
        """Call ``action`` on every process, wait for all, and return this process's result.

        A UserError on one process ends all of them: the first process raises it, the others exit silently.
        """
        problem: str | None = None
        try:
            result = action()
        except UserError as error:
            problem = str(error)
        for rank, theirs in enumerate(self.gather(problem)):
            if theirs is not None and self.rank > 0:
                raise SystemExit(2)
            if theirs is not None:
                raise UserError(theirs if rank == 0 else f"{theirs} (process {rank} of {self.size})")
        return result
