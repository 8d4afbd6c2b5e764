"""Simulated scores and documents whose truth is known."""

from collections.abc import Sequence

import numpy as np


def covers(interval: Sequence[float] | None, truth: float) -> bool:
    """Whether an interval holds the truth; none does not."""
    return interval is not None and interval[0] <= truth <= interval[1]


def pairs(
    draw: np.random.Generator, items: int, base: float, differing: float, lost: float
) -> tuple[np.ndarray, np.ndarray, float]:
    """Right answers (0, 1) of a model and its base, and the model's expected score.

    Args:
        draw: the generator.
        items: how many.
        base: the base's expected score.
        differing: share of the items that only one of the two has right.
        lost: the share of these that the base has right.
    """
    only_base, only_model = differing * lost, differing * (1 - lost)
    shares = [base - only_base, only_model, only_base, 1 - base - only_model]
    kind = draw.choice(4, items, p=shares)
    return np.isin(kind, (0, 1)).astype(float), np.isin(kind, (0, 2)).astype(float), base - only_base + only_model
