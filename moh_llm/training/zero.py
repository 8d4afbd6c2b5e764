"""Weights and AdamW's moments under DeepSpeed's ZeRO, as whole tensors.

`accelerator.save_state` keeps DeepSpeed's own files, which the same strategy on the same number of processes reads, or,
once converted to universal checkpoints, DeepSpeed alone. Ours are read by every strategy, so tensors are gathered and
set by DeepSpeed's documented utilities. It has none to make AdamW's state before the first step. What `_make_states`
and `_link_states` use for that is private; seen on 0.19.8, tested by `tests/training/test_resharding.py`.
"""

from collections.abc import Callable, Iterator, Mapping

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType

ADAMW_MOMENTS = ("exp_avg", "exp_avg_sq")


def by_deepspeed(accelerator: Accelerator) -> bool:
    """Whether DeepSpeed holds the weights."""
    return accelerator.distributed_type == DistributedType.DEEPSPEED


def gather_state(model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Each trained weight as ``NAME`` and its moments as ``MOMENT.NAME``: copies in float32 on the CPU, one at a time.

    All processes must take part, to the end.
    """
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    _link_states(model)
    for name, weight in weights.items():
        yield name, safe_get_full_fp32_param(weight).cpu()
        for moment in ADAMW_MOMENTS:
            yield f"{moment}.{name}", safe_get_full_optimizer_state(weight, moment).cpu()


@torch.no_grad()
def scatter_state(
    model: torch.nn.Module,
    weights: Mapping[str, torch.Tensor],
    read: Callable[[dict[str, torch.Tensor]], None],
    updates: int,
    device: torch.device,
) -> None:
    """Set weights and moments, one weight at a time.

    ``read`` fills whole tensors, float32 on the CPU, with the names of `gather_state`. AdamW counts ``updates``.
    """
    import deepspeed
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

    _make_states(model, updates)
    for name, weight in weights.items():
        shape = getattr(weight, "ds_shape", weight.shape)
        whole = {key: torch.empty(shape) for key in (name, *(f"{moment}.{name}" for moment in ADAMW_MOMENTS))}
        read(whole)
        value, *moments = (tensor.to(device) for tensor in whole.values())
        is_divided = hasattr(weight, "ds_id")  # ZeRO-3
        if is_divided:
            _set_parts(weight, value, moments)
        else:
            safe_set_full_fp32_param(weight, value)
            for moment, state in zip(ADAMW_MOMENTS, moments, strict=True):
                safe_set_full_optimizer_state(weight, state, moment)
        # That was the optimizer's copy; the forward pass has its own.
        with deepspeed.zero.GatheredParameters([weight], modifier_rank=0, enabled=is_divided):
            weight.copy_(value)


def _set_parts(weight: torch.Tensor, value: torch.Tensor, moments: list[torch.Tensor]) -> None:
    """Set a process's parts under ZeRO-3, where `safe_set_full_*` fail for weights that do not divide evenly."""
    from deepspeed.utils import safe_get_local_fp32_param, safe_set_local_fp32_param, safe_set_local_optimizer_state

    length, rank = safe_get_local_fp32_param(weight).numel(), torch.distributed.get_rank()

    def part(whole: torch.Tensor) -> torch.Tensor:
        mine = whole.flatten()[length * rank : length * (rank + 1)]
        return torch.nn.functional.pad(mine, (0, length - mine.numel()))

    safe_set_local_fp32_param(weight, part(value))
    for moment, state in zip(ADAMW_MOMENTS, moments, strict=True):
        safe_set_local_optimizer_state(weight, part(state), moment)


def _make_states(model: torch.nn.Module, updates: int) -> None:
    """Give ZeRO's flat partitions the state that AdamW makes in its first step."""
    zero = model.optimizer
    is_stage_3 = hasattr(zero, "fp32_partitioned_groups_flat")
    for flat in zero.fp32_partitioned_groups_flat if is_stage_3 else zero.single_partition_of_fp32_groups:
        moments = {moment: torch.zeros_like(flat) for moment in ADAMW_MOMENTS}
        zero.optimizer.state[flat] = {"step": torch.tensor(float(updates))} | moments
    _link_states(model)


def _link_states(model: torch.nn.Module) -> None:
    """Make ZeRO-1 and 2 find the states of all parameter groups: they look once, after the first group's step."""
    from deepspeed.utils.mixed_precision_linkage import lazy_init_hp_params_optimizer_state

    zero = model.optimizer
    groups, partitions = getattr(zero, "bit16_groups", []), getattr(zero, "single_partition_of_fp32_groups", [])
    for group, flat in zip(groups, partitions, strict=True):
        lazy_init_hp_params_optimizer_state(group, flat, zero.optimizer.state)
