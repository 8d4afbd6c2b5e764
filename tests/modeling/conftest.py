"""Pairs of a dense model and the MoH model with the same weights."""

import pytest
import torch
import torch._dynamo
from pairs import make_pair  # noqa: F401
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import moh_llm.attention  # noqa: F401 (which registers what the fixture `reference` takes away)
from moh_llm.modeling.interval_attention_moh import NAME


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models attend by the files that travel alone, as where MoH-LLM is not installed."""
    monkeypatch.delitem(ALL_ATTENTION_FUNCTIONS._global_mapping, NAME, raising=False)


@pytest.fixture
def ids() -> torch.Tensor:
    """Random token ids `[3, 24]`, none of them the end-of-text token 0."""
    return torch.randint(1, 257, (3, 24), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def compiled_anew(request: pytest.FixtureRequest) -> None:
    """Dynamo counts compilations of a function in the whole process; each slow test begins at none."""
    if request.node.get_closest_marker("slow") is not None:
        torch._dynamo.reset()
