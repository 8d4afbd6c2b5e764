"""Budgets against a search of all assignments."""

import itertools
import random

import pytest

from moh_llm.conversion.plan import allocate
from moh_llm.errors import UserError


def cost_of(costs, plan):
    return sum(layer[drops] if drops else 0.0 for layer, drops in zip(costs, plan, strict=True))


@pytest.mark.parametrize("seed", range(8))
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


def test_a_jump_is_taken_where_single_steps_mislead():
    assert allocate([{1: 1.0, 2: 5.0, 3: 5.5}, {1: 2.0, 2: 4.0, 3: 6.0}], 3) == [1, 2]
    assert allocate([{1: 3.0, 2: 3.1, 3: 3.2}, {1: 1.0, 2: 3.0, 3: 9.0}], 3) == [3, 0]


def test_nothing_to_drop():
    assert allocate([{1: -1.0}, {}], 0) == [0, 0]


def test_too_many_to_drop_says_how_many_can_be():
    with pytest.raises(UserError, match="6 heads cannot be dropped, the layers can drop 5"):
        allocate([{1: 0.1, 3: 0.2}, {2: 0.1}, {}], 6)
