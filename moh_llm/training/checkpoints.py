"""Checkpoints of a run: written under a temporary name, proved by hashes, found again by themselves.

    OUTPUT/checkpoints/step-000010/model.safetensors      the weights that are trained, float32
                                   optimizer.safetensors  AdamW's two moments of each
                                   checkpoint.json        step, updates, seconds, tokens read, hash of each file

They are whole tensors, however training is distributed (see `moh_llm.training.gathering`), so a run
can go on with another number of processes or another way of distributing. Data and generators need
no file: both follow from the step's number.
"""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from moh_llm.errors import UserError
from moh_llm.files import new_folder, write_json
from moh_llm.records.run import CheckpointRecord
from moh_llm.training.config import CheckpointConfig
from moh_llm.training.gathering import gathered_moments, gathered_weights, scatter_state
from moh_llm.training.runs import find_fault, mark_files

RECORD, WEIGHTS, MOMENTS = "checkpoint.json", "model.safetensors", "optimizer.safetensors"


def checkpoint_folder(checkpoints: Path, step: int) -> Path:
    """Where the checkpoint made after ``step`` steps lies."""
    return checkpoints / f"step-{step:06d}"


def save_checkpoint(
    checkpoints: Path,
    step: int,
    facts: dict[str, Any],
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    weights: Mapping[str, torch.Tensor],
    keep: CheckpointConfig,
) -> Path:
    """Write the state after ``step`` steps, then remove all but the ``keep_last`` newest and the milestones.

    All processes take part; one writes. A failure on the way (a full disk, a kill) leaves the
    earlier checkpoints as they were.
    """
    folder = checkpoint_folder(checkpoints, step)
    tensors = {
        WEIGHTS: gathered_weights(accelerator, weights),
        MOMENTS: gathered_moments(accelerator, model, optimizer, weights),
    }
    if accelerator.is_main_process:
        with new_folder(folder, overwrite=True) as temporary:
            try:
                for name, content in tensors.items():
                    save_file(content, temporary / name)
            except SafetensorError as error:  # how it reports a full disk
                reason = " ".join(str(error).split())[:200]
                raise UserError(f"cannot write {folder}: {reason}; earlier checkpoints are untouched") from error
            files = mark_files(temporary)
            write_json(temporary / RECORD, {"step": step, **facts, "files": files})
        _remove_old(checkpoints, step, keep)
    accelerator.wait_for_everyone()
    return folder


def _remove_old(checkpoints: Path, step: int, keep: CheckpointConfig) -> None:
    # Later steps than this one can only be checkpoints that were found broken at the last start.
    steps = sorted(_steps(checkpoints))
    kept = [other for other in steps if other <= step][-keep.keep_last :]
    if keep.milestone_every:
        kept += [other for other in steps if other <= step and other % keep.milestone_every == 0]
    for other in steps:
        if other not in kept:
            shutil.rmtree(checkpoint_folder(checkpoints, other), ignore_errors=True)


def newest_checkpoint(checkpoints: Path, say: Callable[[str], None]) -> tuple[Path, dict[str, Any]] | None:
    """The newest complete checkpoint and its record, or None.

    Leftovers of an interrupted save are removed; a checkpoint that is incomplete or whose bytes
    are not those that were written is passed over. ``say`` gets one line for each, with the reason.
    """
    if not checkpoints.is_dir():
        return None
    for leftover in sorted(checkpoints.glob(".step-*")):
        say(f"removed {leftover.name}: its writing was interrupted")
        shutil.rmtree(leftover, ignore_errors=True)
    for step in sorted(_steps(checkpoints), reverse=True):
        folder = checkpoint_folder(checkpoints, step)
        fault = _fault(folder, step)
        if fault is None:
            return folder, CheckpointRecord.read(folder / RECORD).content()
        say(f"skipped checkpoint {folder}: {fault}")
    return None


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
    saved, moments = load_file(folder / WEIGHTS), load_file(folder / MOMENTS)
    if different := saved.keys() ^ weights.keys():
        raise UserError(f"{folder} is of another model: {sorted(different)[0]} is on one side only; use a new --output")
    updates = CheckpointRecord.read(folder / RECORD).updates
    scatter_state(accelerator, model, optimizer, weights, saved, moments, updates)
    return updates


def _steps(checkpoints: Path) -> list[int]:
    numbers = [path.name.removeprefix("step-") for path in checkpoints.glob("step-*") if path.is_dir()]
    return [int(number) for number in numbers if number.isdigit()]


def _fault(folder: Path, step: int) -> str | None:
    """Why a checkpoint cannot be used, None where it can."""
    try:
        record = CheckpointRecord.read(folder / RECORD)
    except UserError as error:
        return str(error)
    if absent := {WEIGHTS, MOMENTS} - record.files.keys():
        return f"{RECORD} names no {sorted(absent)[0]}"
    if record.step != step:
        return f"{RECORD} names step {record.step}"
    return find_fault(folder, record.content()["files"])
