"""The compiled rotary embedding is transformers', bit for bit."""

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from moh_llm.attention.compiled import ROTARY, rotary_embedding


def states(device: str, dtype: torch.dtype, rows: int, tokens: int) -> list[torch.Tensor]:
    """Queries and keys as projections leave them, and the cosines and sines of some angles."""
    torch.manual_seed(0)
    by_token = (torch.randn(rows, tokens, heads, 64, device=device, dtype=dtype) for heads in (6, 2))
    angles = 100 * torch.rand(1, tokens, 64, device=device)
    return [*(tensor.transpose(1, 2) for tensor in by_token), angles.cos().to(dtype), angles.sin().to(dtype)]


def check(given: list[torch.Tensor]) -> None:
    for own, expected in zip(rotary_embedding(*given), apply_rotary_pos_emb(*given), strict=True):
        assert torch.equal(own, expected) and own.stride() == expected.stride()


def test_lengths_share_a_compilation(counter):
    for tokens in (5, 70, 300, 1111):
        check(states("cpu", torch.bfloat16, 2, tokens))
    assert counter.frame_count == 1


def test_layers_take_it(make_pair, monkeypatch):
    """In place of LLaMA's own, those with all heads on, too."""
    calls, ids = [], torch.arange(1, 20)[None]

    def rotate(*given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(given)
        return apply_rotary_pos_emb(*given)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, ROTARY, rotate)
    _, moh = make_pair(num_shared_heads=1, num_active_heads=2)
    moh(ids)
    with moh.all_heads_active():
        moh(ids)
    assert len(calls) == 2 * moh.config.num_hidden_layers


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_on_a_gpu(dtype):
    for rows, tokens in ((1, 1000), (2, 300)):
        check(states("cuda", dtype, rows, tokens))
