"""Learning rate and head budgets as pure functions of the step, so that a resumed run needs no state of them."""

import math
from collections.abc import Sequence

from moh_llm.training.config import TrainConfig


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
    """Learning rates (of the base's weights, of the routers) of the step after ``step`` steps.

    Both follow `warmup_cosine`; the routers' is scaled by the ratio of the two highest rates.
    """
    highest = config.optimizer.learning_rate
    rate = warmup_cosine(
        step,
        config.schedule.warmup_steps,
        config.max_steps,
        config.schedule.start_learning_rate,
        highest,
        config.schedule.final_learning_rate,
    )
    router_highest = config.optimizer.router_learning_rate
    return rate, rate if router_highest is None else router_highest * (rate / highest)


def annealed_heads(budgets: Sequence[int], heads: int, step: int, anneal_steps: int, group_size: int = 1) -> list[int]:
    """Active heads of each layer in the step after ``step`` steps.

    They fall evenly from all of them, where the model is its base, to the layer's budget, which
    step ``anneal_steps`` uses first.

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
