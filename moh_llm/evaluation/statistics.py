"""Means and standard errors, in the same terms as lm-eval, from the items' own scores.

A benchmark's scores are kept as strata: one list of item scores (0 to 1) for each lm-eval task. Kept
apart like this they give lm-eval's group figures, and, because base and model answer the same items,
the standard error of their difference without the part that both share.
"""

import math
from collections.abc import Sequence

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


def recovery_error(
    model: float, base: float, model_error: float | None, base_error: float | None, difference_error: float | None
) -> float | None:
    """Standard error in percent of the recovery 100 m/b, for scores of the same items, by the delta method.

    With r = m/b and the standard errors s_m, s_b of the two scores and s_d of their paired difference:

        cov(m, b) = (s_m^2 + s_b^2 - s_d^2) / 2
        var(m/b)  ~ (s_m^2 + r^2 s_b^2 - 2 r cov(m, b)) / b^2

    All five in one unit, whichever. It holds for plain means over independent benchmarks, too. None where an error
    is unknown or ``base`` is not above 0.
    """
    if model_error is None or base_error is None or difference_error is None or base <= 0:
        return None
    ratio = model / base
    covariance = (model_error**2 + base_error**2 - difference_error**2) / 2
    variance = (model_error**2 + ratio**2 * base_error**2 - 2 * ratio * covariance) / base**2
    # Rounding may leave a little less than nothing.
    return 100 * math.sqrt(max(variance, 0.0))


def _squares(values: list[float]) -> float:
    centre = sum(values) / len(values)
    return sum((value - centre) ** 2 for value in values)
