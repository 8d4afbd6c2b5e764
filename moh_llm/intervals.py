"""95 % intervals of perplexity ratio and KL, over documents, and their formatting.

Tokens of one document are correlated, so the sample is one of documents, not of tokens.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np

Interval = list[float]  # [low, high]

# The sums over the predicted tokens of a document, by column.
SUMMED = ("tokens", "cross_entropy", "reference_cross_entropy", "kl", "agreement")
LEAST = 5  # documents; fewer give no interval

# Chosen with `benchmarks/coverage.py`: intervals hold the truth in at least 93 % of draws from 5 documents on;
# docs/evaluation.md has the shares.
_CONFIDENCE, _MORE, _FEW = 0.95, 0.02, 20  # the quantile is that of 97 % up to 20 documents, then falls to 95 %
_SKEW = 3.0  # the side of the longer tail is wider by 3 * skewness / sqrt(documents) standard errors
_PRIOR, _WEIGHT = 0.4, 3  # prior of the standard deviation of log KL over documents, and its weight in documents


def perplexity_ratios(sums: np.ndarray) -> np.ndarray:
    """Perplexity ratios `[R]` of R rows of sums, `[R, 5]`."""
    return np.exp((sums[:, 1] - sums[:, 2]) / sums[:, 0])


def kls(sums: np.ndarray) -> np.ndarray:
    """KL per token `[R]` of R rows of sums, `[R, 5]`."""
    return sums[:, 3] / sums[:, 0]


def interval(texts: Sequence[np.ndarray], figure: Callable[[np.ndarray], np.ndarray]) -> Interval | None:
    """95 % interval of a figure's mean over texts, for other documents of the same kinds.

    Each text gets a Student's t interval, on the log scale for perplexity ratio and KL. Its standard error is the
    jackknife's over documents, which weighs long documents more, as the figure does. The degrees of freedom are Kish's
    effective number of documents less one. A few documents seldom show outliers; therefore the side of the longer tail
    is widened by the skewness (after Johnson, 1978), the quantile is that of 97 %, and the variance of log KL is pooled
    with a prior. Intervals of several texts are combined by MOVER (Zou and Donner, 2008). The result is None if a text
    has fewer than `LEAST` documents.

    Args:
        texts: for each text the sums over its documents, `[D, 5]` (see `SUMMED`).
        figure: `perplexity_ratios`, `kls`, or another function of sums whose first column holds the weights.
    """
    if min(map(len, texts)) < LEAST:
        return None
    values = [figure(sums.sum(0)[None])[0] for sums in texts]
    ends = [_of_one_text(sums, figure) for sums in texts]
    return mover_mean(values, ends)


def _of_one_text(sums: np.ndarray, figure: Callable[[np.ndarray], np.ndarray]) -> Interval:
    total, count = sums.sum(0), len(sums)
    value, without = figure(total[None])[0], figure(total - sums)
    log = figure in (perplexity_ratios, kls) and value > 0 and without.min() > 0
    changes = np.log(value / without) if log else value - without
    variance = (changes**2).sum()
    if log and figure is kls:
        variance = (_WEIGHT * _PRIOR**2 / count + (count - 1) * variance) / (_WEIGHT + count - 1)
    if variance == 0:
        return [value, value]
    skewness = (changes**3).mean() / max((changes**2).mean() ** 1.5, 1e-300)
    freedom = total[0] ** 2 / (sums[:, 0] ** 2).sum() - 1
    quantile = student_quantile(_CONFIDENCE + _MORE * min(1, _FEW / count), max(freedom, 1))
    error, longer = math.sqrt(variance), _SKEW * abs(skewness) / math.sqrt(count)
    low, high = error * (quantile + longer * (skewness < 0)), error * (quantile + longer * (skewness > 0))
    return [value * math.exp(-low), value * math.exp(high)] if log else [value - low, value + high]


def mover_mean(values: Sequence[float], ends: Sequence[Sequence[float]]) -> Interval:
    """Interval of the mean of independent figures from their intervals (MOVER; Zou and Donner, 2008)."""
    distances = np.abs(np.array(ends) - np.array(values)[:, None])
    low, high = np.sqrt((distances**2).sum(0)) / len(values)
    mean = float(np.mean(values))
    return [mean - float(low), mean + float(high)]


@lru_cache(maxsize=1024)
def student_quantile(share: float, freedom: float) -> float:
    """The two-sided quantile of Student's t: |t| is below it with probability ``share``; ``freedom`` is at least 1.

    By integrating the density, which is a power of the cosine of arctan(t / sqrt(freedom)).
    """
    freedom = min(freedom, 10_000.0)  # from there on it is the normal distribution's, to four digits
    angles = np.linspace(0, math.pi / 2, 8193)
    density = np.cos(angles) ** (freedom - 1)
    integral = np.concatenate([[0], np.cumsum(density[1:] + density[:-1])])
    return math.sqrt(freedom) * math.tan(np.interp(share * integral[-1], integral, angles))


def within(bounds: Sequence[float], low: float, high: float) -> Interval:
    """An interval cut to the values between ``low`` and ``high``."""
    return [min(max(end, low), high) for end in bounds]


def show_number(value: float | None, form: str, factor: float = 1) -> str:
    """A number times ``factor`` in a format; "-" for None."""
    return "-" if value is None else f"{value * factor:{form}}".rstrip(".")


def show_interval(bounds: Sequence[float] | None, form: str) -> str:
    """``1.012 to 1.034``, or ``no interval``."""
    return "no interval" if bounds is None else f"{show_number(bounds[0], form)} to {show_number(bounds[1], form)}"


def show_figure(value: float | None, bounds: Sequence[float] | None, form: str) -> str:
    """A figure with its interval if it has one: ``1.020 (1.012 to 1.034)``."""
    return show_number(value, form) + ("" if bounds is None else f" ({show_interval(bounds, form)})")


def show_error(value: float | None, error: float | None, form: str, error_form: str) -> str:
    """A figure with its standard error or deviation if it has one: ``61.6 ± 0.4``."""
    return show_number(value, form) + ("" if value is None or error is None else f" ± {error:{error_form}}")


def show_documents(number: int) -> str:
    """``120 documents``, or ``1 document, no interval`` if there are too few."""
    return f"{number:,} document{'s' if number != 1 else ''}" + ("" if number >= LEAST else ", no interval")
