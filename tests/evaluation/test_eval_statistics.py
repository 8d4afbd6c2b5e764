"""The figures are lm-eval's, and the difference's error is the paired one."""

import math
import random

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


def test_readings_of_the_same_items_are_averaged() -> None:
    assert statistics.average_readings([[1.0, 0.0], [0.5, 0.25]]) == [[0.75, 0.125]]
    with pytest.raises(ValueError, match="differ in number"):
        statistics.average_readings([[1.0], [1.0, 2.0]])
