"""Calibration samples of a layer with local attention, made of random numbers."""

import math

import torch

from moh_llm.conversion.fit import LayerSample, LocalSample
from moh_llm.conversion.local_fit import STRIDE


def make_sample(heads=4, tokens=400, fitted=300, hidden=6, size=3, spread=1.0):
    """Heads whose part out of sight is a fixed vector, of a weight that the input tells, and noise of its own."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=generator)

    inputs, local = randn(tokens, hidden), randn(heads, tokens, size)
    near, out_of_sight = randn(tokens, heads), torch.randint(1, 50, (tokens,), generator=generator).float()
    far = inputs @ (0.3 * randn(hidden, heads)) + out_of_sight.log()[:, None]
    weight = (far - near).sigmoid().T[..., None]
    value = randn(heads, 1, size)
    noise = randn(heads, tokens, size) * torch.tensor([0.01, 0.5, 2.0, 1.0])[:heads, None, None] * spread
    heads_out = (1 - weight) * local + weight * value + noise
    root = randn(hidden, hidden)
    sample = LocalSample(
        local, near, torch.where(torch.arange(tokens)[:, None] % STRIDE == 0, far, math.nan), out_of_sight
    )
    gradients, o_proj = randn(tokens - fitted, hidden), randn(hidden, heads * size)
    return LayerSample(inputs, heads_out, local, root @ root.T, gradients, o_proj, fitted, sample), value[:, 0]
