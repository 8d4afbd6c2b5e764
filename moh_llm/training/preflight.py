"""Checks of a training job: what `moh-llm train` refuses before it loads a model, and `moh-llm doctor` prints.

No weight is loaded, so the checks take seconds. The precision of a run is decided here, once, when it starts; the rest
of training sees "no" or "bf16". A run keeps what it chose, so that it computes the same when it is resumed on another
machine.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from moh_llm.attention import choose_for
from moh_llm.data.mixture import EMBEDDED, load_mixture
from moh_llm.data.shards import TokenizedSource, cache_folder, open_tokens
from moh_llm.data.stream import SequenceStream, make_receipt
from moh_llm.data.tokenizer import TextTokenizer
from moh_llm.data.windows import validation_batches
from moh_llm.devices import COMPUTE_DTYPE, choose_device, compute_dtype, own_device
from moh_llm.errors import UserError
from moh_llm.modeling import MoHLlamaConfig, MoHLlamaForCausalLM
from moh_llm.records.run import RunRecord
from moh_llm.training import networks
from moh_llm.training.budget import make_budget
from moh_llm.training.config import TrainConfig
from moh_llm.training.log import check_trackers
from moh_llm.training.parallel import count_micro_batches
from moh_llm.training.reference import expected_reference
from moh_llm.training.runs import RUN_RECORD, check_converted, check_data, describe_data, read_run

_GIB = 1 << 30
_NAMES: dict[torch.dtype, Literal["no", "bf16"]] = {torch.float32: "no", torch.bfloat16: "bf16"}


def read_model_config(config: TrainConfig) -> MoHLlamaConfig:
    """The config of ``config.model``.

    Raises:
        UserError: it is no converted model, has no teacher where the objective is distillation, or has all heads on
            in sequences as short as the recipe's.
    """
    folder = Path(config.model)
    check_converted(folder)
    model = networks.read_network_config(folder)
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
    if length <= all_on and (config.objective.has_teacher or config.freeze_base):
        raise UserError(
            f"data.sequence_length={length}: model={folder} has all heads on for a document's first {all_on} tokens: "
            f"it equals its base there, and learns nothing; set data.sequence_length above {all_on} (see "
            f"recipes/smollm2_long.yaml), or convert with --context {max(length, 512)}"
        )
    return model


def check_model(config: TrainConfig, divided: bool) -> str | None:
    """Check the model's config against the recipe; return the warning of `check_positions`.

    ``divided`` says whether processes divide the weights among them.

    Raises:
        UserError: as `read_model_config`, or the model has feed-forward experts, which cannot be divided.
    """
    model = read_model_config(config)
    if divided and model.num_local_experts:
        what = "feed-forward experts, which zero3 and fsdp2 cannot divide; take ddp, zero2 or one process"
        raise UserError(f"model={config.model} has {what}")
    return check_positions(config, model)


def check_positions(config: TrainConfig, model: MoHLlamaConfig) -> str | None:
    """A warning where sequences are longer than the model's positions; transformers computes them and says nothing."""
    rope, limit, length = model.rope_parameters or {}, model.max_position_embeddings, config.data.sequence_length
    # With other kinds of scaling the limit may be that of the model before it was scaled.
    if length <= limit or rope.get("rope_type", "default") not in ("default", "llama3", "longrope"):
        return None
    return (
        f"data.sequence_length={length} is above the {limit} positions of model={config.model}: longer documents have "
        "positions that it does not know. Lower it, or scale the rotary embedding in its config.json: "
        f'"rope_parameters" with "rope_type": "yarn", and "max_position_embeddings": {length}'
    )


def check_documents(config: TrainConfig, stream: SequenceStream) -> str | None:
    """A warning where all tokens of the first sequences have all heads on: their documents are too short."""
    model, length = networks.read_network_config(Path(config.model)), config.data.sequence_length
    count = min(64, config.max_steps * config.data.batch_size)
    longest = 1 + int(stream.batch(0, count)["position_ids"].max())
    if longest > model.all_heads_until or not (config.objective.has_teacher or config.freeze_base):
        return None
    return (
        f"the longest document in the first {count} sequences of data.sequence_length={length} has {longest:,} tokens, "
        f"and model={config.model} has all heads on for the first {model.all_heads_until:,} (local_start): routers and "
        "fallbacks learn nothing there. Take text of longer documents, or convert with a shorter --context"
    )


# ---- precision


def decide_precision(config: TrainConfig, overwrite: bool = False) -> TrainConfig:
    """The recipe with `mixed_precision` of "no" or "bf16" in place of "auto".

    Without ``overwrite`` "auto" is what the run in ``config.output_dir`` chose, if there is one.

    Raises:
        UserError: the environment asks for another dtype.
    """
    if config.mixed_precision != "auto":
        return config
    record = None if overwrite else _recorded(config)
    chosen = record and record.config.get("mixed_precision")
    if chosen not in _NAMES.values():
        chosen = _NAMES.get(compute_dtype(own_device()))
    if chosen is None:
        raise UserError(
            f"{COMPUTE_DTYPE}=float16: training computes in bfloat16 or float32; set mixed_precision to bf16 or no"
        )
    return replace(config, mixed_precision=chosen)


def _recorded(config: TrainConfig) -> RunRecord | None:
    """The record of the run in the output folder; None where there is none, or a damaged one."""
    with contextlib.suppress(UserError):  # which is reported where the run is opened
        place = Path(config.output_dir, RUN_RECORD)
        return RunRecord.read(place) if place.is_file() else None
    return None


def check_agreement(accelerator: Accelerator, config: TrainConfig) -> None:
    """Raise UserError, on one process, unless all of them decided for one precision."""
    if len(set(gather_object([config.mixed_precision]))) > 1:
        if not accelerator.is_main_process:
            raise SystemExit(2)
        raise UserError(
            "mixed_precision=auto stands for bf16 on some of the processes and for no on others, whose devices differ: "
            "set it to bf16 or no"
        )


# ---- moh-llm doctor


class Finding(NamedTuple):
    """Result of a check, in one line. A fault would stop the run."""

    state: Literal["ok", "warning", "fault"]
    check: str
    text: str


def diagnose(config: TrainConfig, processes: int = 1) -> Iterator[Finding]:
    """Check a job of ``processes`` processes, one finding after the other; later ones need a model without faults."""
    config = decide_precision(config)
    checks = {
        "batch": lambda: [
            f"{processes} processes x {count_micro_batches(config, processes)} micro-batches x "
            f"{config.data.micro_batch_size} sequences in a step"
        ],
        "output": lambda: [_output(config)],
        "model": lambda: _model(config),
        "teacher": lambda: [reference.described] if (reference := expected_reference(config)) else [],
        "data": lambda: _data(config),
        "job": lambda: _job(config),
    }
    for name, check in checks.items():
        try:
            for found in check():
                yield found if isinstance(found, Finding) else Finding("ok", name, found)
        except UserError as error:
            yield Finding("fault", name, str(error))
            if name == "model":
                return


def _output(config: TrainConfig) -> str:
    check_trackers(config.report_to)
    folder, record = Path(config.output_dir), read_run(config)
    if not os.access(place := _existing(folder), os.W_OK):
        raise UserError(f"output_dir={folder}: {place} cannot be written; name another folder")
    if record is None:
        return f"{folder} is new"
    if record.status == "finished":
        return f"{folder} holds this run, finished; there is nothing to do"
    checkpoints = sorted(found.name for found in (folder / "checkpoints").glob("step-*"))
    return f"{folder} holds this run, which goes on {f'after {checkpoints[-1]}' if checkpoints else 'from its start'}"


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    real = Path(os.path.realpath(folder))
    return next(path for path in (real, *real.parents) if path.exists())


def _model(config: TrainConfig) -> Iterator[str | Finding]:
    model = read_model_config(config)
    networks.check_network(Path(config.model), model)
    yield f"{config.model}: every tensor is there"
    if beyond := check_positions(config, model):
        yield Finding("warning", "model", beyond)
    device = choose_device()
    backend = choose_for(device, networks.reference_dtype(config), model.head_dim)
    yield f"{backend.name} computes layers with heads off on {device.type}"


def _data(config: TrainConfig) -> Iterator[str | Finding]:
    """Tokenizer and text, and how many epochs of each source the job reads."""
    data, folder = config.data, Path(config.model)
    tokenizer = TextTokenizer.from_tokenizer(networks.load_tokenizer(folder), networks.embedding_rows(folder))
    sources, record = _open_sources(data.mixture, tokenizer), _recorded(config)
    if sources is None:
        yield f"{data.mixture} will be tokenized first"
        if record is not None and record.data is not None:
            text = f"the run in {config.output_dir} goes on only if this is the text that it began with"
            yield Finding("warning", "data", text)
        return
    if record is not None:
        check_data(Path(config.output_dir), record, describe_data(sources))
    stream, sequences = SequenceStream(sources, data.sequence_length, config.seed), config.max_steps * data.batch_size
    for source, (name, entry) in zip(sources, make_receipt(stream, sequences).items(), strict=True):
        yield f"{name}: {entry['tokens']:,} tokens to be read of {len(source.train):,}, {entry['epochs']:.2f} epochs"
    if short := check_documents(config, stream):
        yield Finding("warning", "data", short)
    validation_batches(sources, data.sequence_length, config.evaluation.max_tokens, data.micro_batch_size)


def _open_sources(name: str, tokenizer: TextTokenizer) -> list[TokenizedSource] | None:
    """The tokens of a folder or of a mixture; None where the mixture is not in the cache yet."""
    if Path(name).is_dir() and name != EMBEDDED.name:
        return open_tokens(Path(name), tokenizer=tokenizer)
    mixture = load_mixture(name)
    folder = cache_folder(mixture, tokenizer)
    with contextlib.suppress(UserError):
        return open_tokens(folder, mixture, tokenizer)
    return None


def _job(config: TrainConfig) -> Iterator[str | Finding]:
    """How large the job is: memory, disk, and tokens."""
    model, data, reference = networks.read_network_config(Path(config.model)), config.data, expected_reference(config)
    with torch.device("meta"):
        network = MoHLlamaForCausalLM(model)
        base = sum(weight.numel() for weight in network.parameters())
        student = networks.trainable(config, network)
    make_budget(config, network, torch.device("cpu"))
    weights = sum(weight.numel() for weight in student.parameters())
    trained = sum(weight.numel() for weight in networks.trained_weights(student).values())
    teaches = config.objective.has_teacher and reference is not None
    # With a frozen base the student itself is the reference (`networks.make_teacher`).
    copied = base if teaches and not (config.is_base_frozen and reference.own) else 0
    teacher = copied * networks.reference_dtype(config).itemsize
    yield (
        f"on each process {4 * weights / _GIB:.2f} GiB of weights, {teacher / _GIB:.2f} of the teacher, "
        f"{4 * trained / _GIB:.2f} of gradients and {8 * trained / _GIB:.2f} of optimizer state, activations not "
        "included; ZeRO and FSDP2 divide them"
    )
    place, count = _existing(Path(config.output_dir)), config.checkpoint.save_total_limit + 1
    free = shutil.disk_usage(place).free
    text = f"each checkpoint takes {12 * trained / _GIB:.2f} GiB, and {count} are there at a time"
    enough = "ok" if free > 12 * trained * count + 4 * weights else "warning"  # and the model
    yield Finding(enough, "job", f"{text}; {free / _GIB:.1f} GiB are free in {place}")
    yield (
        f"{config.max_steps} steps x {data.batch_size} sequences x {data.sequence_length} tokens = "
        f"{config.max_steps * config.tokens_per_step:,} tokens"
    )
