"""Attention in halves equals a loop in float64, so do its gradients, and the model with it the one without."""

import pytest
import torch
from moh_llm.modeling.flash_attention_moh import (
    attention_with_halved_gradients,
    halved_attention,
    has_uneven_gradients,
    is_uneven,
)
from torch.nn.functional import scaled_dot_product_attention

from moh_llm.modeling import computed_heads_moh, flash_attention_moh, selected_attention_moh
from tests.modeling.test_local_attention import inputs, naive
from tests.modeling.test_selected_attention import EVERYTHING, LENGTH


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "kv"), [(1, 1), (3, 1), (4, 4), (6, 2)])
@pytest.mark.parametrize(("length", "batch"), [(2, 1), (64, 1), (65, 2), (701, 1)])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float64, 1e-12)])
def test_halves_are_causal_attention(dtype, bound, length, batch, heads, kv) -> None:
    given = inputs(length, heads=heads, kv=kv, dtype=dtype, batch=batch)
    expected = naive(*given, torch.zeros(1, length, dtype=torch.long), EVERYTHING, 0, 0.3)
    found = halved_attention(*given[:3], 0.3)
    assert found.shape == expected.shape and found.dtype == dtype
    assert (found.double() - expected).norm() < bound * expected.norm()


def test_halves_are_taken_where_a_thread_has_more_work(monkeypatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)

    def asks(heads: int, length: int, more_keys: int = 0) -> bool:
        return is_uneven(torch.zeros(1, heads, length, 8), torch.zeros(1, 1, length + more_keys, 8))

    with torch.no_grad():
        assert asks(1, 8192) and asks(5, 8192)
        assert not asks(2, 8192) and not asks(9, 8192) and not asks(1, 2048) and not asks(1, 8192, more_keys=1)
    assert not asks(1, 8192)  # with gradients


@pytest.mark.parametrize("router_type", ["none", "threshold"])
def test_the_model_with_halves_is_that_without(make_pair, router_type, monkeypatch) -> None:
    fixed = {"shared_heads": [[1], [2, 3]], "local_heads": [[0, 2, 3], [0, 1]]}  # alone, and a whole group
    plan = {"router_type": router_type, "head_fallback": "local", "local_window": 64, "local_start": 256}
    plan |= (
        fixed | {"num_active_heads": [1, 2], "num_shared_heads": [1, 2]}
        if router_type == "none"
        else {"shared_heads": [[1], [0]], "local_heads": [[0], [2, 3]]}
    )
    _, moh = make_pair(max_position_embeddings=2048, **{"num_shared_heads": 1, "num_active_heads": 2} | plan)
    ids = torch.randint(1, 257, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    calls = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)

    def halved(*given):
        calls.append(given[0].shape[1])
        return halved_attention(*given)

    monkeypatch.setattr(computed_heads_moh, "halved_attention", halved)
    with torch.no_grad():
        moh(ids)
        assert not calls
        moh.set_attn_implementation("eager")  # computes all heads
        expected = moh(ids).logits
        moh.set_attn_implementation("sdpa")
        monkeypatch.setattr(flash_attention_moh, "_LEAST_HALVES", 1000)
        if router_type == "threshold":  # heads that are always on go to dense attention
            monkeypatch.setattr(selected_attention_moh, "_OVERHEAD", 1)
            monkeypatch.setattr(selected_attention_moh, "_OVERHEAD_AMX", 1)
        found = moh(ids).logits
    assert calls and all(heads % 2 for heads in calls)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("heads", "kv"), [(1, 1), (3, 1), (4, 4), (6, 2)])
@pytest.mark.parametrize(("length", "batch"), [(4, 1), (6, 2), (64, 1), (65, 2), (67, 2), (701, 1)])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float64, 1e-12)])
def test_halved_gradients_are_those_of_causal_attention(dtype, bound, length, batch, heads, kv) -> None:
    given = inputs(length, heads=heads, kv=kv, dtype=dtype, batch=batch)[:3]
    wanted = torch.randn(batch, length, heads, given[0].shape[-1], generator=torch.Generator().manual_seed(2))
    own, exact = ([tensor.to(of).detach().requires_grad_() for tensor in given] for of in (dtype, torch.float64))
    found = attention_with_halved_gradients(*own, 0.3)
    with torch.no_grad():
        whole = scaled_dot_product_attention(*own, is_causal=True, scale=0.3, enable_gqa=True)
    assert torch.equal(found, whole.transpose(1, 2))
    queries, *read = exact
    scores = queries @ read[0].repeat_interleave(heads // kv, 1).transpose(2, 3) * 0.3
    scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf)
    expected = (scores.softmax(-1) @ read[1].repeat_interleave(heads // kv, 1)).transpose(1, 2)
    expected.backward(wanted.double())
    found.backward(wanted.to(dtype))
    for tensor, reference in zip(own, exact, strict=True):
        assert tensor.grad.dtype == dtype
        assert (tensor.grad.double() - reference.grad).norm() < bound * reference.grad.norm()


def test_gradients_are_halved_where_a_thread_has_more_work(monkeypatch) -> None:
    def asks(threads: int, kv: int, length: int = 2048, batch: int = 1, more_keys: int = 0) -> bool:
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        queries, keys = torch.zeros(batch, 6, length, 1), torch.zeros(batch, kv, length + more_keys, 1)
        return has_uneven_gradients(queries, keys)

    assert asks(2, 3) and asks(2, 1) and asks(16, 3)
    assert not asks(2, 2) and not asks(1, 3) and not asks(2, 3, batch=2)
    assert not asks(2, 3, length=1024) and not asks(2, 3, more_keys=1)
    with torch.no_grad():
        assert not asks(2, 3)


@pytest.mark.slow
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("router_type", ["none", "threshold"])
def test_training_with_halved_gradients_is_that_without(make_pair, router_type, autocast, monkeypatch) -> None:
    fixed = {"shared_heads": [[1], [2, 3]], "local_heads": [[0, 2, 3], [0, 1]], "num_active_heads": [1, 2]}
    plan = {"router_type": router_type, "head_fallback": "local", "local_window": 64, "local_start": 256}
    plan |= fixed | {"num_shared_heads": [1, 2]} if router_type == "none" else {"shared_heads": [[1], [0]]}
    _, moh = make_pair(max_position_embeddings=2048, **{"num_shared_heads": 1, "num_active_heads": 2} | plan)
    ids = torch.randint(1, 257, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    calls = []

    def halved(*given):
        calls.append(given[0].shape[1])
        return attention_with_halved_gradients(*given)

    monkeypatch.setattr(computed_heads_moh, "attention_with_halved_gradients", halved)

    def gradients() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        moh.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = moh(ids, labels=ids).loss
        loss.backward()
        return loss.detach(), {name: w.grad.clone() for name, w in moh.named_parameters() if w.grad is not None}

    loss, expected = gradients()
    assert not calls
    monkeypatch.setattr(flash_attention_moh, "_LEAST_HALF_GRADIENTS", 1000)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)  # more than there are heads
    again, found = gradients()
    assert calls and torch.equal(again, loss) and found.keys() == expected.keys()
    for name, gradient in found.items():
        bound = (3e-2 if autocast else 1e-4) * expected[name].norm()
        assert (gradient - expected[name]).norm() <= bound, name
