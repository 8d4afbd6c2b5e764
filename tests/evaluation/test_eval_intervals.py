"""The 95 % intervals of scores, differences and shares hold the truth, and are never of width zero."""

import math
import re

import numpy as np
import pytest
from records import make_report
from simulated import covers, pairs

from moh_llm.evaluation import statistics
from moh_llm.evaluation.margin import plain_mean
from moh_llm.evaluation.tables import score_note, score_table
from moh_llm.records.evaluation import Figures, Value


def figures_of(model: np.ndarray, base: np.ndarray, chance: float = 0.0) -> Figures:
    """What a report says of one benchmark's scores."""
    scores = {"model": {"A": model.tolist()}, "base": {"A": base.tolist()}}
    return make_report(scores, full=len(model), chances={"A": chance}).benchmarks[0].scores["model"]


def share_held(items: int, base: float, differing: float, lost: float, draws: int = 150) -> dict[str, float]:
    """In which share of the draws the interval of a figure, and 1.96 standard errors, hold the truth."""
    draw = np.random.default_rng(0)
    held = {"difference": 0.0, "share": 0.0, "1.96 errors": 0.0}
    for _ in range(draws):
        model, of_base, truth = pairs(draw, items, base, differing, lost)
        found = figures_of(model, of_base)
        low, high = (found.delta.value + side * 1.96 * found.delta.stderr for side in (-1, 1))
        held["difference"] += covers(found.delta.interval, 100 * (truth - base)) / draws
        held["share"] += covers(found.recovery.interval, 100 * truth / base) / draws
        held["1.96 errors"] += covers([low, high], 100 * (truth - base)) / draws
    return held


@pytest.mark.parametrize(("items", "differing"), [(30, 0.02), (30, 0.1), (100, 0.02)])
def test_intervals_hold_where_few_items_differ(items: int, differing: float) -> None:
    held = share_held(items, 0.7, differing, lost=1.0)
    assert held["difference"] > 0.93 and held["share"] > 0.93
    assert held["1.96 errors"] < 0.9  # what they were before


def test_no_item_that_differs_is_no_certainty() -> None:
    same = np.array([1.0] * 20 + [0.0] * 10)
    found = figures_of(same, same)
    assert found.delta.stderr == 0  # as of lm-eval
    low, high = found.delta.interval
    # By hand: an item more on which only the model is right, and one on which only the base is.
    half = 100 * 2.0452 * math.sqrt(2 / 31 / 32)
    assert (low, high) == pytest.approx((-half, half), abs=0.01)
    low, high = found.recovery.interval
    assert low < 95 < 100 < 105 < high
    all_right = figures_of(np.ones(30), np.ones(30))
    for interval in (all_right.interval, all_right.delta.interval, all_right.recovery.interval):
        assert interval[1] - interval[0] > 4
    report = make_report({label: {"A": [1.0] * 30, "B": [0.0, 1.0] * 15} for label in ("model", "base")}, full=30)
    average = report.average.scores["model"]
    assert all(high - low > 4 for low, high in (average.interval, average.delta.interval, average.recovery.interval))


def test_a_table_has_the_interval_where_no_item_differs() -> None:
    """In place of an error of 0, and within what a score can be; the legend of † only where a cell has it."""
    same, half = [1.0, 0.0] * 15, [0.0] * 30
    scores = {"base": {"A": same, "B": same}, "model": {"A": same, "B": half}}
    report = make_report(scores, full=30)
    table, note = score_table(report), score_note(report)
    cells = [row[-4:] for row in table.rows]
    assert cells[0][1] == "+0.0 (-9.2 to +9.2)" and "±" in cells[0][0]
    assert re.fullmatch(r"0\.0 \(0\.0 to \d+\.\d\)", cells[1][0]) and "±" in cells[1][1] and "±" in cells[2][1]
    assert "does not mean certainty" in note and "†" not in note
    few = make_report({"base": {"A": [1.0] + [0.0] * 9}, "model": {"A": [1.0] * 10}}, full=10)
    assert any("†" in cell for row in score_table(few).rows for cell in row) and "†" in score_note(few)


def test_intervals_of_scores_that_are_no_proportions() -> None:
    """Of scores between 0 and 1, such as F1, whose differences are mostly 0 and have a long tail."""
    draw, held = np.random.default_rng(1), 0
    for _ in range(300):
        base = draw.beta(2, 1, 60)
        model = np.where(draw.random(60) < 0.1, base * draw.random(60), base)
        held += covers(figures_of(model, base).delta.interval, -100 * 0.1 * 0.5 * 2 / 3)
    assert held / 300 > 0.93


def test_a_group_counts_its_tasks_apart() -> None:
    """Tasks that differ in level are no spread; two more items are of the group, not of each task."""
    strata = [[1.0] * 40 + [0.0] * 10, [1.0] * 10 + [0.0] * 40]
    low, high = statistics.mean_interval(strata, 0, 1)
    error = statistics.standard_error(strata)
    assert (high - low) / 2 == pytest.approx(statistics.student_quantile(0.95, 98) * error, rel=0.03)
    assert statistics.mean_interval([*strata, [1.0]], 0, 1) is None and statistics.mean_interval([[1.0]], 0, 1) is None


def test_the_ratio_by_hand() -> None:
    """Fieller's ends r: there the difference m - r b is as far from 0 as its own interval is wide."""
    halves = (0.08, 0.07, 0.04)
    covariance = (halves[0] ** 2 + halves[1] ** 2 - halves[2] ** 2) / 2
    for end in statistics.ratio_interval(0.5, 0.6, *halves):
        half = math.sqrt(halves[0] ** 2 - 2 * end * covariance + end**2 * halves[1] ** 2)
        assert abs(0.5 - end * 0.6) == pytest.approx(half)
    assert statistics.ratio_interval(0.5, 0.07, *halves) is None


def test_the_average_is_of_independent_benchmarks() -> None:
    values = [Value(value=10.0, stderr=1.0, interval=[7.0, 14.0]), Value(value=20.0, stderr=1.0, interval=[16.0, 23.0])]
    assert plain_mean(values).interval == pytest.approx([15 - 2.5, 15 + 2.5])
    assert plain_mean([*values, Value(value=1.0, stderr=None)]).interval is None
