"""Intervals over documents hold the truth at any number of documents that has one."""

import numpy as np
import pytest
from simulated import covers

from moh_llm.intervals import LEAST, interval, kls, mover_mean, perplexity_ratios, student_quantile


@pytest.fixture(scope="module")
def population() -> np.ndarray:
    """Sums of 3,000 documents of 20 to 500 tokens; KL has a long tail, and is larger in long documents."""
    draw = np.random.default_rng(0)
    tokens = draw.integers(20, 500, 3000).astype(float)
    kl = 0.05 * (1 + tokens / 500) * draw.lognormal(0, 0.6, 3000)
    change = kl / 3 + draw.normal(0, 0.3, 3000) * np.sqrt(kl / tokens * 30)
    return np.stack([tokens, tokens * (3 + change), tokens * 3, tokens * kl, 0 * tokens], 1)


@pytest.mark.parametrize("number", [5, 9, 30])
@pytest.mark.parametrize("figure", [perplexity_ratios, kls])
def test_the_truth_is_held(population, figure, number):
    truth, draw = figure(population.sum(0)[None])[0], np.random.default_rng(number)
    drawn = population[draw.integers(0, len(population), (400, number))]
    held = np.mean([covers(interval([sums], figure), truth) for sums in drawn])
    assert held >= 0.93


def test_documents_weigh_by_their_tokens(population):
    """One long document among short ones is hardly more than one document."""
    alike, uneven = population[:20].copy(), population[:20].copy()
    uneven[0] *= 1000
    assert np.ptp(interval([uneven], kls)) > 3 * np.ptp(interval([alike], kls))


def test_an_interval_needs_five_documents(population):
    assert LEAST == 5
    assert interval([population[:50], population[:4]], kls) is None
    low, high = interval([population[:5]], kls)
    assert 0 < low < kls(population[:5].sum(0)[None])[0] < high


def test_quantiles_of_student_and_means():
    """Of printed tables."""
    known = {(0.95, 1): 12.706, (0.95, 4): 2.776, (0.95, 29): 2.045, (0.99, 10): 3.169, (0.95, 1e6): 1.960}
    assert all(student_quantile(*key) == pytest.approx(value, abs=1.5e-3) for key, value in known.items())
    assert mover_mean([1.0, 3.0], [[0.7, 1.6], [2.6, 3.8]]) == pytest.approx([2 - 0.25, 2 + 0.5])
