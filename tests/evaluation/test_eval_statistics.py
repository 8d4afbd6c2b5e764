"""The figures are lm-eval's, and the difference's error is the paired one."""

import math
import random

import numpy as np
import pytest

from moh_llm.evaluation import statistics


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
    assert statistics.mean(strata[:1]) == means[0]
    assert statistics.standard_error(strata[:1]) == pytest.approx(errors[0], rel=1e-12)
    assert statistics.plain_mean_error(errors) == pytest.approx(metrics.unweighted_mean_stderr(errors), rel=1e-12)


def test_single_items_have_no_error(strata: statistics.Strata) -> None:
    assert statistics.standard_error([[1.0]]) is None
    assert statistics.standard_error([*strata, [1.0]]) is None
    assert statistics.plain_mean_error([0.1, None]) is None


def test_difference_is_paired(strata: statistics.Strata) -> None:
    assert statistics.standard_error(statistics.difference(strata, strata)) == 0.0
    changed = [[1 - strata[0][0], *strata[0][1:]], *strata[1:]]
    change = statistics.difference(changed, strata)
    assert abs(statistics.mean(change)) == pytest.approx(1 / 30)
    paired, alone = statistics.standard_error(change), statistics.standard_error(strata)
    assert paired is not None and alone is not None
    assert paired < alone * math.sqrt(2)


def recovery_error(model: statistics.Strata, base: statistics.Strata) -> float | None:
    """`statistics.recovery_error` from the item scores, as the report calls it for one benchmark."""
    difference = statistics.difference(model, base)
    errors = [statistics.standard_error(strata) for strata in (model, base, difference)]
    return statistics.recovery_error(statistics.mean(model), statistics.mean(base), *errors)


def paired_scores(draw: np.random.Generator, items: int, base: float, keep: float, luck: float) -> np.ndarray:
    """Right and wrong answers (2, items), model's and base's, that agree on most items."""
    bases = draw.random(items) < base
    models = np.where(bases, draw.random(items) < keep, draw.random(items) < luck)
    return np.stack([models, bases]).astype(np.float64)


def test_recovery_error_equals_the_item_wise_formula(strata: statistics.Strata) -> None:
    """For m/b the delta method is the standard error of the items' (m_i - r b_i) / b."""
    draw = random.Random(1)
    model = [[draw.random() if draw.random() < 0.3 else value for value in values] for values in strata]
    base = statistics.mean(strata)
    ratio = statistics.mean(model) / base
    linear = [[(m - ratio * b) / base for m, b in zip(*pair, strict=True)] for pair in zip(model, strata, strict=True)]
    assert recovery_error(model, strata) == pytest.approx(100 * (statistics.standard_error(linear) or 0), rel=1e-9)
    in_percent = [[[100 * value for value in values] for values in scores] for scores in (model, strata)]
    assert recovery_error(*in_percent) == pytest.approx(recovery_error(model, strata), rel=1e-9)


def test_recovery_error_agrees_with_a_bootstrap() -> None:
    draw = np.random.default_rng(0)
    scores = paired_scores(draw, 3000, base=0.6, keep=0.9, luck=0.1)
    ratios = []
    for _ in range(4000):
        model, base = scores[:, draw.integers(0, scores.shape[1], scores.shape[1])].sum(axis=1)
        ratios.append(100 * model / base)
    error = recovery_error(*([list(values)] for values in scores))
    assert error == pytest.approx(np.std(ratios), rel=0.05)
    # Without the pairing it would be another number.
    alone = [statistics.standard_error([list(values)]) or 0 for values in scores]
    unpaired = statistics.recovery_error(scores[0].mean(), scores[1].mean(), *alone, math.hypot(*alone))
    assert unpaired is not None and error is not None and unpaired > 1.5 * error


def test_recovery_error_of_an_average_agrees_with_a_bootstrap() -> None:
    draw = np.random.default_rng(1)
    suite = [paired_scores(draw, 1500, 0.7, 0.95, 0.2), paired_scores(draw, 2500, 0.3, 0.8, 0.1)]
    ratios = []
    for _ in range(4000):
        means = [scores[:, draw.integers(0, scores.shape[1], scores.shape[1])].mean(axis=1) for scores in suite]
        model, base = np.mean(means, axis=0)
        ratios.append(100 * model / base)
    model, base = np.mean([scores.mean(axis=1) for scores in suite], axis=0)
    columns = [[scores[0], scores[1], scores[0] - scores[1]] for scores in suite]
    errors = [[statistics.standard_error([list(values)]) for values in column] for column in columns]
    averages = [statistics.plain_mean_error(column) for column in zip(*errors, strict=True)]
    assert statistics.recovery_error(model, base, *averages) == pytest.approx(np.std(ratios), rel=0.05)


def test_recovery_error_at_the_edges(strata: statistics.Strata) -> None:
    assert statistics.recovery_error(0.5, 0.0, 0.1, 0.0, 0.1) is None
    for unknown in range(3):
        errors = [None if number == unknown else 0.1 for number in range(3)]
        assert statistics.recovery_error(0.5, 0.5, *errors) is None
    assert recovery_error(strata, strata) == pytest.approx(0, abs=1e-6)
    # Twice the base on every item: the variance is nothing, less what rounding takes away.
    assert recovery_error([[2 * value for value in values] for values in strata], strata) == pytest.approx(0, abs=1e-5)
    assert statistics.recovery_error(0.1, 0.1, 0.1, 0.1, 0.0) == 0.0


def test_readings_of_the_same_items_are_averaged() -> None:
    assert statistics.average_readings([[1.0, 0.0], [0.5, 0.25]]) == [[0.75, 0.125]]
    with pytest.raises(ValueError, match="differ in number"):
        statistics.average_readings([[1.0], [1.0, 2.0]])
