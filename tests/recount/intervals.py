"""95 % intervals over documents, as docs/evaluation.md and moh_llm's records define them, written anew."""

from collections.abc import Callable

import numpy as np


def student(share: float, freedom: float) -> float:
    """What Student's t lies within, to both sides, in that share: by its density on a fine grid."""
    grid = np.linspace(0, 400, 2_000_001)
    density = (1 + grid**2 / freedom) ** (-(freedom + 1) / 2)
    integral = np.concatenate([[0], np.cumsum((density[1:] + density[:-1]) / 2)])
    tail = np.sqrt(freedom) ** (freedom + 1) * 400**-freedom / freedom / (grid[1] - grid[0])  # beyond the grid
    return float(np.interp(share * (integral[-1] + tail), integral, grid))


def of_documents(sums: np.ndarray, figure: Callable[[np.ndarray], float]) -> list[float] | None:
    """Student's t of the figure's log by leaving out a document at a time, wider to the side of the longer tail."""
    n, weights, value = len(sums), sums[:, 0], figure(sums.sum(0))
    if n < 5:
        return None
    if value == 0:
        return [0.0, 0.0]
    changes = np.array([np.log(value / figure(np.delete(sums, i, axis=0).sum(0))) for i in range(n)])
    variance = float(changes @ changes)
    if figure is kl:
        variance = (3 * 0.4**2 / n + (n - 1) * variance) / (n + 2)
    if variance == 0:
        return [value, value]
    skewness = np.mean(changes**3) / np.mean(changes**2) ** 1.5
    quantile = student(0.95 + 0.02 * min(1, 20 / n), max(1, weights.sum() ** 2 / (weights @ weights) - 1))
    more = 3 * abs(skewness) / np.sqrt(n)
    low, high = (np.sqrt(variance) * (quantile + more * longer) for longer in (skewness < 0, skewness > 0))
    return [float(value * np.exp(-low)), float(value * np.exp(high))]


def ratio(sums: np.ndarray) -> float:
    """Perplexity ratio of sums over documents, `[5]`."""
    return float(np.exp((sums[1] - sums[2]) / sums[0]))


def kl(sums: np.ndarray) -> float:
    """KL per token of such sums."""
    return float(sums[3] / sums[0])
