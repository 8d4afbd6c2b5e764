"""Pairs of models; and gradients of FlexAttention on a CPU, whose plain form has them, but refuses them."""

from collections.abc import Iterator

import pytest
import torch
from pairs import make_pair  # noqa: F401
from torch._dynamo.testing import CompileCounter
from torch.nn.attention import flex_attention

from moh_llm.attention import compiled


@pytest.fixture(autouse=True)
def gradients_on_cpu(monkeypatch):
    """What a call without a compiler computes is differentiable on any device."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *states: None)


@pytest.fixture
def counter(monkeypatch) -> Iterator[CompileCounter]:
    """Counts compilations by dynamo, on a CPU as on a GPU; sizes and graph breaks matter, not what compiles."""
    counter = CompileCounter()
    monkeypatch.setattr(compiled, "DEVICES", ["cpu"])
    monkeypatch.setattr(compiled, "OPTIONS", {"backend": counter, "fullgraph": True})
    compiled._compile.cache_clear()
    torch._dynamo.reset()
    yield counter
    compiled._compile.cache_clear()
    torch._dynamo.reset()
