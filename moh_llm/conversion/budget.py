"""One budget spent over the layers: which of its fits each of them takes."""

import math
from collections.abc import Mapping, Sequence

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

    Budgets are even, or the uneven ones of least estimated KL.
    """
    shared, active = shared_and_active(plan, base)
    heads, layers = base.num_attention_heads, base.num_hidden_layers
    budgets = [active // layers] * layers
    shared_heads = [list(range(shared))] * layers
    never_on_heads: list[list[int]] = []
    fits: list[RoutingFit] = []
    if calibrated:
        shared_heads = [layer.shared_heads for layer in calibrated]
        if plan.uneven:
            budgets = [heads - drops for drops in allocate([c.costs for c in calibrated], heads * layers - active)]
        if all(layer.fits for layer in calibrated):
            fits = [layer.fit_for(heads - budget) for layer, budget in zip(calibrated, budgets, strict=True)]
    if fits:
        shared_heads, never_on_heads = [fit.shared_heads for fit in fits], [fit.never_on_heads for fit in fits]
    return build_config(base, plan, shared_heads, budgets, never_on_heads), fits


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
