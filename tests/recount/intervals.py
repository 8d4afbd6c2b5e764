"""95 % intervals over documents and of shares, as docs/evaluation.md and moh_llm's records define them."""

from collections.abc import Callable

import numpy as np


def of_documents(sums: np.ndarray, figure: Callable[[np.ndarray], float]) -> list[float] | None:
    """Bootstrap over documents."""
    if len(sums) < 2:
        return None
    draws = np.random.default_rng(0).multinomial(len(sums), np.full(len(sums), 1 / len(sums)), 2000)
    return np.percentile([figure(counts @ sums) for counts in draws.astype(float)], [2.5, 97.5]).tolist()


def ratio(sums: np.ndarray) -> float:
    """Perplexity ratio of sums over documents, `[5]`."""
    return float(np.exp((sums[1] - sums[2]) / sums[0]))


def kl(sums: np.ndarray) -> float:
    """KL per token of such sums."""
    return float(sums[3] / sums[0])


def is_at_chance(margins: np.ndarray) -> bool:
    """Whether the base's margins may be those of guessing."""
    error = margins.std(ddof=1) / np.sqrt(len(margins))
    return bool(margins.mean() - 1.96 * error <= 0)


def share_kept(own: np.ndarray, base: np.ndarray, delta: np.ndarray) -> dict[str, object]:
    """Share of the base's mean that a model keeps, in percent, by the delta method."""
    errors = [values.std(ddof=1) / np.sqrt(len(values)) for values in (own, base, delta)]
    return _kept(float(own.mean()), float(base.mean()), *map(float, errors))


def average_kept(scores: dict[str, dict[str, np.ndarray]], chances: dict[str, float]) -> dict[str, object]:
    """The same of plain means over benchmarks."""
    means, errors = [], []
    for pick in (
        lambda name: scores[name]["model"] - chances[name],
        lambda name: scores[name]["base"] - chances[name],
        lambda name: scores[name]["model"] - scores[name]["base"],
    ):
        values = [pick(name) for name in scores]
        means.append(float(np.mean([value.mean() for value in values])))
        squares = [value.var(ddof=1) / len(value) for value in values]
        errors.append(float(np.sqrt(sum(squares)) / len(values)))
    return _kept(means[0], means[1], *errors)


def _kept(own: float, base: float, own_error: float, base_error: float, error: float) -> dict[str, object]:
    if base <= 0:
        return {"share": None}
    ratio = own / base
    if base < 5 * base_error:
        return {"share": 100 * ratio, "base_errors": base / base_error}
    both = (own_error**2 + base_error**2 - error**2) / 2
    variance = max((own_error**2 + ratio**2 * base_error**2 - 2 * ratio * both) / base**2, 0.0)
    half = 196 * variance**0.5
    return {"share": 100 * ratio, "interval": [100 * ratio - half, 100 * ratio + half]}
