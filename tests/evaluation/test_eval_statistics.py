"""Errors are lm-eval's and paired, intervals hold the truth, and shares of the base are those computed by hand."""

import math
import random

import numpy as np
import pytest
from records import make_report, page_of, verdict
from simulated import covers, pairs

from moh_llm.evaluation import statistics
from moh_llm.evaluation.tables import score_table
from moh_llm.records.evaluation import Figures, Value

EASY, HARD = [1.0, 1.0, 1.0, 1.0, 0.0] * 20, [1.0, 0.0, 0.0, 1.0, 0.0] * 20
# Of the first benchmark the model loses one item in ten: 70 and 40 of 100 against 80 and 40.
SCORES = {"base": {"Easy": EASY, "Hard": HARD}, "model": {"Easy": [0.0, *EASY[1:10]] * 10, "Hard": list(HARD)}}


@pytest.fixture
def strata() -> statistics.Strata:
    draw = random.Random(0)
    return [[float(draw.random() < 0.6) for _ in range(size)] for size in (7, 20, 3)]


def test_group_figures_equal_lm_evals(strata: statistics.Strata) -> None:
    metrics = pytest.importorskip("lm_eval.api.metrics")
    sizes = [len(values) for values in strata]
    means = [metrics.mean(values) for values in strata]
    errors = [metrics.mean_stderr(values) for values in strata]
    assert statistics.mean(strata) == metrics.aggregate_subtask_metrics(means, sizes)
    assert statistics.standard_error(strata) == pytest.approx(metrics.pooled_sample_stderr(errors, sizes), rel=1e-12)
    assert statistics.standard_error(strata[:1]) == pytest.approx(errors[0], rel=1e-12)
    mean = statistics.mean_of([Value(value=value, stderr=error) for value, error in zip(means, errors, strict=True)])
    assert mean.stderr == pytest.approx(metrics.unweighted_mean_stderr(errors), rel=1e-12)


def test_readings_of_the_same_items_are_averaged() -> None:
    assert statistics.average_readings([[1.0, 0.0], [0.5, 0.25]]) == [[0.75, 0.125]]
    with pytest.raises(ValueError, match="differ in number"):
        statistics.average_readings([[1.0], [1.0, 2.0]])


def figures_of(model: np.ndarray, base: np.ndarray, chance: float = 0.0) -> Figures:
    """A report's figures on one benchmark."""
    scores = {"model": {"A": model.tolist()}, "base": {"A": base.tolist()}}
    return make_report(scores, full=len(model), chances={"A": chance}).benchmarks[0].scores["model"]


@pytest.mark.parametrize(("items", "differing"), [(30, 0.1), (100, 0.02)])
def test_intervals_hold_the_truth_where_few_items_differ(items: int, differing: float) -> None:
    """Where 1.96 standard errors do not."""
    draw, held = np.random.default_rng(0), np.zeros(3)
    for _ in range(150):
        model, base, truth = pairs(draw, items, 0.7, differing, 1.0)
        found = figures_of(model, base)
        normal = [found.delta.value + side * 1.96 * found.delta.stderr for side in (-1, 1)]
        held += [
            covers(found.delta.interval, 100 * (truth - 0.7)),
            covers(found.recovery.interval, 100 * truth / 0.7),
            covers(normal, 100 * (truth - 0.7)),
        ]
    assert min(held[:2]) / 150 > 0.93 and held[2] / 150 < 0.9


def test_intervals_have_a_width_where_no_item_differs() -> None:
    same = np.array([1.0] * 20 + [0.0] * 10)
    found = figures_of(same, same)
    assert found.delta.stderr == 0  # as of lm-eval
    # By hand: an item more on which only the model is right, and one on which only the base is.
    half = 100 * 2.0452 * math.sqrt(2 / 31 / 32)
    assert found.delta.interval == pytest.approx([-half, half], abs=0.01)
    low, high = found.recovery.interval
    assert low < 95 < 105 < high
    all_right = figures_of(np.ones(30), np.ones(30))
    for interval in (all_right.interval, all_right.delta.interval, all_right.recovery.interval):
        assert interval[1] - interval[0] > 4


def test_tables_show_the_interval_where_no_item_differs() -> None:
    """In place of an error of 0, and none where the base's average is within errors of 0."""
    same = [1.0, 0.0] * 15
    report = make_report({"base": {"A": same}, "model": {"A": same}}, full=30)
    assert "+0.0 (-9.2 to +9.2)" in score_table(report).rows[0]
    few = make_report({"base": {"Rare": [1.0] * 3 + [0.0] * 97}, "model": {"Rare": [1.0] * 2 + [0.0] * 98}})
    recovery = few.benchmarks[0].scores["model"].recovery
    assert recovery.share == pytest.approx(200 / 3) and recovery.interval is None
    assert recovery.base_errors == pytest.approx(0.03 / math.sqrt(0.03 * 0.97 / 99))
    assert "| 66.7 † |" in page_of(few) and "† The base's score" in page_of(few) and "†" not in page_of(report)


def test_a_group_counts_its_tasks_apart() -> None:
    """Tasks that differ in level are no spread; two more items are of the group, not of each task."""
    strata = [[1.0] * 40 + [0.0] * 10, [1.0] * 10 + [0.0] * 40]
    low, high = statistics.mean_interval(strata, 0, 1)
    error = statistics.standard_error(strata)
    assert (high - low) / 2 == pytest.approx(statistics.student_quantile(0.95, 98) * error, rel=0.03)


def test_a_base_at_chance_is_named_and_left_out() -> None:
    """40 of 100 with a standard error of 4.9 includes a chance of 31, but not one of 30."""
    above = make_report(SCORES, chances={"Easy": 0.5, "Hard": 0.3})
    assert above.average.scores["model"].margin_kept.over == 2
    report = make_report(SCORES, chances={"Easy": 0.5, "Hard": 0.31})
    kept = report.average.scores["model"].margin_kept
    assert kept.over == 1 and kept.share == pytest.approx(100 * 20 / 30)
    assert report.average.scores["model"].recovery.share == pytest.approx(100 * 55 / 60)
    hard = report.benchmarks[1].scores["model"]
    assert hard.at_chance and hard.margin_kept is None
    assert verdict(report, "model").endswith(" on 1 of them.")
    assert "| 100.0 | at chance |" in page_of(report)


def test_no_margin_without_a_benchmark_above_chance() -> None:
    report = make_report(SCORES, chances={"Easy": 0.8})
    kept = report.average.scores["model"].margin_kept
    assert kept.share is None and kept.over == 0
    assert "margin" not in verdict(report, "model")
