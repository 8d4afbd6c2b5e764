"""What calibration records of local attention: outputs, and how much weight a softmax gives to what is out of sight.

Shapes: B batch, T tokens, H query heads, KV key-value heads, D head size, N tokens of all batches.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moh_llm.modeling.interval_attention_moh import near_attention
from moh_llm.modeling.seen_moh import Seen

STRIDE = 4  # of how many tokens one is compared with all keys before it
_ROWS = 64  # queries whose scores with all keys are held at once: more leave the processor's cache
_BLOCK = 128  # the same of scores with the keys in sight


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
    """Record local attention of T queries to T keys; see `near_attention` and `Seen.from_positions`."""
    seen = Seen.from_positions(positions, starts, window, sinks)
    outputs = near_attention(queries, keys, values, seen, scaling)
    queries = (queries * scaling).unflatten(1, (keys.shape[1], -1))  # [B, KV, H / KV, T, D]
    near, far = _near(queries, keys, seen), _far(queries, keys, seen)
    hidden = seen.hidden[..., 0].clamp_min(1).expand(len(queries), -1)
    return LocalSample(
        outputs.flatten(0, 1).transpose(0, 1).float(),
        near.flatten(0, 1).float(),
        far.flatten(0, 1).float(),
        hidden.flatten().float(),
    )


def _near(queries: torch.Tensor, keys: torch.Tensor, seen: Seen) -> torch.Tensor:
    """Log-sum-exp of the scores in sight, `[B, T, H]`, for scaled queries `[B, KV, H / KV, T, D]`."""
    blocks = []
    block = min(seen.window, _BLOCK)
    for first in range(0, queries.shape[3], block):
        rows = slice(first, first + block)
        last, start, near, sink_end = (
            tensor[:, rows].expand(len(queries), -1, -1) for tensor in (seen.last, seen.start, seen.near, seen.sink_end)
        )
        # A document that begins after the block's first query has its sinks in the band.
        band = torch.arange(int(near.min()), int(last.max()) + 1, device=queries.device)
        sinks = start[:, :1, 0] + torch.arange(seen.sinks, device=queries.device)
        index = torch.cat([sinks, band.expand(len(queries), -1)], dim=1).unsqueeze(1)  # [B, 1, K]
        visible = (index <= last) & (index >= start) & ((index >= near) | (index < sink_end))
        visible[..., : seen.sinks] &= index[..., : seen.sinks] < band[0]  # else it is seen in the band
        given = zip(queries[:, :, :, rows].flatten(2, 3), keys, index[:, 0], ~visible, strict=True)
        blocks.append(torch.stack([_log_sum_exp(own, read[:, i], hidden).T for own, read, i, hidden in given]))
    return torch.cat(blocks, dim=1)


def _far(queries: torch.Tensor, keys: torch.Tensor, seen: Seen) -> torch.Tensor:
    """As `_near`, of the scores out of sight; NaN for all tokens but every `STRIDE`-th."""
    batch, _, _, length, _ = queries.shape
    far = queries.new_full((batch, length, queries.shape[1] * queries.shape[2]), math.nan)
    begin, end = torch.maximum(seen.start, seen.sink_end), seen.near
    for first in range(0, length, _ROWS * STRIDE):
        rows = torch.arange(first, min(first + _ROWS * STRIDE, length), STRIDE, device=queries.device)
        last = int(rows[-1]) + 1
        index = torch.arange(last, device=queries.device)
        hidden = ((index < begin[:, rows]) | (index >= end[:, rows])).expand(batch, -1, -1)
        for row, own in enumerate(queries[:, :, :, rows].flatten(2, 3)):
            far[row, rows] = _log_sum_exp(own, keys[row, :, :last], hidden[row]).T
    return far


def _log_sum_exp(queries: torch.Tensor, keys: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """For queries `[KV, H / KV * R, D]` and the keys `[KV, K, D]` that are not `hidden` `[R, K]`: `[H, R]`."""
    scores = (queries @ keys.transpose(1, 2)).unflatten(1, (-1, len(hidden)))
    return scores.masked_fill_(hidden, -math.inf).logsumexp(-1).flatten(0, 1)
