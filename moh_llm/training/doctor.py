"""Is a training job fit to start? What would stop it, what it needs of memory and disk, how long it takes.

Each check gives findings of one line; those of model, data and output are in `inputs`.
"""

import configparser
import platform
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from moh_llm.devices import GPUS, find_gpu, peak_flops
from moh_llm.errors import UserError
from moh_llm.flops import training_flops
from moh_llm.machine import memory_bytes
from moh_llm.modeling import MoHLlamaConfig
from moh_llm.training.config import TrainConfig
from moh_llm.training.inputs import Finding, check_data, check_model, check_output, check_teacher, read_model_config
from moh_llm.training.memory import Memory, Sizes, estimate_memory, has_teacher
from moh_llm.training.runs import PACKAGES

# Share of a GPU's peak that training is taken to reach, when days are estimated.
UTILISATION = 0.4
# Above this share of the memory an estimate is no comfort.
_TIGHT = 0.9
_GIB = 1 << 30


class Device(NamedTuple):
    """What a process runs on: memory in bytes, and the peak in FLOP/s, None where it is not known."""

    name: str
    memory: int
    peak: float | None


@dataclass(frozen=True)
class Plan:
    """The job in numbers. `days` is None where the device's peak is not known; `assumes` says what it rests on."""

    steps: int
    tokens: int
    flops: int
    days: float | None
    assumes: str


@dataclass(frozen=True)
class Diagnosis:
    """All findings; memory and plan are None where the model cannot be read."""

    findings: list[Finding]
    memory: Memory | None
    plan: Plan | None

    @property
    def fit(self) -> bool:
        """Whether nothing was found that stops the job."""
        return all(finding.state != "fault" for finding in self.findings)

    def record(self) -> dict[str, Any]:
        """The same as JSON; memory in bytes."""
        memory = self.memory and self.memory.parts | {"total": self.memory.total, "highest_at": self.memory.moment}
        findings = [finding._asdict() for finding in self.findings]
        plan = self.plan and asdict(self.plan)
        return {"fit": self.fit, "findings": findings, "memory_per_process": memory, "plan": plan}


def diagnose(config: TrainConfig, strategy: str = "one", processes: int = 1, gpu: str | None = None) -> Diagnosis:
    """Check a job.

    Args:
        config: the recipe.
        strategy: one of `moh_llm.training.memory.STRATEGIES`.
        processes: how many will share the work.
        gpu: name of the GPU that each will have; None: what this machine has.

    Raises:
        UserError: the GPU is not known, or one process is asked to be several.
    """
    if strategy == "one" and processes > 1:
        raise UserError(f"--processes {processes} needs a --strategy that divides the work, for example ddp")
    device = find_device(gpu, processes)
    findings = [
        *check_versions(strategy),
        *check_device(config, device, processes, gpu),
        *check_batch(config, processes),
        *check_output(config),
    ]
    try:
        model = read_model_config(config)
        sizes = Sizes.of(config, model)
    except UserError as error:
        return Diagnosis([*findings, Finding("fault", "model", str(error))], None, None)
    memory = estimate_memory(config, model, sizes, strategy, processes)
    findings += [*check_model(config, model), *check_teacher(config), *check_data(config)]
    findings += [*check_disk(config, model, sizes), *check_memory(memory, device)]
    return Diagnosis(findings, memory, make_plan(config, model, device, processes))


def find_device(gpu: str | None, processes: int) -> Device:
    """What each process will run on. Raises UserError for a GPU that is not known."""
    if gpu is not None:
        found = find_gpu(gpu)
        if found is None:
            raise UserError(f"--gpu {gpu} is not known; known are {', '.join(GPUS)}")
        return Device(gpu, found.memory, found.peak)
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name(0)
        return Device(name, torch.cuda.get_device_properties(0).total_memory, peak_flops(name))
    return Device("processor", memory_bytes() // processes, None)


def check_versions(strategy: str) -> Iterator[Finding]:
    """Python and the libraries that training uses, against what the package asks for."""
    try:
        texts = metadata.requires("moh-llm") or []
        python = str(metadata.metadata("moh-llm")["Requires-Python"])
    except metadata.PackageNotFoundError:  # started from a checkout that is not installed
        options = configparser.ConfigParser()
        options.read(Path(__file__).parents[2] / "setup.cfg", encoding="utf-8")
        extra = options.get("options.extras_require", "deepspeed", fallback="")
        texts = (options.get("options", "install_requires", fallback="") + extra).split("\n")
        python = options.get("options", "python_requires", fallback="")
    wanted = {found.name: found.specifier for found in (Requirement(text) for text in texts if text)}
    have, faults = [f"python {platform.python_version()}"], []
    if not SpecifierSet(python).contains(platform.python_version(), prereleases=True):
        faults.append(f"{have[0]} is there, {python} is needed")
    for name in (*PACKAGES, *(["deepspeed"] if strategy.startswith("zero") else [])):
        needed = wanted.get(name, SpecifierSet())
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            faults.append(f'{name} is not there; install it (pip install "{name}{needed}")')
            continue
        have.append(f"{name} {version}")
        if not needed.contains(version, prereleases=True):
            faults.append(f"{name} {version} is there, {needed} is needed")
    yield from (Finding("fault", "versions", fault) for fault in faults)
    if not faults:
        yield Finding("ok", "versions", ", ".join(have))


def check_device(config: TrainConfig, device: Device, processes: int, gpu: str | None) -> Iterator[Finding]:
    """The devices, and whether they compute in the precision that the recipe asks for."""
    text = f"{processes} x {device.name}, {device.memory / _GIB:.1f} GiB each"
    if gpu is not None:
        yield Finding("ok", "devices", f"{text}, as named; not looked for here")
    elif not torch.cuda.is_available():
        yield Finding("warning", "devices", f"{text}: torch finds no CUDA device here")
    elif config.mixed_precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        yield Finding("fault", "devices", f"{device.name} has no bfloat16; set mixed_precision to no")
    elif processes > (here := torch.cuda.device_count()):
        yield Finding("warning", "devices", f"{text}; this machine has {here}, the others have to be elsewhere")
    else:
        yield Finding("ok", "devices", text)


def check_batch(config: TrainConfig, processes: int) -> Iterator[Finding]:
    """Whether the blocks of a step can be dealt out evenly, as `make_accelerator` asks."""
    data = config.data
    text = f"data.batch_size={data.batch_size} is"
    rule = f"data.micro_batch_size={data.micro_batch_size} x {processes} processes"
    passes, rest = divmod(data.batch_size, data.micro_batch_size * processes)
    if rest:
        yield Finding("fault", "batch", f"{text} no multiple of {rule}; change one of them")
    else:
        yield Finding("ok", "batch", f"{text} {rule} x {passes} passes")


def check_disk(config: TrainConfig, model: MoHLlamaConfig, sizes: Sizes) -> Iterator[Finding]:
    """Whether checkpoints (12 bytes for each trained weight) and models find room where the output lies.

    At most there are the newest `keep_last`, the milestones, and the one being written; those that
    an earlier start of the run left are already paid for.
    """
    keep, folder = config.checkpoint, Path(config.output)
    made = -(-config.max_steps // keep.every)
    milestones = config.max_steps // keep.milestone_every if keep.milestone_every else 0
    kept = keep.keep_last + milestones + 1
    models = 1 + (milestones if config.hub is not None and config.hub.milestones else 0)
    dtype = getattr(torch, config.save_dtype) if config.save_dtype else model.dtype or torch.float32
    number = min(made, kept)
    checkpoints, saved = 12 * sizes.trained * number, sizes.base * dtype.itemsize * models
    there = sum(file.stat().st_size for file in (folder / "checkpoints").glob("step-*/*"))
    place = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(place).free
    text = (
        f"{number} checkpoints of {12 * sizes.trained / _GIB:.2f} GiB and "
        f"{'a model' if models == 1 else f'{models} models, together'} of {saved / _GIB:.2f} GiB to {folder}; "
        f"{free / _GIB:.1f} GiB are free"
    )
    if checkpoints + saved - min(there, checkpoints) > free:
        yield Finding("fault", "disk", f"{text}; free some, lower checkpoint.keep_last or name another --output")
    else:
        yield Finding("ok", "disk", text)


def check_memory(memory: Memory, device: Device) -> Iterator[Finding]:
    """Whether the estimate fits into the device."""
    share = memory.total / device.memory
    text = f"about {memory.total / _GIB:.2f} of {device.memory / _GIB:.1f} GiB for each process"
    remedy = "lower data.micro_batch_size, set gradient_checkpointing, or divide more (--strategy, --processes)"
    if share > 1:
        yield Finding("fault", "memory", f"{text}; {remedy}")
    elif share > _TIGHT:
        yield Finding("warning", "memory", f"{text}, which leaves little for what is not estimated; {remedy}")
    else:
        yield Finding("ok", "memory", text)


def make_plan(config: TrainConfig, model: MoHLlamaConfig, device: Device, processes: int) -> Plan:
    """Steps, tokens, FLOPs of forward and backward passes (scoring is left out), and days on such devices."""
    length, blocks = config.data.block_length, config.max_steps * config.data.batch_size
    flops = blocks * training_flops(
        model, length, has_teacher(config), config.gradient_checkpointing, frozen=config.lora is not None
    )
    days, assumes = None, f"no peak is known of {device.name}"
    if device.peak is not None and config.mixed_precision != "bf16":
        assumes = "peaks are known of bfloat16 only, and mixed_precision is no"
    elif device.peak is not None:
        days = flops / (processes * device.peak * UTILISATION) / 86400
        assumes = f"{processes} x {device.name} at {UTILISATION:.0%} of {device.peak / 1e12:g} TFLOP/s, an assumption"
    return Plan(config.max_steps, config.max_steps * config.tokens_per_step, flops, days, assumes)
