import itertools
import math

import pytest

from moh_llm.training.step import learning_rates, warmup_cosine


def test_warmup_rises_from_the_start_value_to_the_highest() -> None:
    rates = [warmup_cosine(step, 4, 20, 1e-7, 1e-3, 1e-4) for step in range(5)]
    assert rates[0] == 1e-7
    assert rates[4] == 1e-3
    assert [b - a for a, b in itertools.pairwise(rates)] == pytest.approx([(1e-3 - 1e-7) / 4] * 4)


def test_cosine_ends_at_the_final_value() -> None:
    rates = [warmup_cosine(step, 4, 20, 1e-7, 1e-3, 1e-4) for step in range(4, 20)]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == pytest.approx(1e-4)
    quarter = 1e-4 + 9e-4 * 0.5 * (1 + math.cos(math.pi * 5 / 15))
    assert rates[5] == pytest.approx(quarter)


@pytest.mark.parametrize("total", [1, 2, 3])
def test_short_runs_have_a_rate_at_every_step(total: int) -> None:
    rates = [warmup_cosine(step, 1, total, 1e-5, 1e-3, 1e-4) for step in range(total)]
    assert rates == [1e-5, 1e-3, 1e-4][:total]


def test_warmup_begins_at_1e_5_or_at_a_lower_highest_rate(configure) -> None:
    assert learning_rates(configure(), 0)["learning_rate"] == 1e-5
    low = {"optimizer.learning_rate": 1e-6, "schedule.final_learning_rate": 0}
    assert [learning_rates(configure(**low), step)["learning_rate"] for step in (0, 1)] == [1e-6, 1e-6]
