"""One budget spent over the layers: which of its fits each of them takes."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from transformers import PreTrainedConfig

from moh_llm.conversion.calibrate import LayerCalibration
from moh_llm.conversion.fit import RoutingFit
from moh_llm.conversion.plan import PlanOptions, build_config, shared_and_active
from moh_llm.errors import UserError
from moh_llm.modeling import MoHLlamaConfig


def plan_layers(
    plan: PlanOptions, base: PreTrainedConfig, calibrated: Sequence[LayerCalibration] | None
) -> tuple[MoHLlamaConfig, list[RoutingFit]]:
    """The converted model's config, and what its layers take of the fits, nothing where nothing is fitted.

    Budgets are even, or the uneven ones of least estimated KL: of heads, or of the time of attention.
    """
    shared, active = shared_and_active(plan, base)
    heads, layers = base.num_attention_heads, base.num_hidden_layers
    budgets = [active // layers] * layers
    shared_heads = [list(range(shared))] * layers
    local_heads: list[list[int]] = []
    fits: list[RoutingFit] = []
    if calibrated and plan.attention_time is not None:
        plans = [[(fit.time, fit.cost) for fit in layer.by_time if fit.time is not None] for layer in calibrated]
        chosen = spend_time(plans, plan.attention_time)
        fits = [layer.by_time[place] for layer, place in zip(calibrated, chosen, strict=True)]
        budgets = [heads - fit.dropped for fit in fits]
    elif calibrated:
        shared_heads = [layer.shared_heads for layer in calibrated]
        if plan.uneven:
            budgets = [heads - drops for drops in allocate([c.costs for c in calibrated], heads * layers - active)]
        if all(layer.fits for layer in calibrated):
            fits = [layer.fit_for(heads - budget) for layer, budget in zip(calibrated, budgets, strict=True)]
    if fits:
        shared_heads, local_heads = [fit.shared_heads for fit in fits], [fit.local_heads for fit in fits]
    return build_config(base, plan, shared_heads, budgets, local_heads), fits


def mean_time(fits: Sequence[RoutingFit]) -> float:
    """Share of the time of the base's attention that layers with these fits take, as it was measured for each kind."""
    return round(sum(fit.time or 0.0 for fit in fits) / len(fits), 4)


def routing_tensors(fits: Sequence[RoutingFit]) -> dict[str, torch.Tensor]:
    """The fitted tensors of the layers by their names in the model."""
    return {
        f"model.layers.{layer}.self_attn.{name}": tensor.cpu().contiguous()
        for layer, fit in enumerate(fits)
        for name, tensor in fit.tensors.items()
    }


def allocate(costs: Sequence[Mapping[int, float]], total: int) -> list[int]:
    """How many heads each layer drops, so that `total` are dropped at the least summed cost.

    Exact, by dynamic programming over layers: costs need not be convex in the number of drops.

    Args:
        costs: per layer, number of drops -> cost; dropping none costs nothing and need not be named.
        total: drops in all layers together.

    Raises:
        UserError: the layers together cannot drop so many.
    """
    best = [0.0] + [math.inf] * total
    choices = []
    for layer in costs:
        options = {0: 0.0, **layer}
        after, choice = [math.inf] * (total + 1), [0] * (total + 1)
        for spent in range(total + 1):
            for drops, cost in options.items():
                if drops <= spent and best[spent - drops] + cost < after[spent]:
                    after[spent], choice[spent] = best[spent - drops] + cost, drops
        best = after
        choices.append(choice)
    if math.isinf(best[total]):
        most = sum(max(layer, default=0) for layer in costs)
        raise UserError(f"impossible head plan: {total} heads cannot be dropped, the layers can drop {most}")
    plan = []
    for choice in reversed(choices):
        plan.append(choice[total])
        total -= choice[total]
    return plan[::-1]


def spend_time(layers: Sequence[Sequence[tuple[float, float]]], share: float) -> list[int]:
    """Which of its plans each layer takes, for a mean time of `share` at most and the least summed cost.

    Args:
        layers: per layer (time, cost) of its plans, by falling time and with a rising cost for each time that is saved.
        share: mean time of the layers.

    Raises:
        UserError: the fastest plans take longer.
    """
    chosen, left = [0] * len(layers), sum(plans[0][0] for plans in layers) - share * len(layers)
    steps = sorted(
        ((fast[1] - slow[1]) / (slow[0] - fast[0]), layer, place, slow[0] - fast[0])
        for layer, plans in enumerate(layers)
        for place, (slow, fast) in enumerate(pairwise(plans), 1)
    )
    for _, layer, place, saved in steps:
        if left <= 1e-9:
            break
        chosen[layer], left = place, left - saved
    if left > 1e-9:
        least = sum(plans[-1][0] for plans in layers) / len(layers)
        raise UserError(
            f"--attention-time {share} is less than the {least:.3f} that attention takes here with the fewest heads; "
            "ask for more time, or lower --local-start or --local-window"
        )
    return chosen
