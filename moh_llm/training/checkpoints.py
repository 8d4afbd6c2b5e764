"""Checkpoints of a run, verified by hashes, and the models of its milestones.

    OUTPUT/checkpoints/step-000010/model.safetensors      the weights that are trained, float32
                                   optimizer.safetensors  AdamW's two moments of each
                                   checkpoint.json        step, updates, seconds, tokens read, hash of each file
    OUTPUT/milestones/step-000100/model/     the model after 100 steps, to be used like any other
                                  run.json   the run's record up to that step
                                  log.jsonl  its log up to that step

Checkpoints hold full tensors, so that one process, DDP, ZeRO-1, 2, 3 and FSDP2 can each resume from any other's, on any
number of processes. Every tensor passes in full through every process, one at a time, and one process writes all of
them, 12 bytes for each trained weight. Data and random generators need no file: both follow from the step's number.
A milestone reads as a run that ended there, so a card or a report shows what held then.
"""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerBase

from moh_llm.errors import UserError
from moh_llm.files import new_folder
from moh_llm.records.run import CheckpointRecord
from moh_llm.training import networks
from moh_llm.training.config import CheckpointConfig, TrainConfig
from moh_llm.training.parallel import loading_full_models
from moh_llm.training.reference import StartingPoint
from moh_llm.training.runs import LOG, Run, find_fault, mark_files
from moh_llm.training.runs import RECORD as RUN_RECORD

RECORD, WEIGHTS, MOMENTS = "checkpoint.json", "model.safetensors", "optimizer.safetensors"
ADAMW_MOMENTS = ("exp_avg", "exp_avg_sq")


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
            CheckpointRecord(step=step, **facts, files=mark_files(temporary)).write(temporary / RECORD)
        _remove_old(checkpoints, step, keep)
    accelerator.wait_for_everyone()
    return folder


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
    for step in sorted(_steps(checkpoints), reverse=True):
        folder = checkpoint_folder(checkpoints, step)
        try:
            record = CheckpointRecord.read(folder / RECORD)
            fault = find_fault(folder, record.files)
            if record.step != step:
                fault = f"{RECORD} names step {record.step}"
            if absent := {WEIGHTS, MOMENTS} - record.files.keys():
                fault = f"{RECORD} names no {sorted(absent)[0]}"
        except UserError as error:
            fault = str(error)
        if fault is None:
            return folder, record
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
    _scatter_state(accelerator, model, optimizer, weights, saved, moments, updates)
    return updates


def _remove_old(checkpoints: Path, step: int, keep: CheckpointConfig) -> None:
    """Later steps than this one can only be checkpoints that were found broken at the last start."""
    steps = sorted(_steps(checkpoints))
    kept = [other for other in steps if other <= step][-keep.save_total_limit :]
    if keep.milestone_every:
        kept += [other for other in steps if other <= step and other % keep.milestone_every == 0]
    for other in steps:
        if other not in kept:
            shutil.rmtree(checkpoint_folder(checkpoints, other), ignore_errors=True)


def _steps(checkpoints: Path) -> list[int]:
    numbers = [path.name.removeprefix("step-") for path in checkpoints.glob("step-*") if path.is_dir()]
    return [int(number) for number in numbers if number.isdigit()]


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

    The main process does it alone, since the checkpoint holds full tensors; the others wait in their next step.

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
    state, folder = CheckpointRecord.read(checkpoint / RECORD), run.milestones / checkpoint.name
    with new_folder(folder, overwrite=True) as temporary:
        with loading_full_models(accelerator):
            weights = load_file(checkpoint / WEIGHTS)
            networks.save_network(config, weights, tokenizer, temporary / "model", starting_point, step)
        facts = {"steps": step, "tokens": step * config.tokens_per_step, "seconds": state.seconds}
        run.record.model_copy(update={**facts, "data_read": state.data}).write(temporary / RUN_RECORD)
        shutil.copyfile(run.folder / LOG, temporary / LOG)
    on_milestone(folder)


def full_weights(accelerator: Accelerator, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The trained weights, float32 on the CPU; empty but on the main process. All processes must take part."""
    return {
        name: tensor.float().cpu().contiguous().clone()
        for name, weight in weights.items()
        if (tensor := _gathered(accelerator, weight)) is not None
    }


def full_moments(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    weights: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """AdamW's moments as ``MOMENT.NAME``, likewise."""
    if _by_deepspeed(accelerator):
        _link_states(model)
    return {
        f"{moment}.{name}": tensor.float().cpu().contiguous().clone()
        for name, weight in weights.items()
        for moment in ADAMW_MOMENTS
        if (tensor := _gathered(accelerator, weight, optimizer, moment)) is not None
    }


def _gathered(
    accelerator: Accelerator,
    weight: torch.Tensor,
    optimizer: torch.optim.Optimizer | None = None,
    moment: str | None = None,
) -> torch.Tensor | None:
    """A full weight, or a moment of it, on the main process; None on the others."""
    if _by_deepspeed(accelerator):
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        tensor = safe_get_full_fp32_param(weight) if moment is None else safe_get_full_optimizer_state(weight, moment)
    else:
        part = weight.detach()
        if optimizer is not None:  # a weight that has had no gradient has no moments
            part = optimizer.state[weight].get(moment, torch.zeros_like(part))
        tensor = part.full_tensor() if hasattr(part, "full_tensor") else part
    return tensor if accelerator.is_main_process else None


@torch.no_grad()
def _scatter_state(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    weights: Mapping[str, torch.Tensor],
    saved: Mapping[str, torch.Tensor],
    moments: Mapping[str, torch.Tensor],
    updates: int,
) -> None:
    """Put gathered weights and moments into place.

    Args:
        accelerator, model, optimizer: what was prepared.
        weights: the trained parameters by name.
        saved, moments: what `full_weights` and `full_moments` gave, on every process.
        updates: how often the weights were updated, AdamW's own count.
    """
    if _by_deepspeed(accelerator):
        import deepspeed

        _make_states(model, updates)
        for name, weight in weights.items():
            value = saved[name].to(accelerator.device)
            _set_in_zero(weight, value, None)
            # That was the optimiser's copy; the forward pass has its own.
            with deepspeed.zero.GatheredParameters([weight], modifier_rank=0, enabled=hasattr(weight, "ds_id")):
                weight.copy_(value)
            for moment in ADAMW_MOMENTS:
                _set_in_zero(weight, moments[f"{moment}.{name}"].to(accelerator.device), moment)
        return
    _reshard(model)
    for name, weight in weights.items():
        weight.copy_(_like(saved[name], weight))
        state = {moment: _like(moments[f"{moment}.{name}"], weight) for moment in ADAMW_MOMENTS}
        optimizer.state[weight] = {"step": torch.tensor(float(updates))} | state


def _reshard(model: torch.nn.Module) -> None:
    """FSDP2 keeps the outermost weights gathered after a forward pass without a backward one, and would use them."""
    if torch.distributed.is_available():
        from torch.distributed.fsdp import FSDPModule

        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def _set_in_zero(weight: torch.Tensor, value: torch.Tensor, moment: str | None) -> None:
    """Write this process's part of the optimiser's copy of a weight, or of a moment."""
    if not hasattr(weight, "ds_id"):
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        if moment is None:
            safe_set_full_fp32_param(weight, value)
        else:
            safe_set_full_optimizer_state(weight, value, moment)
        return
    # ZeRO-3's own way fails where a weight does not divide by the processes: the last part is padded.
    zero = weight._z3_optimizer
    part, _ = zero._get_fp32_opt_state_partition(weight, release_swap_buffers=False, optim_state_key=moment)
    first = part.numel() * zero._get_param_partition_rank(weight)
    mine = value.flatten()[first : first + part.numel()]
    part[: mine.numel()].copy_(mine)


def _make_states(model: torch.nn.Module, updates: int) -> None:
    """Give ZeRO's flat partitions the states that AdamW would make at its first step."""
    zero = model.optimizer
    stage3 = hasattr(zero, "fp32_partitioned_groups_flat")
    for flat in zero.fp32_partitioned_groups_flat if stage3 else zero.single_partition_of_fp32_groups:
        moments = {moment: torch.zeros_like(flat) for moment in ADAMW_MOMENTS}
        zero.optimizer.state[flat] = {"step": torch.tensor(float(updates))} | moments
    _link_states(model)


def _link_states(model: torch.nn.Module) -> None:
    """Make ZeRO-1 and 2 look their states up anew.

    They do it once, after the first of the parameter groups was stepped, and then know of no other's.
    """
    zero = model.optimizer
    if hasattr(zero, "_lazy_init_hp_params_optimizer_state"):
        zero._hp_optimizer_states_linked = False
        zero._lazy_init_hp_params_optimizer_state()


def _by_deepspeed(accelerator: Accelerator) -> bool:
    return accelerator.distributed_type == DistributedType.DEEPSPEED


def _like(full: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A full tensor distributed as a weight is."""
    if not hasattr(weight, "full_tensor"):
        return full.to(weight.device)
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(full.to(weight.device), weight.device_mesh, weight.placements)
