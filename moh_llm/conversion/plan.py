"""The head plan: how many heads each layer has on, which of its fits that takes, and the converted model's config."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig

from moh_llm.conversion.base import moh_fields
from moh_llm.conversion.config import PlanOptions
from moh_llm.conversion.fit import RoutingFit
from moh_llm.errors import UserError
from moh_llm.flops import local_keys
from moh_llm.modeling import MoHLlamaConfig


def shared_and_active(plan: PlanOptions, base: PreTrainedConfig) -> tuple[int, int]:
    """Shared heads per layer, and active heads of all layers together.

    By default three quarters of the heads are active. Where the fit finds the shared heads, their number is zero here;
    with other fallbacks an eighth is shared, at least one head, and none of fewer than eight key-value groups. The
    paper's preset shares half and adds a quarter. Even budgets are rounded to whole heads per layer, uneven ones to
    whole heads of the model.

    Raises:
        UserError: counts that no layer can follow.
    """
    heads, layers, group_size = base.num_attention_heads, base.num_hidden_layers, plan.heads_per_group(base)
    groups, active = heads // group_size, plan.num_active_heads
    if active is not None and plan.keys is not None:
        raise UserError("give --num-active-heads or --keys, not both")
    shared = plan.num_shared_heads
    if shared is None and plan.mixes:
        shared = 0
    elif shared is None and plan.preset == "paper":
        shared = heads // 2 // group_size * group_size
    elif shared is None:
        least = 1 if group_size == 1 else 0
        shared = min(max(least, groups // 8), (active or heads) // group_size) * group_size
    elif shared > heads:
        raise UserError(f"impossible head plan: num_shared_heads={shared} is above num_attention_heads={heads}")
    low = shared if plan.head_fallback == "local" else max(group_size, shared)
    if active is not None:
        total = active * layers
    elif plan.keys is not None:
        mean = _share_of_heads(plan) * heads / group_size + 1e-9
        total = group_size * (math.floor(mean * layers) if plan.uneven else math.floor(mean) * layers)
    elif plan.preset == "paper":
        total = max(low, (heads // 2 + heads // 4) // group_size * group_size) * layers
    else:
        mean = 0.75 * heads / group_size
        total = group_size * (round(mean * layers) if plan.uneven else math.floor(mean + 1e-9) * layers)
        total = max(total, low * layers)  # three quarters of few heads may be fewer than are shared
    if not low * layers <= total <= heads * layers:
        raise UserError(
            f"impossible head plan: num_active_heads={total / layers:g} must lie between "
            f"{'num_shared_heads=' if shared > 0 else ''}{low} and num_attention_heads={heads}"
        )
    # Uneven budgets need only add up to whole groups.
    if shared % group_size or (total if plan.uneven else total // layers) % group_size:
        raise UserError(
            f"impossible head plan: with --routing-granularity kv_group num_shared_heads={shared} and "
            f"num_active_heads={total / layers:g} must be multiples of {group_size}, the heads of a group"
        )
    return shared, total


def _share_of_heads(plan: PlanOptions) -> float:
    """The share of the heads that is on where `plan.keys` of the base's keys are read.

    Raises:
        UserError: fewer keys than first tokens and local fallbacks read with all heads off.
    """
    if plan.keys is None or plan.head_fallback != "local":
        return plan.keys or 0.0
    least = local_keys(plan.context, plan.window + plan.local_sinks, plan.all_heads_until)
    if plan.keys < least:
        raise UserError(
            f"--keys {plan.keys} is less than the {least:.3f} that a document's first {plan.all_heads_until} tokens, "
            f"which have all heads on, and fallbacks read at {plan.context} tokens; ask for more keys, or lower "
            "--local-start or --local-window"
        )
    return (plan.keys - least) / (1 - least)


def drops_to_fit(plan: PlanOptions, base: PreTrainedConfig) -> list[int]:
    """The numbers of dropped heads for which a layer is fitted: with uneven budgets all that it may get.

    Unless the fit finds the shared heads, a layer that drops none gets the router of one dropped head, so that its
    budget can be lowered later.
    """
    shared, active = shared_and_active(plan, base)
    heads, group_size = base.num_attention_heads, plan.heads_per_group(base)
    most = heads - (shared if plan.head_fallback == "local" else max(group_size, shared))
    least = 0 if plan.mixes else group_size
    if not plan.fits or not most:
        return []
    if plan.uneven:
        return list(range(least, most + 1, group_size))
    return [max(least, heads - active // base.num_hidden_layers)]


def plan_layers(
    plan: PlanOptions,
    base: PreTrainedConfig,
    calibrated: Sequence[Mapping[int, RoutingFit]] | None,
    build: Callable[..., Any] | None = None,
) -> tuple[Any, list[RoutingFit]]:
    """The converted model's config, and the fit that each layer takes of those by number of drops.

    `build` has the arguments of `build_config`, which makes the config of a text model and is the default.
    """
    build = build or build_config
    shared, active = shared_and_active(plan, base)
    heads, layers = base.num_attention_heads, base.num_hidden_layers
    budgets = [active // layers] * layers
    if calibrated is None:
        return build(base, plan, [list(range(shared))] * layers, budgets), []
    if plan.uneven:
        costs = [{drops: fit.cost for drops, fit in fits.items()} for fits in calibrated]
        budgets = [heads - drops for drops in allocate(costs, heads * layers - active)]
    chosen = [fits.get(heads - budget) or fits[min(fits)] for fits, budget in zip(calibrated, budgets, strict=True)]
    shared_heads, never_on = [fit.shared_heads for fit in chosen], [fit.never_on_heads for fit in chosen]
    return build(base, plan, shared_heads, budgets, never_on), chosen


def routing_tensors(fits: Sequence[RoutingFit], path: str = "model.layers.{}.self_attn") -> dict[str, torch.Tensor]:
    """The fitted tensors of all layers by their names in the model, where a layer's attention is at `path`."""
    return {
        f"{path.format(layer)}.{name}": tensor.cpu().contiguous()
        for layer, fit in enumerate(fits)
        for name, tensor in fit.tensors.items()
    }


def allocate(costs: Sequence[Mapping[int, float]], total: int) -> list[int]:
    """How many heads each layer drops, so that `total` are dropped at the least summed cost.

    Exact, by dynamic programming over layers: costs need not be convex in the number of drops. `costs` has for each
    layer the cost by number of drops; dropping none costs nothing and need not be named.

    Raises:
        UserError: the layers together cannot drop `total` heads.
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


def head_fields(
    plan: PlanOptions, shared_heads: Sequence[Sequence[int]], active_heads: Sequence[int]
) -> dict[str, Any]:
    """The fields of the head plan that text models and models of images have."""
    shared, active = [len(ids) for ids in shared_heads], list(active_heads)
    first = all(list(ids) == list(range(len(ids))) for ids in shared_heads)
    return {
        "num_shared_heads": shared[0] if len(set(shared)) == 1 else shared,
        "num_active_heads": active[0] if len(set(active)) == 1 else active,
        "shared_heads": None if first else [list(ids) for ids in shared_heads],
        "router_type": plan.router_type,
        "router_score": "quantized",
        "head_fallback": plan.head_fallback,
    }


def build_config(
    base: PreTrainedConfig,
    plan: PlanOptions,
    shared_heads: Sequence[Sequence[int]],
    active_heads: Sequence[int],
    never_on_heads: Sequence[Sequence[int]] = (),
) -> MoHLlamaConfig:
    """The converted model's config: the base's fields plus the head plan, per layer."""
    try:
        built = MoHLlamaConfig(
            **moh_fields(base),
            **head_fields(plan, shared_heads, active_heads),
            routing_granularity=plan.routing_granularity,
            local_window=plan.window,
            local_sinks=plan.local_sinks,
            local_start=plan.start if plan.head_fallback == "local" else 0,
            never_on_heads=[list(ids) for ids in never_on_heads] if any(never_on_heads) else None,
        )
    except ValueError as error:
        raise UserError(f"impossible head plan: {' '.join(str(error).split())}") from error
    built.architectures = ["MoHLlamaForCausalLM"]
    return built
