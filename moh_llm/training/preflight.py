"""Checks of a training job before it starts: what would stop it, its memory and disk, how long it takes.

Each check returns findings of one line. Of the weights only norms are read, so that the checks take seconds.
`moh-llm train` calls `check_machine` before it loads a model.
"""

import configparser
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

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
from moh_llm.records.conversion import read_conversion
from moh_llm.records.model import read_weight_map
from moh_llm.records.tensors import check_tensors
from moh_llm.training.attention import check_attention
from moh_llm.training.config import TrainConfig
from moh_llm.training.memory import Memory, Sizes, estimate_memory
from moh_llm.training.networks import read_network_config
from moh_llm.training.parallel import check_experts, check_strategy, count_micro_batches
from moh_llm.training.positions import check_positions
from moh_llm.training.precision import decide_precision, slow_precision
from moh_llm.training.preflight_data import Finding, check_data
from moh_llm.training.preflight_rates import check_router_rate
from moh_llm.training.reference import expected_reference
from moh_llm.training.runs import PACKAGES, check_converted, read_run
from moh_llm.training.shared_heads import check_shared_heads

# Assumed share of a GPU's peak FLOP/s, for the estimate of days.
UTILISATION = 0.4
# Above this share of the memory a warning is given, since the estimate has an error.
_TIGHT = 0.9
_GIB = 1 << 30
_BYTES_PER_TOKEN = 24  # of a step's batch: input, position, label
# The estimate is accurate to about 15 % (docs/training.md); `check_machine` refuses only what is far above the memory.
_CERTAIN = 1.5


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
        memory = self.memory and self.memory.parts | {"total": self.memory.total, "highest_at": self.memory.moment}
        findings = [finding._asdict() for finding in self.findings]
        plan = self.plan and asdict(self.plan)
        return {"fit": self.fit, "findings": findings, "memory_per_process": memory, "plan": plan}


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
    device, findings = find_device(gpu, processes), [*check_versions(strategy)]
    config = decide_precision(config, dtype=None if gpu is None else torch.bfloat16)

    def check(name: str, function: Callable[..., Finding | None], *arguments: Any) -> None:
        try:
            found = function(*arguments)
        except UserError as error:
            found = Finding("fault", name, str(error))
        findings.extend([found] if found else [])

    check("devices", check_device, config, device, processes, gpu)
    check("batch", check_batch, config, processes)
    check("strategy", check_strategy, config, strategy)
    check("output", check_output, config)
    try:
        model = read_model_config(config)
        sizes = Sizes.of(config, model)
    except UserError as error:
        return Diagnosis([*findings, Finding("fault", "model", str(error))], None, None)
    memory = estimate_memory(config, model, sizes, strategy, processes)
    check("strategy", check_experts, config, model, strategy in ("zero3", "fsdp2"))
    check("model", check_model, config, model)
    check("attention", describe_attention, config, model, gpu)
    check("rates", check_router_rate, config, model)
    check("positions", check_positions, config, model)
    check("teacher", check_teacher, config)
    findings += check_data(config)
    check("disk", check_disk, config, model, sizes)
    check("memory", check_estimate, memory, device)
    return Diagnosis(findings, memory, make_plan(config, model, device, processes))


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


def check_versions(strategy: str) -> Iterator[Finding]:
    """Whether the versions of Python and of the libraries that training uses meet the package's requirements."""
    try:
        texts = metadata.requires("moh-llm") or []
        python = str(metadata.metadata("moh-llm")["Requires-Python"])
    except metadata.PackageNotFoundError:  # started from a checkout that is not installed
        options = configparser.ConfigParser()
        options.read(Path(__file__).parents[2] / "setup.cfg", encoding="utf-8")
        extra = options.get("options.extras_require", "deepspeed", fallback="")
        texts = (options.get("options", "install_requires", fallback="") + extra).split("\n")
        python = options.get("options", "python_requires", fallback="")
    wanted: dict[str, SpecifierSet] = {}
    for found in (Requirement(text) for text in texts if text):  # an extra may name a package again
        wanted[found.name] = wanted.get(found.name, SpecifierSet()) & found.specifier
    have, faults = [f"python {platform.python_version()}"], []
    if not SpecifierSet(python).contains(platform.python_version(), prereleases=True):
        faults.append(f"{have[0]} is installed, {python} is required")
    for name in (*PACKAGES, *(["deepspeed"] if strategy.startswith("zero") else [])):
        needed = wanted.get(name, SpecifierSet())
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            faults.append(f'{name} is not installed; run pip install "{name}{needed}"')
            continue
        have.append(f"{name} {version}")
        if not needed.contains(version, prereleases=True):
            faults.append(f"{name} {version} is installed, {needed} is required")
    yield from (Finding("fault", "versions", fault) for fault in faults)
    if not faults:
        yield Finding("ok", "versions", ", ".join(have))


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


def describe_attention(config: TrainConfig, model: MoHLlamaConfig, gpu: str | None) -> Finding | None:
    """What computes attention of layers with heads off on this machine's device, and why; None with ``--gpu``.

    Raises UserError where the device computes nothing.
    """
    if gpu is not None:
        return None
    dtype = torch.bfloat16 if config.mixed_precision == "bf16" else torch.float32
    device = choose_device()
    try:
        choice = choose_for(device, dtype, model.head_dim)
    except RuntimeError as error:
        raise UserError(
            f"{device} does not work: {' '.join(str(error).split())}; mend it, or hide it from PyTorch"
        ) from error
    text = f"{choice.name} computes layers with heads off on {device.type}"
    return Finding("ok", "attention", f"{text} ({choice.why})" if choice.why else text)


def check_batch(config: TrainConfig, processes: int) -> Finding:
    """Whether each process gets the same number of micro-batches."""
    data, count = config.data, count_micro_batches(config, processes)
    parts = f"data.micro_batch_size={data.micro_batch_size} x {processes} processes x {count} micro-batches"
    return Finding("ok", "batch", f"data.batch_size={data.batch_size} is {parts}")


def check_disk(config: TrainConfig, model: MoHLlamaConfig, sizes: Sizes) -> Finding:
    """Whether the disk of the output has room for checkpoints (12 bytes for each trained weight) and models.

    The most that exist at once are the newest `save_total_limit`, the milestones, and the one being written. Those that
    an earlier start of the run left need no more room.
    """
    keep, folder = config.checkpoint, Path(config.output_dir)
    made = -(-config.max_steps // keep.save_steps)
    milestones = config.max_steps // keep.milestone_every if keep.milestone_every else 0
    kept = keep.save_total_limit + milestones + 1
    models = 1 + (milestones if config.hub is not None and config.hub.milestones else 0)
    dtype = model.dtype or torch.float32
    number = min(made, kept)
    checkpoints, saved = 12 * sizes.trained * number, sizes.base * dtype.itemsize * models
    there = sum(file.stat().st_size for file in (folder / "checkpoints").glob("step-*/*"))
    real = Path(os.path.realpath(folder))
    place = next(parent for parent in (real, *real.parents) if parent.exists())
    if os.statvfs(place).f_flag & os.ST_RDONLY:
        return Finding("fault", "disk", f"the disk of {place} is read-only; change --output_dir")
    free = shutil.disk_usage(place).free
    text = (
        f"{number} checkpoints of {12 * sizes.trained / _GIB:.2f} GiB and "
        f"{'a model' if models == 1 else f'{models} models, together'} of {saved / _GIB:.2f} GiB to {folder}; "
        f"{free / _GIB:.1f} GiB are free"
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


def read_model_config(config: TrainConfig) -> MoHLlamaConfig:
    """The config of ``config.model``.

    Raises:
        UserError: it is no converted model, has no teacher where the objective is distillation, or has all heads on
            in sequences as short as the recipe's.
    """
    folder = Path(config.model)
    check_converted(folder)
    model = read_network_config(folder)
    if config.objective.has_teacher and set(model.active_heads_per_layer) == {model.num_attention_heads}:
        raise UserError(
            f"model={folder} has every head on: there is nothing for distillation to recover; "
            "set objective.kind to cross_entropy"
        )
    if config.objective.has_teacher and model.router_score != "quantized":
        raise UserError(
            f"model={folder} has router_score={model.router_score}: with all heads on it is not its dense form, so "
            "there is no teacher; convert with quantised scores or set objective.kind cross_entropy"
        )
    length, all_on = config.data.sequence_length, model.all_heads_until
    if model.head_fallback == "local" and length <= all_on and (config.objective.has_teacher or config.freeze_base):
        raise UserError(
            f"data.sequence_length={length}: model={folder} has all heads on for a document's first {all_on} tokens: "
            f"it equals its base there, and learns nothing; set data.sequence_length above {all_on} (see "
            f"recipes/smollm2_long.yaml), or convert with --context {max(length, 512)}"
        )
    if config.schedule.anneal_steps and (model.router_type == "threshold" or any(model.never_on_heads_per_layer)):
        what = "its router sets the number of heads" if model.router_type == "threshold" else "some heads are never on"
        raise UserError(
            f"schedule.anneal_steps={config.schedule.anneal_steps}: model={folder} cannot be annealed: "
            f"{what}; set it to 0"
        )
    if config.shared_heads is not None:
        check_shared_heads(model, config.shared_heads.number)
    check_attention(config, choose_device())
    return model


def check_model(config: TrainConfig, model: MoHLlamaConfig) -> Finding:
    """Whether the weight files are complete and hold every tensor of the config."""
    folder = Path(config.model)
    files, held = read_weight_map(folder)
    tensors = check_tensors(str(folder), folder, held, model)
    size = sum(file.stat().st_size for file in files)
    text = f"{folder}: {len(held)} tensors in {len(files)} files, {size / _GIB:.2f} GiB"
    if note := tensors.note:
        return Finding("warning", "model", f"{text}; {note}")
    return Finding("ok", "model", text)


def check_teacher(config: TrainConfig) -> Finding | None:
    """Which model the run would be compared with."""
    reference = expected_reference(config)
    if reference is None:
        return None
    if reference.kind == "base" and reference.own:
        return Finding("ok", "teacher", "the base, by the model's lineage; training compares hashes")
    lost = reference.kind == "start" and read_conversion(Path(config.model)) is not None
    return Finding("warning" if lost else "ok", "teacher", reference.described)


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
        needed = estimate_memory(config, model, Sizes.of(config, model), "one", 1).total
        remedy = "lower data.micro_batch_size or data.sequence_length, or set gradient_checkpointing"
        check_memory(needed, "training", f"{remedy} (see moh-llm doctor)", available=round(_CERTAIN * memory_bytes()))
    rates = check_router_rate(config, model)
    return rates if rates and rates.state == "warning" else None
