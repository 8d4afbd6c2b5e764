"""Decoding over a cache against a dense float64 reference; in Triton's interpreter without a GPU."""

import pytest
import torch

pytest.importorskip("triton")

from moh_llm.kernels import head_sparse_decoding as decoding
from moh_llm.kernels.head_sparse_decoding import count_parts, head_sparse_decoding
from tests.modeling.test_head_sparse import DEVICE, TOLERANCES, distance, draw, reference


@pytest.mark.parametrize(
    ("batch", "heads", "groups", "keys", "size", "share", "dtype"),
    [
        (2, 4, 2, 300, 64, 0.5, torch.float32),
        (1, 3, 3, 33, 80, 0.5, torch.float32),  # no groups, few keys, a head size that is no power of two
        (3, 8, 1, 600, 96, 0.3, torch.float32),
        (1, 4, 2, 1, 16, 1.0, torch.float32),  # the first token of all
        (1, 4, 2, 700, 128, 0.0, torch.float32),
        (1, 4, 2, 600, 128, 0.75, torch.bfloat16),
        (2, 6, 2, 530, 64, 0.5, torch.float16),
    ],
)
def test_output_is_that_of_the_reference(batch, heads, groups, keys, size, share, dtype):
    q, k, v, hard, soft, _ = draw(batch, heads, groups, 1, keys, size, share, dtype)
    gate = hard * (1 + soft)  # weighted gates, too
    expected = reference(q, k, v, gate, 0.3)
    # Of groups that are off nothing is read.
    off = ~(gate != 0).view(batch, groups, -1).any(-1)[:, :, None, None]
    k, v = (torch.where(off, torch.nan, x) for x in (k, v))
    got = head_sparse_decoding(q, k, v, gate, 0.3)
    assert got.shape == (batch, 1, heads, size)
    assert distance(got, expected) < TOLERANCES[dtype]
    assert not got[(gate == 0)].any()


def test_padding_and_parts_without_a_key(monkeypatch):
    monkeypatch.setattr(decoding, "SHORTEST_PART", 64)
    q, k, v, hard, _, _ = draw(2, 4, 2, 1, 333, 32, 0.7)
    key_mask = torch.ones(2, 333, dtype=torch.int8, device=DEVICE)
    key_mask[0, :200], key_mask[1, 250:260] = 0, 0  # more than a part; and a hole
    got = head_sparse_decoding(q, k, v, hard, 0.3, key_mask)
    assert distance(got, reference(q, k, v, hard, 0.3, key_mask=key_mask)) < 1e-5


def test_a_head_that_is_off_cannot_spoil_those_it_shares_keys_with():
    q, k, v, hard, _, _ = draw(1, 4, 1, 1, 100, 32, 1.0)
    hard[..., 1] = 0
    expected = reference(q, k, v, hard, 0.3)
    q[:, 1] = torch.nan
    assert distance(head_sparse_decoding(q, k, v, hard, 0.3), expected) < 1e-5


def test_parts_fill_the_device_and_are_no_shorter_than_is_worth_it(monkeypatch):
    monkeypatch.setattr(decoding, "_programs_wanted", lambda device: 264)
    for groups, keys, parts in ((8, 8192, 32), (8, 1000, 2), (8, 100, 1), (512, 32768, 1), (1, 1 << 20, 64)):
        assert count_parts(groups, keys, torch.device("cpu")) == parts
