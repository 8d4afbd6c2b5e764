"""Weights and AdamW's moments as full tensors, whatever the strategy, and back.

So a checkpoint is the same files for one process, DDP, ZeRO-1, 2, 3 and FSDP2, and each can go on
from any other's. The price: every tensor passes in full through every process, one at a time, and
one process writes all of them, 12 bytes for each trained weight.
"""

from collections.abc import Mapping

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType

MOMENTS = ("exp_avg", "exp_avg_sq")


def full_weights(accelerator: Accelerator, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The trained weights, float32 on the CPU; empty but on the main process. All processes must take part."""
    found = {}
    for name, weight in weights.items():
        if _by_deepspeed(accelerator):
            from deepspeed.utils import safe_get_full_fp32_param

            whole = safe_get_full_fp32_param(weight)
        else:
            whole = _full(weight.detach())
        if accelerator.is_main_process:
            found[name] = whole.float().cpu().contiguous().clone()
    return found


def full_moments(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    weights: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """AdamW's moments as ``MOMENT.NAME``, likewise."""
    found = {}
    if _by_deepspeed(accelerator):
        _link_states(model)
    for name, weight in weights.items():
        for moment in MOMENTS:
            if _by_deepspeed(accelerator):
                from deepspeed.utils import safe_get_full_optimizer_state

                whole = safe_get_full_optimizer_state(weight, moment)
            else:
                whole = _full(optimizer.state[weight][moment])
            if accelerator.is_main_process:
                found[f"{moment}.{name}"] = whole.float().cpu().contiguous().clone()
    return found


@torch.no_grad()
def scatter_state(
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
            for moment in MOMENTS:
                _set_in_zero(weight, moments[f"{moment}.{name}"].to(accelerator.device), moment)
        return
    _reshard(model)
    for name, weight in weights.items():
        weight.copy_(_like(saved[name], weight))
        state = {moment: _like(moments[f"{moment}.{name}"], weight) for moment in MOMENTS}
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
        moments = {moment: torch.zeros_like(flat) for moment in MOMENTS}
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


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _like(whole: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A full tensor distributed as a weight is."""
    if not hasattr(weight, "full_tensor"):
        return whole.to(weight.device)
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole.to(weight.device), weight.device_mesh, weight.placements)
