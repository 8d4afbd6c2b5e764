"""Checkpoints of a run, in parts by process and verified by hashes.

    OUTPUT/checkpoints/step-000010/model-00001-of-00004.safetensors      of the trained weights, float32
                                   optimizer-00001-of-00004.safetensors  of AdamW's two moments, as MOMENT.NAME
                                   checkpoint.json                       step, updates, seconds, tokens read, hashes

One process writes `model.safetensors` and `optimizer.safetensors`. The union of the files holds each tensor once, whole
or in slices, whose offsets are in the files' headers, as `torch.distributed.checkpoint` has them in safetensors
files: its reader gives any process of any strategy the slices that it holds. FSDP2's processes write the slices that
they hold; under DDP and ZeRO each writes whole tensors, an equal share. Data and random generators need no file: both
follow from the step's number. `moh_llm.training.checkpoint_writer` writes them.
"""

import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from moh_llm.errors import UserError
from moh_llm.records.run import CheckpointRecord
from moh_llm.records.seal import find_fault
from moh_llm.training.runs import Run, steps_of
from moh_llm.training.zero import ADAMW_MOMENTS, by_deepspeed, scatter_state

RECORD = "checkpoint.json"

# What it says where one process reads or writes alone.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def checkpoint_folder(checkpoints: Path, step: int) -> Path:
    """Where the checkpoint made after ``step`` steps lies."""
    return checkpoints / f"step-{step:06d}"


class _Reader(dcp.HuggingFaceStorageReader):
    """Reads the headers once. Safetensors files with whole tensors, as all checkpoints had once, are read, too."""

    _metadata: Metadata | None = None

    def read_metadata(self) -> Metadata:
        """Names, sizes and places of all tensors."""
        self._metadata = self._metadata or super().read_metadata()
        return self._metadata


def newest_checkpoint(checkpoints: Path, say: Callable[[str], None]) -> tuple[Path, CheckpointRecord] | None:
    """The newest complete checkpoint and its record, or None.

    Leftovers of an interrupted save are removed; a checkpoint that is incomplete or whose bytes
    are not those that were written is passed over. ``say`` gets one line for each, with the reason.
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
    """The record of a checkpoint, whose bytes are those that were written. Raises UserError where they are not."""
    record = CheckpointRecord.read(folder / RECORD)
    fault = find_fault(folder, record.files)
    if checkpoint_folder(folder.parent, record.step) != folder:
        fault = f"{RECORD} names step {record.step}"
    if unnamed := {path.name for path in folder.glob("*.safetensors")} - record.files.keys():
        fault = f"{RECORD} names no {min(unnamed)}"
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
    """Put a checkpoint's weights and moments into place; return how many updates they have seen.

    Args:
        folder: a checkpoint that `newest_checkpoint` gave.
        accelerator, model, optimizer: what was prepared.
        weights: the tensors to overwrite, of the same names and shapes as when it was saved.

    Raises:
        UserError: the names of the weights differ, so the checkpoint is of another model.
    """
    reader = _open_of(folder, weights)
    updates = CheckpointRecord.read(folder / RECORD).updates
    if by_deepspeed(accelerator):
        scatter_state(model, weights, lambda tensors: _fill(tensors, reader), updates, accelerator.device)
        return updates
    _reshard(model)
    tensors = {name: weight.detach() for name, weight in weights.items()}
    for name, weight in weights.items():
        state = {moment: torch.empty_like(weight.detach()) for moment in ADAMW_MOMENTS}
        tensors |= {f"{moment}.{name}": tensor for moment, tensor in state.items()}
        optimizer.state[weight] = {"step": torch.tensor(float(updates))} | state
    _fill(tensors, reader)
    return updates


def read_weights(folder: Path, weights: Mapping[str, torch.Tensor]) -> None:
    """Fill a whole model's trained weights from a checkpoint. Raises UserError where it is of another model."""
    _fill({name: weight.detach() for name, weight in weights.items()}, _open_of(folder, weights))


def _open_of(folder: Path, weights: Mapping[str, torch.Tensor]) -> _Reader:
    reader = _Reader(str(folder))
    saved = {name for name in reader.read_metadata().state_dict_metadata if not name.startswith(ADAMW_MOMENTS)}
    if different := saved ^ weights.keys():
        raise UserError(f"{folder} is of another model: {sorted(different)[0]} is only in one; name a new --output_dir")
    return reader


def _fill(tensors: dict[str, torch.Tensor], reader: _Reader) -> None:
    """Read what this process holds of the tensors; no other process need take part."""
    dcp.load(tensors, storage_reader=reader, no_dist=True)


def _reshard(model: torch.nn.Module) -> None:
    """FSDP2 keeps the outermost weights gathered after a forward pass without a backward one, and would use them."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def is_to_be_finished_anew(run: Run, say: Callable[[str], None]) -> bool:
    """Whether a run that its record calls finished has to be finished anew, because its model is damaged.

    Raises:
        UserError: and no checkpoint is left to do it from.
    """
    fault = f"{run.folder / 'run.json'} does not say which files it has"
    if run.record.model_files is not None:
        fault = find_fault(run.model, run.record.model_files)
    if fault is None:
        return False
    if newest_checkpoint(run.checkpoints, say) is None:
        raise UserError(
            f"{run.model} is damaged ({fault}), and {run.checkpoints} holds no checkpoint to make it from; "
            "restore it, or pass --overwrite to start anew"
        )
    say(f"{run.model} is damaged ({fault}); it is made anew from the last checkpoint")
    return True
