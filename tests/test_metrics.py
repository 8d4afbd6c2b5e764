"""Comparison with a reference against definitions written out in float64."""

import math

import numpy as np
import pytest
import torch

from moh_llm.intervals import SUMMED, interval, kls, perplexity_ratios, show_documents, show_figure
from moh_llm.metrics import Comparison, compare_to_reference


def test_figures_are_their_definitions():
    generator = torch.Generator().manual_seed(0)
    batches, logits, reference = [], {}, {}
    # Documents 0 and 3 span the windows of a batch or two batches, and come back in any order.
    documents = {0: [[0, 0, 1, 1, 1, 1], [1] * 6, [2, 0, 0, 0, 3, 3]], 1: [[3] * 6, [3, 4, 4, 4, 4, 4], [4] * 6]}
    for number in range(2):
        labels = torch.randint(0, 11, (3, 6), generator=generator)
        labels[0, 2] = labels[2, 0] = -100
        numbers = torch.tensor(documents[number])
        batches.append({"labels": labels, "input_ids": torch.full((3, 6), number), "documents": numbers})
        logits[number] = torch.randn(3, 6, 11, generator=generator)
        reference[number] = torch.randn(3, 6, 11, generator=generator)

    found = compare_to_reference(
        {"model": lambda b: logits[int(b["input_ids"][0, 0])], "same": lambda b: reference[int(b["input_ids"][0, 0])]},
        lambda b: reference[int(b["input_ids"][0, 0])],
        batches,
    )
    nll, nll_reference, kl, equal = [], [], [], []
    by_document = np.zeros((5, len(SUMMED)))
    for number, batch in enumerate(batches):
        for row in range(3):
            for t in range(1, 6):
                if batch["labels"][row, t] == -100:
                    continue
                p = logits[number][row, t - 1].double().softmax(-1)
                q = reference[number][row, t - 1].double().softmax(-1)
                nll.append(-math.log(p[batch["labels"][row, t]]))
                nll_reference.append(-math.log(q[batch["labels"][row, t]]))
                kl.append(float((q * (q / p).log()).sum()))
                equal.append(bool(p.argmax() == q.argmax()))
                row_sums = by_document[documents[number][row][t]]
                row_sums += [1, nll[-1], nll_reference[-1], kl[-1], equal[-1]]
    model, same = found["model"], found["same"]
    assert model.tokens == len(nll) == 28
    assert math.isclose(model.perplexity, math.exp(sum(nll) / len(nll)), rel_tol=1e-5)
    assert math.isclose(model.reference_perplexity, math.exp(sum(nll_reference) / len(nll)), rel_tol=1e-5)
    assert math.isclose(model.kl, sum(kl) / len(kl), rel_tol=1e-5)
    assert model.top1_agreement == sum(equal) / len(equal)
    assert (same.kl, same.top1_agreement, same.perplexity_ratio) == (0, 1, 1)
    # Document 2 has one token, at a window's beginning, which nothing predicts.
    assert model.documents == 4
    np.testing.assert_allclose(model.sums, by_document[[0, 1, 3, 4]], rtol=1e-5)
    assert same.ratio_interval is None  # too few documents


def drawn(documents: int, tokens: int = 50, seed: int = 0) -> Comparison:
    """Documents whose own level varies much more than their tokens do."""
    generator = np.random.default_rng(seed)
    level = generator.normal(0.2, 0.1, documents)
    lengths = generator.integers(tokens // 2, tokens, documents)
    noise = generator.normal(0, 0.01, documents)
    sums = [lengths, lengths * (3 + level), lengths * (3 + noise), lengths * abs(level), 0 * lengths]
    return Comparison(np.stack(sums, 1).astype(float))


def test_intervals_are_those_of_documents():
    found = drawn(200)
    log_ratio, kl = np.log(found.ratio_interval), found.kl_interval
    # The ratio of sums: its standard error by the delta method, written out.
    tokens, own, base, distance, _ = found.sums.T
    for value, mean, bounds in ((own - base, math.log(found.perplexity_ratio), log_ratio), (distance, found.kl, kl)):
        error = math.sqrt(np.sum((value - mean * tokens) ** 2)) / tokens.sum()
        assert bounds[0] == pytest.approx(mean - 1.96 * error, abs=0.15 * error)
        assert bounds[1] == pytest.approx(mean + 1.96 * error, abs=0.15 * error)
    # Longer documents say nothing new; more of them do.
    assert np.ptp(drawn(200, 5000).kl_interval) == pytest.approx(np.ptp(kl), rel=0.2)
    assert np.ptp(drawn(3200).kl_interval) == pytest.approx(np.ptp(kl) / 4, rel=0.25)
    assert drawn(200).ratio_interval == found.ratio_interval  # the same draws every time


def test_interval_of_a_mean_over_texts():
    texts = [drawn(60, seed=1), drawn(90, seed=2)]
    widths = [np.ptp(text.kl_interval) for text in texts]
    low, high = interval([text.sums for text in texts], kls)
    assert low < sum(text.kl for text in texts) / 2 < high
    assert high - low == pytest.approx(math.hypot(*widths) / 2, rel=0.1)
    assert interval([texts[0].sums, drawn(1).sums], perplexity_ratios) is None


def test_one_document_gives_no_interval():
    one = drawn(1)
    assert one.documents == 1 and one.ratio_interval is None and one.kl_interval is None
    assert show_documents(1) == "1 document, no interval" and show_documents(1200) == "1,200 documents"
    assert show_figure(1.0204, one.ratio_interval, ".3f") == "1.020"
    assert show_figure(1.0204, (1.01, 1.03), ".3f") == "1.020 (1.010 to 1.030)"
