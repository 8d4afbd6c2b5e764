"""What calibration records of local attention: outputs, and how much weight a softmax gives to what is out of sight.

Shapes: B batch, T tokens, H query heads, KV key-value heads, D head size, N tokens of all batches.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moh_llm.modeling.documents_moh import Band, out_of_sight
from moh_llm.modeling.local_attention_moh import local_attention

STRIDE = 4  # of how many tokens one is compared with all keys before it
_ROWS = 64  # queries whose scores with all keys are held at once: more leave the processor's cache


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
    """Record local attention; arguments are those of `local_attention` and `Band.of`, T queries and T keys."""
    band = Band.of(positions, starts, window, sinks)
    assert band is not None  # without more tokens that have all heads on
    outputs = local_attention(queries, keys, values, band, scaling)
    queries = (queries * scaling).unflatten(1, (keys.shape[1], -1))  # [B, KV, H / KV, T, D]
    near = _near(queries, keys, band)
    far = _far(queries, keys, positions, torch.minimum(starts, positions), window, sinks)
    hidden = out_of_sight(positions, starts, window, sinks).clamp_min(1).expand(len(queries), -1)
    return LocalSample(
        outputs.flatten(0, 1).transpose(0, 1).float(),
        near.flatten(0, 1).float(),
        far.flatten(0, 1).float(),
        hidden.flatten().float(),
    )


def _near(queries: torch.Tensor, keys: torch.Tensor, band: Band) -> torch.Tensor:
    """Log-sum-exp of the scores in sight, `[B, T, H]`, for scaled queries `[B, KV, H / KV, T, D]`."""
    batch, length = len(queries), queries.shape[3]
    # [B * N, KV, H / KV * block, D]
    blocks = band.blocks(queries.flatten(1, 2), keys.shape[1]).flatten(3, 4).flatten(0, 1)
    taken = band.take(keys).flatten(0, 1)
    hidden = ~band.visible[..., :-1].expand(batch, -1, -1, -1).flatten(0, 1)
    near = torch.stack([_log_sum_exp(*block).T for block in zip(blocks, taken, hidden, strict=True)])
    return near.unflatten(0, (batch, -1)).flatten(1, 2)[:, :length]


def _far(
    queries: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor, starts: torch.Tensor, window: int, sinks: int
) -> torch.Tensor:
    """As `_near`, of the scores out of sight; NaN for all tokens but every `STRIDE`-th."""
    batch, _, _, length, _ = queries.shape
    far = queries.new_full((batch, length, queries.shape[1] * queries.shape[2]), math.nan)
    for first in range(0, length, _ROWS * STRIDE):
        rows = torch.arange(first, min(first + _ROWS * STRIDE, length), STRIDE, device=queries.device)
        last = int(rows[-1]) + 1
        j = torch.arange(last, device=queries.device)
        p, s = positions[:, rows, None], starts[:, rows, None]
        hidden = ((j > p - window) | (j < s + sinks)).expand(batch, -1, -1)
        for row, own in enumerate(queries[:, :, :, rows].flatten(2, 3)):
            far[row, rows] = _log_sum_exp(own, keys[row, :, :last], hidden[row]).T
    return far


def _log_sum_exp(queries: torch.Tensor, keys: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """For queries `[KV, H / KV * R, D]` and the keys `[KV, K, D]` that are not `hidden` `[R, K]`: `[H, R]`."""
    scores = (queries @ keys.transpose(1, 2)).unflatten(1, (-1, len(hidden)))
    return scores.masked_fill_(hidden, -math.inf).logsumexp(-1).flatten(0, 1)
