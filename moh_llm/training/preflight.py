"""Checks of a training job before it starts: what would stop it, its memory and disk, how long it takes.

    diagnosis = diagnose(config, "fsdp2", processes=8, gpu="H100")
    diagnosis.fit          # no check found a fault
    diagnosis.findings     # one line for each check

Of the weights only norms are read, so the checks take seconds. `moh-llm train` calls `check_machine` before it loads
a model.
"""

import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from moh_llm.attention import choose_for
from moh_llm.devices import (
    GPUS,
    accelerator_memory,
    check_memory,
    choose_device,
    find_gpu,
    memory_bytes,
    name_device,
    peak_flops,
)
from moh_llm.errors import UserError
from moh_llm.flops import training_flops
from moh_llm.modeling import MoHLlamaConfig
from moh_llm.training.config import TrainConfig
from moh_llm.training.memory import Memory, Sizes, estimate_memory
from moh_llm.training.parallel import check_experts, check_strategy, count_micro_batches
from moh_llm.training.precision import check_positions, decide_precision, slow_precision
from moh_llm.training.preflight_inputs import (
    Finding,
    check_data,
    check_model,
    check_router_rate,
    check_teacher,
    read_model_config,
)
from moh_llm.training.runs import read_run

# Assumed share of a GPU's peak FLOP/s, for the estimate of days.
UTILISATION = 0.4
# How much of the memory an estimate may take: beyond the first share a warning is given, beyond the second training
# does not start. The estimate is accurate to 20 %.
_TIGHT, _CERTAIN = 0.9, 1.5
_GIB = 1 << 30
_BYTES_PER_TOKEN = 24  # of a step's batch: input, position, label


class Device(NamedTuple):
    """The device of a process: memory in bytes, and peak FLOP/s (None: unknown)."""

    name: str
    memory: int
    peak: float | None


@dataclass(frozen=True)
class Plan:
    """Size of the job. `days` is None where the device's peak is unknown; `assumes` states the assumption behind it."""

    steps: int
    tokens: int
    flops: int
    days: float | None
    assumes: str


@dataclass(frozen=True)
class Diagnosis:
    """The findings, the estimate of memory, and the plan; the latter two are None where the model cannot be read."""

    findings: list[Finding]
    memory: Memory | None
    plan: Plan | None

    @property
    def fit(self) -> bool:
        """Whether no finding is a fault."""
        return all(finding.state != "fault" for finding in self.findings)

    def record(self) -> dict[str, Any]:
        """The diagnosis as JSON values; memory in bytes."""
        memory = self.memory and asdict(self.memory) | {"total": self.memory.total}
        findings = [finding._asdict() for finding in self.findings]
        return {
            "fit": self.fit,
            "findings": findings,
            "memory_per_process": memory,
            "plan": self.plan and asdict(self.plan),
        }


def diagnose(config: TrainConfig, strategy: str = "one", processes: int = 1, gpu: str | None = None) -> Diagnosis:
    """Check a job.

    Args:
        config: the recipe.
        strategy: one of `moh_llm.training.memory.STRATEGIES`.
        processes: number of processes.
        gpu: name of the GPU of each process; None: the device of this machine.

    Raises:
        UserError: the GPU is unknown, or `strategy` is "one" and `processes` above 1.
    """
    if strategy == "one" and processes > 1:
        raise UserError(f"--processes {processes} needs a --strategy that divides the work, for example ddp")
    device = find_device(gpu, processes)
    config = decide_precision(config, dtype=None if gpu is None else torch.bfloat16)
    findings = _run_checks(
        [
            ("devices", lambda: check_device(config, device, processes, gpu)),
            ("batch", lambda: check_batch(config, processes)),
            ("strategy", lambda: check_strategy(config, strategy)),
            ("output", lambda: check_output(config)),
        ]
    )
    try:
        model = read_model_config(config)
        sizes = Sizes.count(config, model)
    except UserError as error:
        return Diagnosis([*findings, Finding("fault", "model", str(error))], None, None)
    memory = estimate_memory(config, model, sizes, strategy, processes)
    findings += _run_checks(
        [
            ("strategy", lambda: check_experts(config, model, strategy in ("zero3", "fsdp2"))),
            ("model", lambda: check_model(config, model)),
            ("attention", lambda: check_backend(config, model, gpu)),
            ("rates", lambda: check_router_rate(config, model)),
            ("positions", lambda: _as_warning("positions", check_positions(config, model))),
            ("teacher", lambda: check_teacher(config)),
        ]
    )
    findings += check_data(config)
    findings += _run_checks(
        [
            ("disk", lambda: check_disk(config, model, sizes)),
            ("memory", lambda: check_estimate(memory, device)),
        ]
    )
    return Diagnosis(findings, memory, make_plan(config, model, device, processes))


def _run_checks(checks: Iterable[tuple[str, Callable[[], Finding | None]]]) -> list[Finding]:
    """What each check finds; a `UserError` is a fault, and None is nothing to say."""
    found = []
    for name, check in checks:
        try:
            finding = check()
        except UserError as error:
            finding = Finding("fault", name, str(error))
        if finding is not None:
            found.append(finding)
    return found


def _as_warning(check: str, text: str | None) -> Finding | None:
    return None if text is None else Finding("warning", check, text)


def find_device(gpu: str | None, processes: int) -> Device:
    """The device of each process. Raises UserError for an unknown GPU."""
    if gpu is not None:
        found = find_gpu(gpu)
        if found is None:
            raise UserError(f"--gpu {gpu} is not known; known are {', '.join(GPUS)}")
        return Device(gpu, found.memory, found.peak)
    if (memory := accelerator_memory()) is not None:
        name = name_device(choose_device())
        return Device(name, memory, peak_flops(name))
    return Device("CPU", memory_bytes() // processes, None)


def check_device(config: TrainConfig, device: Device, processes: int, gpu: str | None) -> Finding:
    """The devices, and whether they are fast at the recipe's `mixed_precision`."""
    text = f"{processes} x {device.name}, {device.memory / _GIB:.1f} GiB each"
    if gpu is not None:
        return Finding("ok", "devices", f"{text}, as given by --gpu")
    if slow := slow_precision(config, choose_device()):
        return Finding("warning", "devices", f"{text}: {slow}")
    if not torch.accelerator.is_available():
        return Finding("warning", "devices", f"{text}: PyTorch finds no accelerator here")
    if processes > (here := torch.accelerator.device_count()):
        return Finding("warning", "devices", f"{text}: this machine has {here}; the others must be on other machines")
    return Finding("ok", "devices", text)


def check_backend(config: TrainConfig, model: MoHLlamaConfig, gpu: str | None) -> Finding | None:
    """The backend that this machine's device takes for layers with heads off; None with ``--gpu``."""
    if gpu is not None:
        return None
    dtype = torch.bfloat16 if config.mixed_precision == "bf16" else torch.float32
    device = choose_device()
    try:
        choice = choose_for(device, dtype, model.head_dim)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{device} does not work: {reason}; repair it, or hide it from PyTorch") from error
    text = f"{choice.name} computes layers with heads off on {device.type}"
    return Finding("ok", "attention", f"{text} ({choice.why})" if choice.why else text)


def check_batch(config: TrainConfig, processes: int) -> Finding:
    """How the batch is divided. Raises UserError where processes would get different numbers of micro-batches."""
    data, count = config.data, count_micro_batches(config, processes)
    parts = f"data.micro_batch_size={data.micro_batch_size} x {processes} processes x {count} micro-batches"
    return Finding("ok", "batch", f"data.batch_size={data.batch_size} is {parts}")


def check_disk(config: TrainConfig, model: MoHLlamaConfig, sizes: Sizes) -> Finding:
    """Whether the output's disk has room for checkpoints (12 bytes for each trained weight) and the model.

    The newest `save_total_limit` checkpoints, the milestones and the one being written exist at the same time. What an
    earlier start of the run left takes no more room.
    """
    keep, folder = config.checkpoint, Path(config.output_dir)
    made = -(-config.max_steps // keep.save_steps)
    milestones = config.max_steps // keep.milestone_every if keep.milestone_every else 0
    kept = keep.save_total_limit + milestones + 1
    dtype = model.dtype or torch.float32
    number = min(made, kept)
    checkpoints, saved = 12 * sizes.trained * number, sizes.base * dtype.itemsize
    there = sum(file.stat().st_size for file in (folder / "checkpoints").glob("step-*/*"))
    real = Path(os.path.realpath(folder))
    place = next(parent for parent in (real, *real.parents) if parent.exists())
    if os.statvfs(place).f_flag & os.ST_RDONLY:
        return Finding("fault", "disk", f"the disk of {place} is read-only; change --output_dir")
    free = shutil.disk_usage(place).free
    text = (
        f"{number} checkpoints of {12 * sizes.trained / _GIB:.2f} GiB and a model of {saved / _GIB:.2f} GiB to "
        f"{folder}; {free / _GIB:.1f} GiB are free"
    )
    if checkpoints + saved - min(there, checkpoints) > free:
        text += "; free some space, lower checkpoint.save_total_limit or change --output_dir"
        return Finding("fault", "disk", text)
    return Finding("ok", "disk", text)


def check_estimate(memory: Memory, device: Device) -> Finding:
    """Whether the estimated memory fits into the device's."""
    share = memory.total / device.memory
    text = f"about {memory.total / _GIB:.2f} of {device.memory / _GIB:.1f} GiB for each process"
    if share <= _TIGHT:
        return Finding("ok", "memory", text)
    remedy = "lower data.micro_batch_size, set gradient_checkpointing, or shard more (--strategy, --processes)"
    if share > 1:
        return Finding("fault", "memory", f"{text}; {remedy}")
    return Finding("warning", "memory", f"{text}, which leaves little room for the error of the estimate; {remedy}")


def make_plan(config: TrainConfig, model: MoHLlamaConfig, device: Device, processes: int) -> Plan:
    """Steps, tokens, FLOPs of forward and backward passes (without evaluation), and days on these devices."""
    length, sequences = config.data.sequence_length, config.max_steps * config.data.batch_size
    flops = sequences * training_flops(
        model, length, config.objective.has_teacher, config.gradient_checkpointing, frozen=config.is_base_frozen
    )
    days, assumes = None, f"the peak of {device.name} is unknown"
    if device.peak is not None and config.mixed_precision != "bf16":
        assumes = "only bfloat16 peaks are known, and mixed_precision is no"
    elif device.peak is not None:
        days = flops / (processes * device.peak * UTILISATION) / 86400
        assumes = f"{processes} x {device.name} at {UTILISATION:.0%} of {device.peak / 1e12:g} TFLOP/s, an assumption"
    return Plan(config.max_steps, config.max_steps * config.tokens_per_step, flops, days, assumes)


def check_output(config: TrainConfig) -> Finding:
    """What `moh-llm train` with the same recipe would do with the output folder."""
    folder, record = Path(config.output_dir), read_run(config)
    if record is None:
        return Finding("ok", "output", f"{folder} is new")
    if record.status == "finished":
        return Finding("warning", "output", f"{folder} holds this run, finished; there would be nothing to do")
    checkpoints = sorted(found.name for found in (folder / "checkpoints").glob("step-*"))
    where = f"after {checkpoints[-1]}" if checkpoints else "from its start, as it has no checkpoint"
    return Finding("ok", "output", f"{folder} holds this run; it would resume {where}")


def check_machine(config: TrainConfig, processes: int, divided: bool = False) -> Finding | None:
    """Raise UserError for a larger batch or more CPU memory than the machine has, and `check_experts`.

    Returns the warning of `check_router_rate` where there is one.

    Args:
        config: the recipe.
        processes: number of processes.
        divided: whether these divide the weights among them.
    """
    data = config.data
    batch = _BYTES_PER_TOKEN * data.batch_size * data.sequence_length // processes
    check_memory(batch, f"a step of data.batch_size={data.batch_size:,} sequences", "lower it")
    model = read_model_config(config)
    check_experts(config, model, divided)
    if config.lora is not None and config.lora.rank > model.hidden_size:
        raise UserError(
            f"lora.rank={config.lora.rank} must be at most hidden_size={model.hidden_size}: adapters of a higher rank "
            "are no smaller than the weights"
        )
    if not torch.accelerator.is_available():
        needed = estimate_memory(config, model, Sizes.count(config, model)).total
        remedy = "lower data.micro_batch_size or data.sequence_length, or set gradient_checkpointing"
        check_memory(needed, "training", f"{remedy} (see moh-llm doctor)", available=round(_CERTAIN * memory_bytes()))
    rates = check_router_rate(config, model)
    return rates if rates and rates.state == "warning" else None
