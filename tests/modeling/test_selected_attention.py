"""Attention of selected queries equals a loop in float64, and the model that uses it the one that does not."""

import pytest
import torch
from moh_llm.modeling.selected_attention_moh import _calls, selected_attention

from moh_llm.modeling import computed_heads_moh, selected_attention_moh
from tests.modeling.test_local_attention import inputs, naive

EVERYTHING = 10**6  # as a window: the loop is then causal attention


@pytest.fixture
def small_blocks(monkeypatch) -> None:
    monkeypatch.setattr(selected_attention_moh, "_BLOCK", 8)


def choose(queries: torch.Tensor, share: float) -> torch.Tensor:
    batch, heads, length, _ = queries.shape
    return torch.rand(batch, length, heads, generator=torch.Generator().manual_seed(5)) < share


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize(("heads", "kv"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize(("length", "cached"), [(1, 0), (1, 23), (8, 0), (61, 0), (64, 8), (37, 50)])
def test_is_the_loop(length, cached, heads, kv, share) -> None:
    given = (*inputs(length, cached, heads, kv, after=3), torch.zeros(1, length, dtype=torch.long))
    selected = choose(given[0], share)
    expected = naive(*given, EVERYTHING, 0, 0.3) * selected.unsqueeze(-1)
    found = selected_attention(*given[:3], selected, *given[3:], 0.3)
    if length == 1:  # any value elsewhere
        found = found * selected.unsqueeze(-1)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("share", [0.2, 0.5, 1.0])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_decoding_with_padding(threads, share, monkeypatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    given = inputs(1, 37, heads=6, kv=3, batch=6, after=5)
    starts = torch.tensor([0, 11, 11, 11, 11, 37])[:, None]  # the last row begins here
    selected = choose(given[0], share)
    expected = naive(*given, starts, EVERYTHING, 0, 0.3)
    found = selected_attention(*given[:3], selected, given[3], starts, 0.3)
    torch.testing.assert_close(found.double()[selected], expected[selected], rtol=1e-5, atol=1e-5)
    assert found.isfinite().all()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_calls_of_a_step_read_what_is_selected_once(threads) -> None:
    flags = [True, False, True, True, True, False, True, True, False, True]
    whole, left = _calls(flags, threads)
    places = [place for part in (*whole, *left) for place in range(len(flags))[part]]
    assert sorted(places) == [place for place, flag in enumerate(flags) if flag]
    assert all(len(range(len(flags))[part]) % threads == 0 for part in whole)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float64, 1e-12)])
def test_precision_with_whole_blocks(dtype, bound) -> None:
    given = (*inputs(700, dtype=dtype, batch=1), torch.zeros(1, 700, dtype=torch.long))
    selected = choose(given[0], 0.5)
    full = torch.nn.functional.scaled_dot_product_attention(
        *(tensor.double() for tensor in given[:3]), is_causal=True, scale=0.3, enable_gqa=True
    )
    expected = full.transpose(1, 2) * selected.unsqueeze(-1)
    found = selected_attention(*given[:3], selected, *given[3:], 0.3)
    assert (found.double() - expected).norm() < bound * expected.norm()


@pytest.mark.usefixtures("small_blocks")
def test_documents_and_padding() -> None:
    length = 45
    given = inputs(length, batch=3)
    starts = torch.zeros(3, length, dtype=torch.long)
    starts[0, 9:], starts[0, 10:], starts[0, 30:] = 9, 10, 30  # packed, one of them of one token
    starts[1] = 21  # padding on the left
    selected = choose(given[0], 0.6)
    expected = naive(*given, starts, EVERYTHING, 0, 0.3) * selected.unsqueeze(-1)
    expected[1, :21] = 0
    found = selected_attention(*given[:3], selected, given[3], starts, 0.3)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


LENGTH = 1100
PLANS = {
    "default": {
        "router_type": "threshold",
        "head_fallback": "local",
        "local_window": 64,
        "shared_heads": [[1], [0]],
        "local_heads": [[0], [2, 3]],
    },
    "start": {"router_type": "threshold", "head_fallback": "local", "local_window": 64, "local_start": 256}
    | {"shared_heads": [[1], [0]], "local_heads": [[0], [2, 3]]},
    "by groups": {"head_fallback": "local", "local_window": 64, "num_active_heads": 2, "num_shared_heads": 0}
    | {"routing_granularity": "kv_group", "router_type": "linear"},
    "value fallbacks": {"router_type": "linear", "head_fallback": "value"},
    "the paper's layer": {"router_type": "query_norm"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_the_model_is_that_without_it(make_pair, name, monkeypatch) -> None:
    plan = {"num_shared_heads": 1, "num_active_heads": 2} | PLANS[name]
    _, moh = make_pair(max_position_embeddings=2048, **plan)
    calls = []
    monkeypatch.setattr(
        computed_heads_moh,
        "selected_attention",
        lambda *given: calls.append(given[0].shape[2]) or selected_attention(*given),
    )
    ids = torch.randint(1, 257, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    mask, packed = torch.ones_like(ids), torch.arange(LENGTH)[None].expand(2, -1).clone()
    mask[1, :300] = 0
    packed[0, 500:] -= 500
    cases = [
        ({}, slice(None)),
        ({"attention_mask": mask}, mask.bool()),
        ({"position_ids": packed, "use_cache": False}, slice(None)),
    ]
    for given, rows in cases:
        with torch.no_grad():
            found = moh(ids, **given).logits
        assert calls
        calls.clear()
        expected = moh(ids, **given).logits.detach()  # with gradients heads are masked
        assert not calls
        torch.testing.assert_close(found[rows], expected[rows], rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        cache = moh(ids[:1, :20]).past_key_values
        found = moh(ids[:1, 20:], past_key_values=cache).logits
        assert calls
        torch.testing.assert_close(found, moh(ids[:1]).logits[:, 20:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", PLANS)
def test_autocast_is_left_to_dense_attention(make_pair, name) -> None:
    _, moh = make_pair(max_position_embeddings=2048, **{"num_shared_heads": 1, "num_active_heads": 2} | PLANS[name])
    ids = torch.randint(1, 257, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = moh(ids).logits.detach()
        with torch.no_grad():
            torch.testing.assert_close(moh(ids).logits, expected)


def test_masks_of_ones_own_and_all_heads_on_are_left_to_dense_attention(make_pair, monkeypatch) -> None:
    dense, moh = make_pair(max_position_embeddings=2048, num_shared_heads=1, num_active_heads=2, router_type="linear")
    monkeypatch.setattr(computed_heads_moh, "selected_attention", None)
    ids = torch.randint(1, 257, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    last = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().triu(-9)[None, None]
    with torch.no_grad():
        moh(ids, attention_mask=last)
        with moh.all_heads_active():
            assert moh(ids).logits.equal(dense(ids).logits)
