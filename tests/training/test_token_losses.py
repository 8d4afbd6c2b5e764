"""Losses from hidden states, a few positions at a time, against the plain formulas on whole logits."""

import pytest
import torch
import torch.nn.functional as F

from moh_llm.training import token_losses as module
from moh_llm.training.token_losses import comparison_values, token_losses

POSITIONS, SIZE, WORDS = 37, 16, 50


def made(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    """Hidden states and heads of student and teacher, and targets."""
    draw = torch.Generator().manual_seed(0)
    hidden, other = (torch.randn(POSITIONS, SIZE, generator=draw, dtype=torch.float64).to(dtype) for _ in range(2))
    head, other_head = (torch.randn(WORDS, SIZE, generator=draw, dtype=torch.float64).to(dtype) for _ in range(2))
    return hidden.requires_grad_(), head.requires_grad_(), torch.arange(POSITIONS) % WORDS, other, other_head


def plain(hidden, head, targets, other=None, other_head=None, temperature=1.0) -> tuple[torch.Tensor, torch.Tensor]:
    logits = hidden @ head.T
    cross_entropy = F.cross_entropy(logits, targets, reduction="sum")
    if other is None:
        return cross_entropy, cross_entropy
    soft = [(x / temperature).log_softmax(-1) for x in (logits, other @ other_head.T)]
    return temperature**2 * F.kl_div(*soft, log_target=True, reduction="sum"), cross_entropy


@pytest.mark.parametrize("chunk", [1, 8, 512])
@pytest.mark.parametrize(("with_teacher", "temperature"), [(False, 1.0), (True, 1.0), (True, 2.5)])
def test_losses_and_gradients_are_the_plain_ones(monkeypatch, chunk, with_teacher, temperature):
    monkeypatch.setattr(module, "chunk_positions", lambda vocabulary: chunk)
    hidden, head, targets, *teacher = made()
    given = (*teacher, temperature) if with_teacher else ()
    mine, wanted = token_losses(hidden, head, targets, *given), plain(hidden, head, targets, *given)
    for a, b in zip(mine, wanted, strict=True):
        torch.testing.assert_close(a, b)
    # A factor, as the loss has one.
    gradients = [torch.autograd.grad(0.3 * task, (hidden, head)) for task in (mine[0], wanted[0])]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


def test_a_tied_head_gets_both_gradients():
    _, head, targets, other, other_head = made()
    gradients = []
    for losses in (token_losses, plain):
        task, _ = losses(head[targets] * 2, head, targets, other, other_head)
        gradients.append(torch.autograd.grad(task, head)[0])
    torch.testing.assert_close(*gradients)


def test_a_frozen_head_gets_none():
    hidden, head, targets, *_ = made()
    token_losses(hidden, head.detach(), targets)[0].backward()
    assert hidden.grad is not None and head.grad is None


def test_autocast_takes_products_in_bfloat16_and_sums_in_float32():
    hidden, head, targets, *teacher = made(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        mine = token_losses(hidden, head, targets, *teacher)
        gradient = torch.autograd.grad(mine[0], head)[0]
    exact = plain(hidden, head, targets, *teacher)
    assert mine[0].dtype == torch.float32 and gradient.dtype == torch.float32
    torch.testing.assert_close(mine[0], exact[0], rtol=2e-2, atol=0)
    torch.testing.assert_close(gradient, torch.autograd.grad(exact[0], head)[0], rtol=0.1, atol=0.3)


def test_no_positions_are_no_loss():
    hidden, head, targets, *teacher = made()
    task, cross_entropy = token_losses(hidden[:0], head, targets[:0], *(teacher[0][:0], teacher[1]))
    task.backward()
    assert task == cross_entropy == 0 and head.grad.abs().sum() == 0


def test_comparison():
    hidden, head, targets, other, other_head = made(torch.float32)
    found = comparison_values(hidden, head, targets, other, other_head)
    kl, cross_entropy = plain(hidden, head, targets, other, other_head)
    reference = plain(other, other_head, targets)[0]
    agreement = ((hidden @ head.T).argmax(-1) == (other @ other_head.T).argmax(-1)).sum()
    wanted = torch.stack([x.detach().double() for x in (cross_entropy, reference, kl, agreement)])
    assert found.shape == (len(targets), 4)
    torch.testing.assert_close(found.sum(0), wanted, rtol=1e-5, atol=1e-5)
    assert not comparison_values(hidden, head, targets)[:, 1:].any()
