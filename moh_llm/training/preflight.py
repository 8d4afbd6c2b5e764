"""Checks of a training job before it starts: what would stop it, its memory and disk, how long it takes.

Each check gives findings of one line. No weights are read, so that the checks take seconds. `check_machine` is what
`moh-llm train` itself asks before it loads a model.
"""

import configparser
import json
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

from moh_llm.devices import GPUS, check_memory, check_workers, find_gpu, memory_bytes, peak_flops
from moh_llm.errors import UserError
from moh_llm.flops import training_flops
from moh_llm.modeling import MoHLlamaConfig
from moh_llm.reading import read_json
from moh_llm.records.conversion import read_conversion
from moh_llm.records.model import check_tensors, read_weight_map
from moh_llm.training.config import TrainConfig, changed_keys
from moh_llm.training.memory import Memory, Sizes, estimate_memory, has_teacher
from moh_llm.training.networks import check_attention
from moh_llm.training.preflight_data import Finding, check_data
from moh_llm.training.reference import expected_reference
from moh_llm.training.runs import PACKAGES, check_converted

# Share of a GPU's peak that training is taken to reach, when days are estimated.
UTILISATION = 0.4
# Above this share of the memory an estimate is no comfort.
_TIGHT = 0.9
_GIB = 1 << 30
_BYTES_PER_TOKEN = 24  # of a step's batch: input, position, label
# The estimate is good to some 15 % (docs/training.md); only what is far beyond memory is refused.
_CERTAIN = 1.5


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
    findings += [*check_disk(config, model, sizes), *check_estimate(memory, device)]
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
    return Device("CPU", memory_bytes() // processes, None)


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
    """Whether the sequences of a step can be dealt out evenly, as `make_accelerator` asks."""
    data = config.data
    text = f"data.batch_size={data.batch_size} is"
    rule = f"data.micro_batch_size={data.micro_batch_size} x {processes} processes"
    micro_batches, rest = divmod(data.batch_size, data.micro_batch_size * processes)
    if rest:
        yield Finding("fault", "batch", f"{text} no multiple of {rule}; change one of them")
    else:
        yield Finding("ok", "batch", f"{text} {rule} x {micro_batches} micro-batches")


def check_disk(config: TrainConfig, model: MoHLlamaConfig, sizes: Sizes) -> Iterator[Finding]:
    """Whether checkpoints (12 bytes for each trained weight) and models find room where the output lies.

    At most there are the newest `save_total_limit`, the milestones, and the one being written; those that
    an earlier start of the run left are already paid for.
    """
    keep, folder = config.checkpoint, Path(config.output_dir)
    made = -(-config.max_steps // keep.save_steps)
    milestones = config.max_steps // keep.milestone_every if keep.milestone_every else 0
    kept = keep.save_total_limit + milestones + 1
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
        yield Finding("fault", "disk", f"{text}; free some, lower checkpoint.save_total_limit or change --output_dir")
    else:
        yield Finding("ok", "disk", text)


def check_estimate(memory: Memory, device: Device) -> Iterator[Finding]:
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
    length, sequences = config.data.sequence_length, config.max_steps * config.data.batch_size
    flops = sequences * training_flops(
        model, length, has_teacher(config), config.gradient_checkpointing, frozen=config.lora is not None
    )
    days, assumes = None, f"no peak is known of {device.name}"
    if device.peak is not None and config.mixed_precision != "bf16":
        assumes = "peaks are known of bfloat16 only, and mixed_precision is no"
    elif device.peak is not None:
        days = flops / (processes * device.peak * UTILISATION) / 86400
        assumes = f"{processes} x {device.name} at {UTILISATION:.0%} of {device.peak / 1e12:g} TFLOP/s, an assumption"
    return Plan(config.max_steps, config.max_steps * config.tokens_per_step, flops, days, assumes)


def check_output(config: TrainConfig) -> Iterator[Finding]:
    """What the same `moh-llm train` command would do about the output that is there."""
    folder, anew = Path(config.output_dir), "name another folder or train with --overwrite"
    path = folder / "run.json"
    if folder.exists() and not folder.is_dir():
        yield Finding("fault", "output", f"output_dir={folder} is a file; name a folder")
        return
    if not path.exists():
        if folder.exists() and any(folder.iterdir()):
            yield Finding("fault", "output", f"{folder} is not empty and holds no run.json to resume; {anew}")
        else:
            yield Finding("ok", "output", f"{folder} is new")
        return
    try:
        record = read_json(path)
        changed = changed_keys(record["config"], json.loads(json.dumps(asdict(config))))
        finished = record["status"] == "finished"
    except (UserError, KeyError, TypeError, AttributeError):
        yield Finding("fault", "output", f"{path} is not the record of a training run; name another folder")
        return
    checkpoints = sorted(found.name for found in (folder / "checkpoints").glob("step-*"))
    if changed:
        text = f"{folder} holds a run with another recipe; different: {', '.join(changed)}; {anew}"
        yield Finding("fault", "output", text)
    elif finished:
        yield Finding("warning", "output", f"{folder} holds this run, finished; there would be nothing to do")
    else:
        where = f"after {checkpoints[-1]}" if checkpoints else "from its start, as it has no checkpoint"
        yield Finding("ok", "output", f"{folder} holds this run; it would go on {where}")


def read_model_config(config: TrainConfig) -> MoHLlamaConfig:
    """The config of ``config.model``.

    Raises:
        UserError: it is no converted model, or none that can teach itself where that is the objective.
    """
    folder = Path(config.model)
    check_converted(folder)
    try:
        model = MoHLlamaConfig.from_pretrained(folder)
    except (ValueError, TypeError) as error:
        raise UserError(f"{folder / 'config.json'} cannot be used: {' '.join(str(error).split())}") from error
    if has_teacher(config) and set(model.active_heads_per_layer) == {model.num_attention_heads}:
        raise UserError(
            f"model={folder} has every head on: distillation has no head to make up for; "
            "set objective.kind to cross_entropy"
        )
    if has_teacher(config) and model.router_score != "quantized":
        raise UserError(
            f"model={folder} has router_score={model.router_score}: with all heads on it is not its dense form, so "
            "there is no teacher; convert with quantised scores or set objective.kind cross_entropy"
        )
    check_attention(config)
    return model


def check_model(config: TrainConfig, model: MoHLlamaConfig) -> Iterator[Finding]:
    """Whether every file of the weights is there, as long as its header says, and every weight in one of them."""
    folder = Path(config.model)
    try:
        files, held = read_weight_map(folder)
        check_tensors(str(folder), files, model)
    except UserError as error:
        yield Finding("fault", "model", str(error))
        return
    size = sum(file.stat().st_size for file in files)
    yield Finding("ok", "model", f"{folder}: {len(held)} tensors in {len(files)} files, {size / 2**30:.2f} GiB")


def check_teacher(config: TrainConfig) -> Iterator[Finding]:
    """Whether the run would be against its base."""
    try:
        reference = expected_reference(config)
        named = read_conversion(Path(config.model)) is not None
    except UserError as error:
        yield Finding("fault", "teacher", str(error))
        return
    if reference is not None:
        by_lineage = reference.kind == "base" and reference.own
        text = "the base, by the model's lineage; training compares hashes" if by_lineage else reference.described
        yield Finding("warning" if named and reference.kind == "start" else "ok", "teacher", text)


def check_machine(config: TrainConfig, processes: int) -> None:
    """Raise UserError for more workers, a larger batch, or more CPU memory than there can be.

    Args:
        config: the recipe.
        processes: that share the batch.
    """
    data = config.data
    check_workers(data.dataloader_num_workers, "data.dataloader_num_workers")
    batch = _BYTES_PER_TOKEN * data.batch_size * data.sequence_length // processes
    check_memory(batch, f"a step of data.batch_size={data.batch_size:,} sequences", "lower it")
    model = read_model_config(config)
    if config.lora is not None and config.lora.rank > model.hidden_size:
        raise UserError(
            f"lora.rank={config.lora.rank} must be at most hidden_size={model.hidden_size}: adapters of a higher rank "
            "are no smaller than the weights"
        )
    if torch.cuda.is_available():
        return
    needed = estimate_memory(config, model, Sizes.of(config, model), "one", 1).total
    way_out = "lower data.micro_batch_size or data.sequence_length, or set gradient_checkpointing (see moh-llm doctor)"
    check_memory(needed, "training", way_out, available=round(_CERTAIN * memory_bytes()))
