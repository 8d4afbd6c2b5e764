"""Comparison with a reference against definitions written out in float64."""

import math

import numpy as np
import pytest
import torch

from moh_llm.intervals import SUMMED
from moh_llm.metrics import compare_to_reference


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
        logits[number], reference[number] = torch.randn(2, 3, 6, 11, generator=generator)

    def run(of: dict[int, torch.Tensor]):
        return lambda batch: of[int(batch["input_ids"][0, 0])]

    found = compare_to_reference({"model": run(logits), "same": run(reference)}, run(reference), batches)
    by_document = np.zeros((5, len(SUMMED)))
    for number, batch in enumerate(batches):
        for row in range(3):
            for t in range(1, 6):
                if (label := batch["labels"][row, t]) == -100:
                    continue
                p = logits[number][row, t - 1].double().softmax(-1)
                q = reference[number][row, t - 1].double().softmax(-1)
                kl, equal = float((q * (q / p).log()).sum()), bool(p.argmax() == q.argmax())
                by_document[documents[number][row][t]] += [1, -math.log(p[label]), -math.log(q[label]), kl, equal]
    model, same = found["model"], found["same"]
    # Document 2 has one token, at a window's beginning, which nothing predicts.
    np.testing.assert_allclose(model.sums, by_document[[0, 1, 3, 4]], rtol=1e-5)
    tokens, own, other, kl, equal = by_document.sum(0)
    assert (model.tokens, model.documents) == (tokens, 4) == (28, 4)
    means = (math.exp(own / tokens), math.exp(other / tokens), kl / tokens, equal / tokens)
    assert (model.perplexity, model.reference_perplexity, model.kl, model.top1_agreement) == pytest.approx(means, 1e-5)
    assert (same.kl, same.top1_agreement, same.perplexity_ratio) == (0, 1, 1)
    assert same.ratio_interval is None  # too few documents
