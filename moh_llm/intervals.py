"""95 % intervals of perplexity ratio and KL, by bootstrap over documents, and their formatting.

Tokens of one document are correlated, so that documents are resampled, not tokens.
"""

from collections.abc import Callable, Sequence

import numpy as np

Interval = list[float]  # its two ends, as a JSON record has them

# What is summed over the predicted tokens of a document, and the columns of the sums.
SUMMED = ("tokens", "cross_entropy", "reference_cross_entropy", "kl", "agreement")
RESAMPLES = 2000


def perplexity_ratios(sums: np.ndarray) -> np.ndarray:
    """Perplexity ratios `[R]` of R rows of sums, `[R, 5]`."""
    return np.exp((sums[:, 1] - sums[:, 2]) / sums[:, 0])


def kls(sums: np.ndarray) -> np.ndarray:
    """KL per token `[R]` of R rows of sums, `[R, 5]`."""
    return sums[:, 3] / sums[:, 0]


def interval(texts: Sequence[np.ndarray], figure: Callable[[np.ndarray], np.ndarray]) -> Interval | None:
    """95 % interval, by bootstrap over documents, of a figure's mean over texts.

    As many documents as a text has are drawn from it with replacement, `RESAMPLES` times, and the
    figure taken of the sums over those: a long document weighs more, as in the figure itself. The
    draws are the same in every call.

    Args:
        texts: per text the sums over its documents, `[D, 5]` (see `SUMMED`).
        figure: `perplexity_ratios` or `kls`.

    Returns:
        The 2.5th and 97.5th percentile; None where a text has fewer than two documents.
    """
    if min(map(len, texts)) < 2:
        return None
    generator, found = np.random.default_rng(0), np.zeros(RESAMPLES)
    for sums in texts:
        drawn = generator.multinomial(len(sums), np.full(len(sums), 1 / len(sums)), RESAMPLES)
        found += figure(drawn.astype(np.float64) @ sums)
    return np.percentile(found / len(texts), (2.5, 97.5)).tolist()


def show_number(value: float | None, form: str, factor: float = 1) -> str:
    """A number by a format, times ``factor``; a dash where there is none."""
    return "-" if value is None else f"{value * factor:{form}}".rstrip(".")


def show_interval(bounds: Sequence[float] | None, form: str) -> str:
    """An interval as it reads in a table: ``1.012 to 1.034``, or ``no interval``."""
    return "no interval" if bounds is None else f"{show_number(bounds[0], form)} to {show_number(bounds[1], form)}"


def show_figure(value: float | None, bounds: Sequence[float] | None, form: str, between: str = " ") -> str:
    """A figure and, where there is one, its interval: ``1.020 (1.012 to 1.034)``."""
    return show_number(value, form) + ("" if bounds is None else f"{between}({show_interval(bounds, form)})")


def show_error(value: float | None, error: float | None, form: str, error_form: str) -> str:
    """A figure and, where there is one, its standard error or deviation: ``61.6 ± 0.4``."""
    return show_number(value, form) + ("" if value is None or error is None else f" ± {error:{error_form}}")


def show_documents(number: int) -> str:
    """``120 documents``, or ``1 document, no interval``."""
    return f"{number:,} documents" if number != 1 else "1 document, no interval"
