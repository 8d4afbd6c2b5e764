"""The head plan: how many heads are shared and active, which are shared, and how tokens choose."""

import math
from collections.abc import Iterable, Sequence

from transformers import PreTrainedConfig

from moh_llm.conversion.base import moh_fields
from moh_llm.conversion.config import PlanOptions
from moh_llm.errors import UserError
from moh_llm.flops import local_keys
from moh_llm.modeling import MoHLlamaConfig

_MOST_FITS = 16  # numbers of dropped heads that a layer is fitted for


def shared_and_active(options: PlanOptions, config: PreTrainedConfig) -> tuple[int, int]:
    """Shared heads per layer, and active heads of all layers together.

    Defaults: the paper's preset shares half of the heads and adds a quarter, each rounded down.
    Otherwise three quarters are active and an eighth is shared, at least one: a fitted router
    chooses better than a fixed set, see docs/conversion.md. An even budget is rounded down to
    whole heads per layer, an uneven one to the nearest whole head of the model. Where key-value
    groups are routed, read "group" for "head", and below eight of them none is shared: with few to
    choose from a fixed one costs more. With local fallbacks, and without a router, the fit finds the
    shared heads, and zero stands for them here. `keys` is rounded down.

    Raises:
        UserError: counts that no layer can follow.
    """
    heads, layers, group_size = config.num_attention_heads, config.num_hidden_layers, options.heads_per_group(config)
    shared, active = options.num_shared_heads, options.num_active_heads
    if active is not None and options.keys is not None:
        raise UserError("give --num-active-heads or --keys, not both")
    if shared is not None and not 0 <= shared <= heads:
        raise UserError(
            f"impossible head plan: num_shared_heads={shared} must lie between 0 and num_attention_heads={heads}"
        )
    paper = options.preset == "paper"
    if shared is None and options.mixes:
        shared = 0
    elif shared is None:
        least = 1 if group_size == 1 else 0
        groups = (
            heads // 2 // group_size
            if paper
            else min(max(least, heads // group_size // 8), (active or heads) // group_size)
        )
        shared = groups * group_size
    low = shared if options.head_fallback == "local" else max(group_size, shared)
    if active is not None:
        total = active * layers
    elif options.keys is not None:
        seen = options.window + options.local_sinks
        fallback = (
            local_keys(options.context, seen, options.all_heads_until) if options.head_fallback == "local" else 0.0
        )
        mean = (options.keys - fallback) / (1 - fallback) * heads / group_size + 1e-9
        total = group_size * (math.floor(mean * layers) if options.uneven else math.floor(mean) * layers)
        if options.keys < fallback:
            raise UserError(
                f"--keys {options.keys} is less than the {fallback:.3f} that a document's first "
                f"{options.all_heads_until} tokens, which have all heads on, and fallbacks read at {options.context} "
                "tokens; ask for more keys, or lower --local-start or --local-window"
            )
    elif paper:
        total = max(low, (heads // 2 + heads // 4) // group_size * group_size) * layers
    else:
        mean = 0.75 * heads / group_size
        total = group_size * (round(mean * layers) if options.uneven else math.floor(mean + 1e-9) * layers)
        total = max(total, low * layers)  # three quarters of few heads may be fewer than are shared
    if not low * layers <= total <= heads * layers:
        raise UserError(
            f"impossible head plan: num_active_heads={total / layers:g} must lie between "
            f"{'num_shared_heads=' if shared > 0 else ''}{low} and num_attention_heads={heads}"
        )
    if shared % group_size:
        raise _parts_of_groups("num_shared_heads", shared, group_size, range(0, heads + 1, group_size))
    copies = layers if options.uneven else 1  # uneven budgets need only add up to whole groups
    if total * copies // layers % group_size:
        whole = [n for n in range(low, heads + 1) if n * copies % group_size == 0]
        raise _parts_of_groups("num_active_heads", total // layers, group_size, whole)
    return shared, total


def _parts_of_groups(name: str, count: int, group_size: int, whole: Iterable[int]) -> UserError:
    return UserError(
        f"impossible head plan: {name}={count} splits key-value groups; with --routing-granularity kv_group it "
        f"must be a multiple of {group_size} (heads per group): {', '.join(map(str, whole))}"
    )


def drops_to_fit(options: PlanOptions, config: PreTrainedConfig) -> list[int]:
    """The numbers of dropped heads for which a layer is fitted.

    With uneven budgets all that a layer may get. Where a fit does not choose the shared heads they are
    thinned out if there are many (others take the fit of the next lower number), and a layer that drops
    none still gets a router, that of one dropped head, so that its budget can be lowered.
    """
    shared, active = shared_and_active(options, config)
    heads, group_size = config.num_attention_heads, options.heads_per_group(config)
    least = shared if options.head_fallback == "local" else max(group_size, shared)
    most = (heads - least) // group_size
    if not options.fits or not most:
        return []
    if options.mixes:
        even = heads - active // config.num_hidden_layers
        return list(range(0, heads - least + 1, group_size)) if options.uneven else [even]
    if not options.uneven:
        return [max(group_size, heads - active // config.num_hidden_layers)]
    step = math.ceil(most / _MOST_FITS)
    return [drops * group_size for drops in sorted({1, *range(step, most + 1, step), most})]


def build_config(
    config: PreTrainedConfig,
    options: PlanOptions,
    shared_heads: Sequence[Sequence[int]],
    active_heads: Sequence[int],
    never_on_heads: Sequence[Sequence[int]] = (),
) -> MoHLlamaConfig:
    """The converted model's config: the base's fields plus the head plan, per layer."""
    shared, active = [len(ids) for ids in shared_heads], list(active_heads)
    first = all(list(ids) == list(range(len(ids))) for ids in shared_heads)
    try:
        built = MoHLlamaConfig(
            **moh_fields(config),
            num_shared_heads=shared[0] if len(set(shared)) == 1 else shared,
            num_active_heads=active[0] if len(set(active)) == 1 else active,
            shared_heads=None if first else [list(ids) for ids in shared_heads],
            router_type=options.router_type,
            router_score="quantized",
            routing_granularity=options.routing_granularity,
            head_fallback=options.head_fallback,
            local_window=options.window,
            local_sinks=options.local_sinks,
            local_start=options.start if options.head_fallback == "local" else 0,
            never_on_heads=[list(ids) for ids in never_on_heads] if any(never_on_heads) else None,
        )
    except ValueError as error:
        raise UserError(f"impossible head plan: {' '.join(str(error).split())}") from error
    built.architectures = ["MoHLlamaForCausalLM"]
    return built
