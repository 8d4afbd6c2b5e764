"""Means, standard errors in the same terms as lm-eval, and 95 % intervals, from the items' own scores.

A benchmark's scores are kept as strata: one list of item scores (0 to 1) for each lm-eval task. Kept
apart like this they give lm-eval's group figures, and, because base and model answer the same items,
the standard error of their difference without the part that both share.
"""

import math
from collections.abc import Sequence

from moh_llm.intervals import Interval, student_quantile

Strata = list[list[float]]


def mean(strata: Strata) -> float:
    """Mean over all items, which is the mean of the tasks weighted by their sizes (lm-eval's groups)."""
    means = [sum(values) / len(values) for values in strata]
    if len(means) == 1:
        return means[0]
    sizes = [len(values) for values in strata]
    return sum(m * n for m, n in zip(means, sizes, strict=True)) / sum(sizes)


def standard_error(strata: Strata) -> float | None:
    """Standard error of `mean`; None when a stratum has fewer than two items.

    One stratum: sample standard deviation / sqrt(n). Several: the standard deviation pooled within
    the strata / sqrt(n), as lm-eval does for a group weighted by size.
    """
    if any(len(values) < 2 for values in strata):
        return None
    total = sum(len(values) for values in strata)
    pooled = sum(_squares(values) for values in strata) / (total - len(strata))
    return math.sqrt(pooled / total)


def mean_interval(strata: Strata, low: float, high: float) -> Interval | None:
    """95 % interval of `mean`, of scores or differences that lie between two bounds; None as in `standard_error`.

    Student's t, with one item more at each bound: for a difference of paired proportions the adjusted Wald interval of
    Bonett and Price (2012), for a proportion that of Agresti and Coull with two items. Where no item differs it is not
    of width zero, and it holds for scores that are no proportions, too. Newcombe's interval holds the truth in 89 % of
    draws where 2 % of 100 items differ, all to one side; see docs/results/coverage.md.
    """
    if standard_error(strata) is None:
        return None
    items, raw = sum(len(values) for values in strata), mean(strata)
    centre = (items * raw + low + high) / (items + 2)
    squares = sum(_squares(values) for values in strata) + items * (raw - centre) ** 2
    squares += (low - centre) ** 2 + (high - centre) ** 2
    freedom = items - len(strata)
    half = student_quantile(0.95, freedom) * math.sqrt(squares / (freedom + 2) / (items + 2))
    return [centre - half, centre + half]


def average_readings(strata: Strata) -> Strata:
    """Several readings of the same items (TruthfulQA's mc1 and mc2) as one: the mean for each item."""
    if len({len(values) for values in strata}) != 1:
        raise ValueError(f"readings of the same items differ in number: {[len(values) for values in strata]}")
    return [[sum(readings) / len(readings) for readings in zip(*strata, strict=True)]]


def difference(model: Strata, base: Strata) -> Strata:
    """Item by item, model minus base. Both must hold the same items in the same order."""
    return [[m - b for m, b in zip(ms, bs, strict=True)] for ms, bs in zip(model, base, strict=True)]


def plain_mean(values: Sequence[float]) -> float:
    """The suite's average: every benchmark counts the same."""
    return sum(values) / len(values)


def plain_mean_error(errors: Sequence[float | None]) -> float | None:
    """Standard error of `plain_mean` over independent benchmarks; None when one is unknown."""
    known = [error for error in errors if error is not None]
    if len(known) < len(errors):
        return None
    return math.sqrt(sum(error**2 for error in known)) / len(known)


def ratio_interval(model: float, base: float, model_half: float, base_half: float, half: float) -> Interval | None:
    """95 % interval of model / base, for scores of the same items, by Fieller's method; None where it has no end.

    Args:
        model, base: the two scores, or means of scores.
        model_half, base_half, half: half the widths of the intervals of both and of their difference, which tell how
            far the two vary together:

                cov(m, b) = (h_m^2 + h_b^2 - h^2) / 2
                (m - r b)^2 <= h_m^2 - 2 r cov(m, b) + r^2 h_b^2        holds between the two ends r
    """
    covariance = (model_half**2 + base_half**2 - half**2) / 2
    squared, middle = base**2 - base_half**2, model * base - covariance
    if base <= base_half:
        return None
    # Rounding may leave a little less than nothing.
    root = math.sqrt(max(middle**2 - squared * (model**2 - model_half**2), 0.0))
    return [(middle - root) / squared, (middle + root) / squared]


def _squares(values: list[float]) -> float:
    centre = sum(values) / len(values)
    return sum((value - centre) ** 2 for value in values)
