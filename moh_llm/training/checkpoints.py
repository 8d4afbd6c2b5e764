"""Checkpoints of a run, verified by hashes, and the models of its milestones.

    OUTPUT/checkpoints/step-000010/model.safetensors      the weights that are trained, float32
                                   optimizer.safetensors  AdamW's two moments of each
                                   checkpoint.json        step, updates, seconds, tokens read, hash of each file
    OUTPUT/milestones/step-000100/model/     the model after 100 steps, to be used like any other
                                  run.json   the run's record up to that step
                                  log.jsonl  its log up to that step

Checkpoints hold full tensors for every strategy (see `moh_llm.training.full_tensors`), so a run can resume with another
number of processes or another strategy. Data and random generators need no file: both follow from the step's number.
A milestone reads as a run that ended there, so a card or a report shows what held then.
"""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerBase

from moh_llm.errors import UserError
from moh_llm.files import new_folder, write_json
from moh_llm.records.run import CheckpointRecord
from moh_llm.training import networks
from moh_llm.training.config import CheckpointConfig, TrainConfig
from moh_llm.training.full_tensors import full_moments, full_weights, scatter_state
from moh_llm.training.parallel import loading_full_models
from moh_llm.training.reference import StartingPoint
from moh_llm.training.runs import Run, find_fault, mark_files

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
    """Write the state after ``step`` steps, then remove all but the ``save_total_limit`` newest and the milestones.

    All processes take part; one writes. A failure on the way (a full disk, a kill) leaves the
    earlier checkpoints as they were.
    """
    folder = checkpoint_folder(checkpoints, step)
    tensors = {
        WEIGHTS: full_weights(accelerator, weights),
        MOMENTS: full_moments(accelerator, model, optimizer, weights),
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
    kept = [other for other in steps if other <= step][-keep.save_total_limit :]
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
        raise UserError(f"{folder} is of another model: {sorted(different)[0]} is only in one; name a new --output_dir")
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


def saved_milestones(run: Run) -> list[Path]:
    """The folders of the milestones that a run has saved so far, in the order of their steps."""
    return sorted(run.milestones.glob("step-*"))


def keep_milestone(
    config: TrainConfig,
    run: Run,
    accelerator: Accelerator,
    tokenizer: PreTrainedTokenizerBase,
    starting_point: StartingPoint,
    on_milestone: Callable[[Path], None],
    step: int,
    checkpoint: Path,
) -> None:
    """Save the model of a checkpoint, if the recipe asks for it, and call ``on_milestone`` with its folder.

    The main process does it alone, since the weights lie whole in the checkpoint; the others wait in their next step.

    Args:
        config, run, accelerator, tokenizer, starting_point: of the run, whose log ends with that step.
        on_milestone: see `moh_llm.training.loop.train`.
        step: how many steps were made.
        checkpoint: the folder of the checkpoint after them.

    Raises:
        UserError: the disk refuses, or ``config.model`` can no longer be read.
    """
    asked = config.hub is not None and config.hub.milestones and step % config.checkpoint.milestone_every == 0
    if not (asked and accelerator.is_main_process):
        return
    state = CheckpointRecord.read(checkpoint / RECORD)
    facts = {"steps": step, "tokens": step * config.tokens_per_step, "seconds": state.seconds}
    folder = run.milestones / checkpoint.name
    with new_folder(folder, overwrite=True) as temporary:
        with loading_full_models(accelerator):
            weights = load_file(checkpoint / "model.safetensors")
            networks.save_network(config, weights, tokenizer, temporary / "model", starting_point, step)
        write_json(temporary / "run.json", run.record | facts | {"data_read": state.data})
        shutil.copyfile(run.folder / "log.jsonl", temporary / "log.jsonl")
    on_milestone(folder)
