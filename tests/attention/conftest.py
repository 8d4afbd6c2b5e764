"""Pairs of models; and gradients of FlexAttention on a CPU, whose plain form has them, but refuses them."""

import pytest
from pairs import make_pair  # noqa: F401
from torch.nn.attention import flex_attention


@pytest.fixture(autouse=True)
def gradients_on_cpu(monkeypatch):
    """What a call without a compiler computes is differentiable on any device."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *states: None)
