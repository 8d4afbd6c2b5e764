"""AdamW, its parameter groups and rates, and head budgets.

Rates and budgets are functions of the step alone, so that a resumed run needs no state of them.
"""

import math
from collections.abc import Sequence

import torch

from moh_llm.records.tensors import is_routing_weight
from moh_llm.training.config import TrainConfig
from moh_llm.training.networks import full_shape, trained_weights
from moh_llm.training.shared_heads import BETAS, LOGITS, rate_of_logits

WARMUP_FROM = 1e-5  # learning rate of the first step of warm-up


def is_decayed(name: str, weight: torch.nn.Parameter) -> bool:
    """Whether weight decay acts on a parameter: on matrices, and never on biases and norms, whatever their shape.

    Only the last parts of a name count, since wrappers (DDP, FSDP, peft) insert others before and between.
    """
    *modules, kind = name.split(".")
    if kind == "bias" or any(module.endswith("norm") for module in modules):
        return False
    return len(full_shape(weight)) >= 2


def make_optimizer(network: torch.nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW over groups by kind (base, router, logits of shared heads), decayed or not (see `is_decayed`)."""
    groups: dict[tuple[str, bool], list[torch.nn.Parameter]] = {}
    for name, weight in trained_weights(network).items():
        kind = "router" if is_routing_weight(name) else "base"
        kind = "shared_heads" if name.endswith(LOGITS) else kind
        groups.setdefault((kind, is_decayed(name, weight)), []).append(weight)
    settings = config.optimizer
    return torch.optim.AdamW(
        [
            {
                "params": weights,
                "kind": kind,
                "weight_decay": settings.weight_decay if decayed else 0.0,
                "betas": BETAS if kind == "shared_heads" else settings.betas,
            }
            for (kind, decayed), weights in sorted(groups.items(), key=lambda item: item[0])
        ],
        lr=settings.learning_rate,
        fused=True,  # one pass over weights, gradients and moments: a fifth of the time on CPU
    )


def set_learning_rates(optimizer: torch.optim.Optimizer, config: TrainConfig, step: int) -> dict[str, float]:
    """Give every group the rate of the step after ``step`` steps.

    Returns:
        ``learning_rate`` of the base's weights or adapters and ``router_learning_rate`` of routers and fallbacks, where
        such weights are trained.
    """
    rate, router_rate = learning_rates(config, step)
    rates = {"base": rate, "router": router_rate}
    if (learned := config.shared_heads) is not None:
        rates["shared_heads"] = rate_of_logits(step, learned.steps, learned.learning_rate)
    for group in optimizer.param_groups:
        group["lr"] = rates[group["kind"]]
    names = {"base": "learning_rate", "router": "router_learning_rate"}
    trained = {group["kind"] for group in optimizer.param_groups}
    return {name: rates[kind] for kind, name in names.items() if kind in trained}


def warmup_cosine(step: int, warmup: int, total: int, start: float, highest: float, final: float) -> float:
    """Linear warm-up from ``start`` to ``highest``, then a half cosine down to ``final``.

    Args:
        step: optimiser steps already made, 0 to ``total`` - 1.
        warmup: steps of warm-up; step 0 uses exactly ``start``, step ``warmup`` exactly ``highest``.
        total: optimiser steps of the run; the last one uses exactly ``final``, provided that at
            least two steps follow the warm-up.
    """
    if step < warmup:
        return start + (highest - start) * step / warmup
    decay_steps = total - 1 - warmup
    if decay_steps < 1:
        return highest
    progress = min((step - warmup) / decay_steps, 1.0)
    return final + (highest - final) * 0.5 * (1 + math.cos(math.pi * progress))


def learning_rates(config: TrainConfig, step: int) -> tuple[float, float]:
    """Learning rates (of the base's weights, of routers and fallbacks) of the step after ``step`` steps.

    Both follow `warmup_cosine`; the routers' is scaled by the ratio of the two highest rates.
    """
    highest = config.optimizer.learning_rate
    rate = warmup_cosine(
        step,
        config.schedule.warmup_steps,
        config.max_steps,
        min(WARMUP_FROM, highest),
        highest,
        config.schedule.final_learning_rate,
    )
    router_highest = config.optimizer.router_learning_rate
    return rate, rate if router_highest is None else router_highest * (rate / highest)


def annealed_heads(budgets: Sequence[int], heads: int, step: int, anneal_steps: int, group_size: int = 1) -> list[int]:
    """Active heads of each layer in the step after ``step`` steps.

    The number falls linearly from all heads, with which the model is its base, to the layer's budget, which
    step ``anneal_steps`` is the first to use.

    Args:
        budgets: active heads per layer in the end.
        heads: query heads of a layer.
        step: optimiser steps already made.
        anneal_steps: length of the fall; 0: the budgets hold from the start.
        group_size: heads that are switched together; a layer falls by whole groups.
    """
    if step >= anneal_steps:
        return list(budgets)
    return [heads - (heads - budget) // group_size * step // anneal_steps * group_size for budget in budgets]
