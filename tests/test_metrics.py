"""Comparison with a reference against definitions written out in float64."""

import math

import torch

from moh_llm.metrics import compare_to_reference


def test_figures_are_their_definitions():
    generator = torch.Generator().manual_seed(0)
    batches, logits, reference = [], {}, {}
    for number in range(2):
        labels = torch.randint(0, 11, (3, 6), generator=generator)
        labels[0, 2] = labels[2, 0] = -100
        batches.append({"labels": labels, "input_ids": torch.full((3, 6), number)})
        logits[number] = torch.randn(3, 6, 11, generator=generator)
        reference[number] = torch.randn(3, 6, 11, generator=generator)

    found = compare_to_reference(
        {"model": lambda b: logits[int(b["input_ids"][0, 0])], "same": lambda b: reference[int(b["input_ids"][0, 0])]},
        lambda b: reference[int(b["input_ids"][0, 0])],
        batches,
    )
    nll, nll_reference, kl, equal = [], [], [], []
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
    model, same = found["model"], found["same"]
    assert model.tokens == len(nll) == 28
    assert math.isclose(model.perplexity, math.exp(sum(nll) / len(nll)), rel_tol=1e-5)
    assert math.isclose(model.reference_perplexity, math.exp(sum(nll_reference) / len(nll)), rel_tol=1e-5)
    assert math.isclose(model.kl, sum(kl) / len(kl), rel_tol=1e-5)
    assert model.top1_agreement == sum(equal) / len(equal)
    assert (same.kl, same.top1_agreement, same.perplexity_ratio) == (0, 1, 1)
