"""The loop that backends are tested against is masked attention."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from tests.attention.naive import first_of, naive_attention, seen_of


@pytest.mark.parametrize("window", [0, 5])
def test_is_masked_attention(window):
    """With a mask of the intervals, and the distant token as a key, SDPA gives the same."""
    torch.manual_seed(0)
    seen = seen_of([[-3, 17], [12, 8]], queries=15, window=window, sinks=2 if window else 0)
    query = torch.randn(2, 4, 15, 8, dtype=torch.float64)
    key, value = torch.randn(2, 2, 2, 20, 8, dtype=torch.float64)
    distant = torch.randn(2, 15, 4, dtype=torch.float64), torch.randn(4, 8, dtype=torch.float64)
    first = first_of(torch.rand(2, 15, 4) < 0.5, seen)

    place = torch.arange(20)
    is_sink = (place >= seen.start) & (place < seen.sink_end)
    shown = (place <= seen.last)[:, :, None] & ((place >= first[..., None]) | is_sink[:, :, None])  # [B, T, H, S]
    bias = torch.zeros(shown.shape, dtype=torch.float64).masked_fill(~shown, -torch.inf)
    is_far = (first > seen.start) & (seen.hidden > 0)
    far = torch.where(is_far, distant[0] + seen.hidden.clamp_min(1).double().log(), -torch.inf)
    bias = torch.cat([bias, far[..., None]], -1).transpose(1, 2)
    keys = torch.cat([key.repeat_interleave(2, 1), torch.zeros(2, 4, 1, 8)], 2)
    values = torch.cat([value.repeat_interleave(2, 1), distant[1][None, :, None].expand(2, -1, -1, -1)], 2)
    expected = scaled_dot_product_attention(query, keys, values, attn_mask=bias, scale=0.3).transpose(1, 2)
    sees_nothing = (bias == -torch.inf).all(-1).transpose(1, 2)
    expected = expected.masked_fill(sees_nothing[..., None], 0.0)
    torch.testing.assert_close(naive_attention(query, key, value, first, seen, 0.3, distant), expected)
    assert bool(sees_nothing.any()) == (window == 0)
