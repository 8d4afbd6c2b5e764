"""Head plans from options."""

import itertools
import random

import pytest
from transformers import LlamaConfig

from moh_llm.conversion.plan import PlanOptions, allocate, build_config, drops_to_fit, shared_and_active
from moh_llm.errors import UserError


def llama(heads=4, layers=30, **fields):
    return LlamaConfig(num_attention_heads=heads, num_hidden_layers=layers, hidden_size=8 * heads, **fields)


def by_value(**options):
    return PlanOptions(fallback="value", **options)


def by_group(**options):
    return by_value(routing_granularity="kv_group", **options)


@pytest.mark.parametrize(
    ("options", "heads", "groups", "expected"),
    [
        (by_value(), 32, 32, (4, 720)),
        (by_value(), 9, 9, (1, 202)),  # 202.5, half to even
        (by_value(keys=0.77), 9, 9, (1, 207)),  # 207.9
        (by_value(budgets="even", keys=15 / 22), 22, 22, (2, 450)),  # the product is a little below 15
        (PlanOptions(preset="paper"), 32, 32, (16, 720)),
        (PlanOptions(preset="paper", router="linear", fallback="local"), 9, 9, (4, 180)),
        (PlanOptions(), 9, 9, (0, 202)),
        (PlanOptions(router="linear", num_shared_heads=2), 9, 9, (2, 202)),
        (by_group(), 9, 3, (0, 204)),  # 67.5 groups, half to even
        (by_group(budgets="even", keys=2 / 3), 9, 3, (0, 180)),
        (PlanOptions(preset="paper", routing_granularity="kv_group"), 28, 4, (14, 630)),
    ],
)
def test_shared_and_active(options, heads, groups, expected):
    assert shared_and_active(options, llama(heads, num_key_value_heads=groups)) == expected


@pytest.mark.parametrize(
    ("context", "given", "window"),
    [(8192, None, 256), (4096, None, 256), (2048, None, 128), (512, None, 32), (8, None, 1), (512, 100, 100)],
)
def test_the_window_of_local_fallbacks_follows_the_context(context, given, window):
    """256 tokens, and below 4,096 tokens of context a sixteenth of it; the config has it."""
    options = PlanOptions(context=context, local_window=given)
    config = build_config(llama(4, 2), options, [[], []], [2, 2])
    assert options.window == config.local_window == window


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_shared_heads": 1}, "num_shared_heads=1 and num_active_heads=6.8 must be multiples of 3"),
        ({"num_active_heads": 7, "budgets": "even"}, "num_active_heads=7 must be multiples of 3"),
    ],
)
def test_split_groups_are_refused(options, message):
    with pytest.raises(UserError) as error:
        shared_and_active(by_group(**options), llama(9, num_key_value_heads=3))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_an_uneven_total_of_whole_groups_need_not_be_even():
    """Two layers of 9 heads with 0.84 of them on: 15.1, which is 5 groups, and no mean of whole heads."""
    assert shared_and_active(by_group(keys=0.84), llama(9, 2, num_key_value_heads=3)) == (0, 15)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (PlanOptions(), ("threshold", True, "local", True)),
        (by_value(), ("linear", True, "value", True)),
        (PlanOptions(fallback="none", budgets="even"), ("linear", False, "none", True)),
        (PlanOptions(preset="paper"), ("query_norm", False, "none", False)),
        (PlanOptions(preset="paper", router="linear", fallback="value"), ("linear", False, "value", True)),
    ],
)
def test_what_follows_from_the_router(options, expected):
    assert (options.router_type, options.uneven, options.head_fallback, options.needs_calibration) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_active_heads": 99}, "num_active_heads=99 must lie between 0 and num_attention_heads=4"),
        ({"num_shared_heads": 3, "num_active_heads": 2}, "num_active_heads=2 must lie between num_shared_heads=3 and"),
        ({"num_shared_heads": 99}, "num_shared_heads=99 is above num_attention_heads=4"),
        ({"num_shared_heads": -1}, "num_shared_heads=-1 must be at least 0"),
        ({"keys": 1.5}, "keys=1.5 must be at most 1"),
        ({"keys": 0.1, "context": 2048, "local_window": 256}, "which have all heads on, and fallbacks read at 2048"),
        ({"router": "threshold", "fallback": "value"}, "fitted with local fallbacks; add --fallback local"),
        ({"router": "none", "num_shared_heads": 1}, "drop --num-shared-heads"),
        ({"keys": 0.5, "num_active_heads": 2}, "--num-active-heads or --keys, not both"),
        ({"router": "query_norm", "budgets": "uneven"}, "fitted together with the linear router; drop query_norm"),
    ],
)
def test_impossible_options_are_named(options, message):
    with pytest.raises(UserError) as error:
        shared_and_active(PlanOptions(**options), llama())
    assert message in str(error.value)


def test_drops_of_even_and_empty_plans():
    assert drops_to_fit(PlanOptions(), llama(9)) == [*range(10)]
    assert drops_to_fit(PlanOptions(budgets="even"), llama(32)) == [8]
    assert drops_to_fit(by_value(), llama(32)) == [*range(1, 29)]
    assert drops_to_fit(by_value(budgets="even", num_active_heads=32), llama(32)) == [1]
    assert drops_to_fit(PlanOptions(preset="paper"), llama(32)) == []
    assert drops_to_fit(by_value(num_shared_heads=4), llama(4)) == []
    assert drops_to_fit(by_group(), llama(9, num_key_value_heads=3)) == [3, 6]


def test_config_holds_ids_and_budgets_of_each_layer():
    base = llama(4, 2, rope_parameters={"rope_type": "default", "rope_theta": 7.0}, num_key_value_heads=2)
    config = build_config(base, by_value(shared="importance"), [[1, 3], [0]], [2, 4])
    assert (config.shared_heads, config.num_shared_heads, config.num_active_heads) == ([[1, 3], [0]], [2, 1], [2, 4])
    assert (config.router_type, config.router_score, config.head_fallback) == ("linear", "quantized", "value")
    assert (config.hidden_size, config.num_key_value_heads, config.rope_parameters["rope_theta"]) == (32, 2, 7.0)
    assert config.architectures == ["MoHLlamaForCausalLM"]

    with pytest.raises(UserError, match=r"impossible head plan: .*num_active_heads=5 must lie between"):
        build_config(base, PlanOptions(), [[0], [0]], [4, 5])


# ---- budgets against a search of all assignments


def cost_of(costs, plan):
    return sum(layer[drops] if drops else 0.0 for layer, drops in zip(costs, plan, strict=True))


@pytest.mark.parametrize("seed", range(4))
def test_plan_is_the_cheapest_of_all(seed):
    chance = random.Random(seed)
    # Neither convex nor increasing, and not every number of drops is on offer.
    costs = [
        {drops: chance.choice([0.0, chance.random()]) for drops in chance.sample(range(1, 7), chance.randint(0, 4))}
        for _ in range(4)
    ]
    by_total = {}
    for plan in itertools.product(*([0, *layer] for layer in costs)):
        by_total.setdefault(sum(plan), []).append(cost_of(costs, plan))
    most = sum(max(layer, default=0) for layer in costs)
    for total in range(most + 2):
        if total in by_total:
            plan = allocate(costs, total)
            assert sum(plan) == total and all(n == 0 or n in layer for n, layer in zip(plan, costs, strict=True))
            assert cost_of(costs, plan) == pytest.approx(min(by_total[total]))
        else:
            with pytest.raises(UserError, match=f"impossible head plan: {total} heads cannot be dropped"):
                allocate(costs, total)
