"""Pairs of models, and ids for them."""

import pytest
import torch
from pairs import make_pair  # noqa: F401


@pytest.fixture
def ids() -> torch.Tensor:
    """Random token ids `[3, 24]`, none of them the end-of-text token 0."""
    return torch.randint(1, 257, (3, 24), generator=torch.Generator().manual_seed(0))
