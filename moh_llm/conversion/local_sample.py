"""What calibration records of local attention: outputs, and how much weight a softmax gives to what is out of sight.

Shapes: B batch, T tokens, H query heads, KV key-value heads, D head size, N tokens of all batches.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moh_llm.modeling.local_attention_moh import Band, local_attention, out_of_sight

STRIDE = 4  # of how many tokens one is compared with all keys before it
_ROWS = 256  # queries whose scores with all keys are held at once


@dataclass(frozen=True)
class LocalSample:
    """Local attention of one layer on calibration text, float32.

    Attributes:
        outputs: of each head, without a distant token, `[H, N, D]`.
        near: log-sum-exp of the scores with the keys in sight, `[N, H]`.
        far: that of the keys out of sight, `[N, H]`; NaN for tokens that were not compared with them.
        hidden: number of keys out of sight, at least 1, `[N]`.
    """

    outputs: torch.Tensor
    near: torch.Tensor
    far: torch.Tensor
    hidden: torch.Tensor

    @classmethod
    def join(cls, samples: Sequence["LocalSample"], order: torch.Tensor) -> "LocalSample":
        """The tokens of several samples, one after the other, in that order."""
        outputs = torch.cat([sample.outputs for sample in samples], dim=1)[:, order]
        near, far, hidden = (
            torch.cat([getattr(sample, name) for sample in samples])[order] for name in ("near", "far", "hidden")
        )
        return cls(outputs, near, far, hidden)


@torch.no_grad()
def sample_local(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    starts: torch.Tensor,
    window: int,
    sinks: int,
    scaling: float,
) -> LocalSample:
    """Record local attention; arguments are those of `local_attention`, T queries and T keys."""
    batch, heads, length, _ = queries.shape
    group = heads // keys.shape[1]
    outputs = local_attention(queries, keys, values, positions, starts, window, sinks, scaling)
    band = Band(positions, starts, window, sinks)
    near, far = queries.new_empty(batch, length, heads), queries.new_full((batch, length, heads), math.nan)
    p, s = positions[..., None].float(), torch.minimum(starts, positions)[..., None].float()  # [B or 1, T, 1]
    for head in range(heads):
        own, own_keys = queries[:, head : head + 1], keys[:, head // group : head // group + 1]
        scores = band.blocks(own) @ band.take(own_keys).transpose(2, 3) * scaling  # [B * N, 1, block, K]
        scores = scores.unflatten(0, (batch, -1))[:, :, 0].masked_fill(~band.visible, -math.inf)
        near[:, :, head] = scores.logsumexp(-1).flatten(1)[:, :length]
        for first in range(0, length, _ROWS * STRIDE):
            rows = torch.arange(first, min(first + _ROWS * STRIDE, length), STRIDE, device=queries.device)
            last = int(rows[-1]) + 1
            scores = own[:, 0, rows] @ own_keys[:, 0, :last].transpose(1, 2) * scaling  # [B, rows, last]
            j = torch.arange(last, device=queries.device, dtype=p.dtype)
            rows_p, rows_s = p[:, rows], s[:, rows]
            out = (j <= rows_p - window) & (j >= rows_s + sinks)
            far[:, rows, head] = scores.masked_fill(~out, -math.inf).logsumexp(-1)
    hidden = out_of_sight(positions, starts, window, sinks).clamp_min(1).expand(batch, -1)
    return LocalSample(
        outputs.flatten(0, 1).transpose(0, 1).float(),
        near.flatten(0, 1).float(),
        far.flatten(0, 1).float(),
        hidden.flatten().float(),
    )
