"""Checkpoints of a run: written while training goes on, complete or not there at all, verified by hashes.

    OUTPUT/checkpoints/step-000010/model-00001-of-00004.safetensors      the trained weights, float32
                                   optimizer-00001-of-00004.safetensors  AdamW's two moments, as MOMENT.NAME
                                   checkpoint.json                       step, updates, seconds, tokens read, hashes

A single process writes `model.safetensors` and `optimizer.safetensors`. The files hold each tensor once, whole or in
slices. Their headers have the offsets of the slices in the format of `torch.distributed.checkpoint`, whose reader gives
a process of any strategy the slices that it holds. Under FSDP2 each process writes its slices, under DDP and ZeRO an
equal share of the whole tensors. Data and random generators need no file: both follow from the step's number.

Files are written by `save_file` and not by torch's `HuggingFaceStorageWriter`, with `dcp.async_save` or without: that
one serialises a file in memory, which takes twice its size and stops all threads, training among them (1.9 s for
384 MiB), and it does not hash what it writes.
"""

import functools
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import DTensor

from moh_llm.errors import UserError
from moh_llm.files import share_files
from moh_llm.records.run import CheckpointRecord
from moh_llm.records.seal import FileMark, find_fault, mark_files
from moh_llm.training.config import CheckpointConfig
from moh_llm.training.runs import steps_of
from moh_llm.training.zero import ADAMW_MOMENTS, by_deepspeed, gather_state, scatter_state

CHECKPOINT_RECORD = "checkpoint.json"
T = TypeVar("T")

# torch warns where a single process reads.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def checkpoint_folder(checkpoints: Path, step: int) -> Path:
    """The folder of the checkpoint after ``step`` steps."""
    return checkpoints / f"step-{step:06d}"


# ---- writing


class Part(NamedTuple):
    """What a process writes of a tensor, and its offset in each dimension of the whole."""

    tensor: torch.Tensor
    offsets: tuple[int, ...]


class CheckpointWriter:
    """Writes a run's checkpoints, one at a time, in a thread. All processes call the same methods.

    The thread copies the tensors to memory of its own while the next step computes its gradient, then writes and hashes
    them. The folder gets its name when the files of all processes and `checkpoint.json` are in it. ``weights`` are the
    trained parameters by name, ``keep`` says which checkpoints are kept.

    Attributes:
        copied: done when the weights may change.
        written: done when the checkpoint is complete, or cannot be written; `wait` says why.
    """

    def __init__(
        self,
        checkpoints: Path,
        accelerator: Accelerator,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        weights: Mapping[str, torch.Tensor],
        keep: CheckpointConfig,
    ):
        self._checkpoints, self._accelerator, self._keep = checkpoints, accelerator, keep
        self._model, self._optimizer, self._weights = model, optimizer, weights
        # A process group of its own, since training communicates at the same time.
        self._group = torch.distributed.new_group(backend="gloo") if accelerator.num_processes > 1 else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.copied: Future = Future()
        self.written: Future = Future()
        for future in (self.copied, self.written):
            future.set_result(None)  # there is nothing to wait for yet

    def begin(self, step: int, facts: dict[str, Any]) -> Path:
        """Begin to write the state after ``step`` steps, once the previous checkpoint is complete; return the folder.

        ``facts`` are fields of the checkpoint's record.
        """
        self.wait()
        # What ZeRO gathers is a copy.
        self.copied = self._thread.submit(copy_to_cpu, self._parts(), copy=not by_deepspeed(self._accelerator))
        self.written = self._thread.submit(self._write, step, facts, self.copied)
        return checkpoint_folder(self._checkpoints, step)

    def wait(self) -> None:
        """Wait until the checkpoint that was begun is complete.

        Raises:
            UserError: the disk refuses (on the main process; the others exit). Earlier checkpoints are as they were.
        """
        try:
            self.written.result()
        except UserError as error:
            if self._accelerator.is_main_process:
                raise
            raise SystemExit(2) from error

    def close(self) -> None:
        """Finish the checkpoint that was begun, also where training ends in an error."""
        self._thread.shutdown()

    def _parts(self) -> dict[str, Part]:
        """What this process writes: the slices that it holds, and its share of the tensors that all processes have."""
        parts, sizes = {}, [0] * self._accelerator.num_processes
        for name, tensor in self._tensors():
            if isinstance(tensor, DTensor):
                local, (chunk,) = tensor.to_local(), tensor.__create_chunk_list__()
                if local.numel():  # a process may hold no row of a short tensor
                    parts[name] = Part(local, tuple(chunk.offsets))
                continue
            owner = sizes.index(min(sizes))
            sizes[owner] += tensor.numel()
            if owner == self._accelerator.process_index:
                parts[name] = Part(tensor, (0,) * tensor.ndim)
        return parts

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        if by_deepspeed(self._accelerator):
            yield from gather_state(self._model, self._weights)
            return
        for name, weight in self._weights.items():
            tensor, state = weight.detach(), self._optimizer.state[weight]
            yield name, tensor
            if not weight.requires_grad:  # an average of weights
                continue
            for moment in ADAMW_MOMENTS:  # a weight that never had a gradient has none
                yield f"{moment}.{name}", state[moment] if moment in state else torch.zeros_like(tensor)

    def _write(self, step: int, facts: dict[str, Any], copied: "Future[dict[str, Part]]") -> None:
        folder = checkpoint_folder(self._checkpoints, step)
        temporary = folder.with_name(f".{folder.name}.tmp")

        def complete() -> None:
            if not self._accelerator.is_main_process:
                return
            files = {name: mark for marks in marks_of_all for name, mark in marks.items()}
            CheckpointRecord(step=step, **facts, files=files).write(temporary / CHECKPOINT_RECORD)
            share_files(temporary)
            shutil.rmtree(folder, ignore_errors=True)  # an incomplete one, which a resumed run passed over
            os.replace(temporary, folder)
            self._remove_old(step)

        try:
            marks_of_all = self._on_all(folder, lambda: self._write_files(temporary, copied.result()))
            self._on_all(folder, complete)
        finally:
            if self._accelerator.is_main_process:
                shutil.rmtree(temporary, ignore_errors=True)

    def _write_files(self, folder: Path, parts: dict[str, Part]) -> dict[str, FileMark]:
        """Write and hash this process's files. ``parts`` is emptied, to free the memory of the first file early."""
        folder.mkdir(parents=True, exist_ok=True)
        rank, world = self._accelerator.process_index + 1, self._accelerator.num_processes
        suffix = f"-{rank:05d}-of-{world:05d}" if world > 1 else ""
        files: dict[str, list[str]] = {}
        for name in parts:
            kind = "optimizer" if name.startswith(ADAMW_MOMENTS) else "model"
            files.setdefault(f"{kind}{suffix}.safetensors", []).append(name)
        for file, names in files.items():
            offsets = {name: {"saved_offsets": parts[name].offsets} for name in names}
            header = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
            save_file({name: parts.pop(name).tensor for name in names}, folder / file, header)
        return mark_files(folder, files)

    def _on_all(self, folder: Path, action: Callable[[], T]) -> list[T]:
        """The results of an action on all processes. If it fails on one, all raise, so that none waits for another."""
        result, failure = None, None
        try:
            result = action()
        except Exception as error:
            failure = error
        # safetensors has the reason of the operating system in its text.
        reason = failure and (getattr(failure, "strerror", None) or " ".join(str(failure).split())[:200])
        found: list[Any] = [(result, reason)]
        if self._group is not None:
            found *= self._accelerator.num_processes
            torch.distributed.all_gather_object(found, (result, reason), group=self._group)
        if failure is not None and not isinstance(failure, (OSError, SafetensorError, UserError)):
            raise failure
        if reasons := [reason for _, reason in found if reason is not None]:
            raise UserError(f"cannot write {folder}: {reasons[0]}; earlier checkpoints are untouched") from failure
        return [result for result, _ in found]

    def _remove_old(self, step: int) -> None:
        """Remove all but the newest and the milestones. Later steps than ``step`` are of checkpoints found damaged."""
        steps, every = sorted(steps_of(self._checkpoints)), self._keep.milestone_every
        kept = [other for other in steps if other <= step][-self._keep.save_total_limit :]
        for other in steps:
            is_milestone = every > 0 and other <= step and other % every == 0
            if other not in kept and not is_milestone:
                shutil.rmtree(checkpoint_folder(self._checkpoints, other), ignore_errors=True)


def copy_to_cpu(parts: Mapping[str, Part], copy: bool = True) -> dict[str, Part]:
    """The parts in float32 on the CPU; with ``copy`` none shares memory with what was given."""
    return {
        name: Part(part.tensor.to("cpu", torch.float32, copy=copy).contiguous(), part.offsets)
        for name, part in parts.items()
    }


# ---- reading


def newest_checkpoint(checkpoints: Path, say: Callable[[str], None]) -> tuple[Path, CheckpointRecord] | None:
    """The newest complete checkpoint and its record, or None.

    Leftovers of an interrupted save are removed. A checkpoint that is incomplete or damaged is passed over; ``say``
    gets one line for each, with the reason.
    """
    if not checkpoints.is_dir():
        return None
    for leftover in sorted(checkpoints.glob(".step-*")):
        say(f"removed {leftover.name}: its writing was interrupted")
        shutil.rmtree(leftover, ignore_errors=True)
    for step in sorted(steps_of(checkpoints), reverse=True):
        folder = checkpoint_folder(checkpoints, step)
        try:
            return folder, verified_record(folder)
        except UserError as error:
            say(f"skipped checkpoint {folder}: {error}")
    return None


def verified_record(folder: Path) -> CheckpointRecord:
    """The record of a checkpoint whose files have the recorded hashes. Raises UserError where they do not."""
    record = CheckpointRecord.read(folder / CHECKPOINT_RECORD)
    fault = find_fault(folder, record.files)
    if checkpoint_folder(folder.parent, record.step) != folder:
        fault = f"{CHECKPOINT_RECORD} names step {record.step}"
    if unnamed := {path.name for path in folder.glob("*.safetensors")} - record.files.keys():
        fault = f"{CHECKPOINT_RECORD} names no {min(unnamed)}"
    if fault is not None:
        raise UserError(fault)
    return record


def load_checkpoint(
    folder: Path,
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    weights: Mapping[str, torch.Tensor],
) -> int:
    """Overwrite weights and moments by those of a complete checkpoint; return the number of updates of the weights.

    Raises UserError if the weights have other names, so that the checkpoint is of another model.
    """
    # Each process reads what it holds of the tensors; no other one takes part.
    fill = functools.partial(dcp.load, storage_reader=_open_reader(folder, weights), no_dist=True)
    updates = CheckpointRecord.read(folder / CHECKPOINT_RECORD).updates
    if by_deepspeed(accelerator):
        scatter_state(model, weights, fill, updates, accelerator.device)
        return updates
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # the outermost weights stay gathered after scoring, and would be used as they were
    tensors = {name: weight.detach() for name, weight in weights.items()}
    for name, weight in ((name, weight) for name, weight in weights.items() if weight.requires_grad):
        state = {moment: torch.empty_like(weight.detach()) for moment in ADAMW_MOMENTS}
        tensors |= {f"{moment}.{name}": tensor for moment, tensor in state.items()}
        optimizer.state[weight] = {"step": torch.tensor(float(updates))} | state
    fill(tensors)
    return updates


def read_weights(folder: Path, weights: Mapping[str, torch.Tensor]) -> None:
    """Fill a whole model's trained weights from a checkpoint. Raises UserError where it is of another model."""
    tensors = {name: weight.detach() for name, weight in weights.items()}
    dcp.load(tensors, storage_reader=_open_reader(folder, weights), no_dist=True)


class _Reader(dcp.HuggingFaceStorageReader):
    """Reads the headers once, though ZeRO's weights are loaded one at a time."""

    _metadata: Metadata | None = None

    def read_metadata(self) -> Metadata:
        self._metadata = self._metadata or super().read_metadata()
        return self._metadata


def _open_reader(folder: Path, weights: Mapping[str, torch.Tensor]) -> _Reader:
    reader = _Reader(str(folder))
    saved = {name for name in reader.read_metadata().state_dict_metadata if not name.startswith(ADAMW_MOMENTS)}
    if different := saved ^ weights.keys():
        raise UserError(f"{folder} is of another model: {sorted(different)[0]} is only in one; name a new --output-dir")
    return reader
