"""Local attention equals a loop over queries in float64."""

import math
from collections.abc import Iterator

import pytest
import torch
from moh_llm.modeling.cache_moh import as_slice
from moh_llm.modeling.documents_moh import Band
from moh_llm.modeling.local_attention_moh import local_attention

from moh_llm.modeling import local_attention_moh


def naive(queries, keys, values, positions, starts, window, sinks, scaling, dropout=0.0, distant=None) -> torch.Tensor:
    queries, keys, values = queries.double(), keys.double(), values.double()
    batch, heads, length, _ = queries.shape
    group = heads // keys.shape[1]
    out = torch.zeros(batch, length, heads, values.shape[-1], dtype=torch.float64)
    for b in range(batch):
        for t in range(length):
            p = int(positions[0, t])
            s = min(int(starts[b % starts.shape[0], t]), p)
            seen = [j for j in range(s, p + 1) if j > p - window or j < s + sinks]
            for h in range(heads):
                scores, seen_values = (
                    keys[b, h // group, seen] @ queries[b, h, t] * scaling,
                    values[b, h // group, seen],
                )
                hidden = p - s + 1 - len(seen)
                if distant is not None and hidden > 0:
                    score = distant[0][b, h, t].double() + math.log(hidden)
                    scores, seen_values = (
                        torch.cat([scores, score[None]]),
                        torch.cat([seen_values, distant[1][None, h]]),
                    )
                out[b, t, h] = scores.softmax(-1) @ seen_values
    return out


@pytest.fixture(params=["training", "inference", "training on other devices"])
def mode(request, monkeypatch) -> Iterator[None]:
    """Each is computed in its own way."""
    if request.param == "training on other devices":
        monkeypatch.setattr(local_attention_moh, "has_flash_kernel", lambda tensor: False)
    with torch.set_grad_enabled(request.param != "inference"):
        yield


def banded(queries, keys, values, positions, starts, window, sinks, scaling, dropout=0.0, distant=None, groups=None):
    band = Band.of(positions, starts, window, sinks)
    return local_attention(queries, keys, values, band, scaling, dropout, distant, groups)


def inputs(length, cached=0, heads=4, kv=2, batch=2, dtype=torch.float32, after=0):
    generator = torch.Generator().manual_seed(length + 31 * cached)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)  # noqa: E731
    total = cached + length + after
    tensors = draw(batch, heads, length, 8), draw(batch, kv, total, 8), draw(batch, kv, total, 8)
    return (*tensors, torch.arange(cached, cached + length)[None])


def distant_token(queries):
    generator = torch.Generator().manual_seed(3)
    scores = torch.randn(queries.shape[:-1], generator=generator, dtype=queries.dtype)
    return scores, torch.randn(queries.shape[1], queries.shape[-1], generator=generator, dtype=queries.dtype)


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize("distant", [False, True])
@pytest.mark.parametrize(("heads", "kv"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize(("window", "sinks"), [(4, 2), (1, 0), (5, 7), (64, 4)])
@pytest.mark.parametrize(("length", "cached"), [(1, 0), (1, 23), (13, 0), (16, 0), (7, 20), (33, 2)])
def test_is_the_loop(heads, kv, window, sinks, length, cached, distant) -> None:
    given = (*inputs(length, cached, heads, kv), torch.zeros(1, 1, dtype=torch.long).expand(1, length))
    given = (*given, window, sinks, 0.3, 0.0, distant_token(given[0]) if distant else None)
    torch.testing.assert_close(banded(*given).double(), naive(*given), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize("window", [2, 4, 8])
def test_documents_and_padding(window) -> None:
    length = 29
    given = inputs(length, batch=3)
    starts = torch.zeros(3, length, dtype=torch.long)
    starts[0, 9:], starts[0, 10:], starts[0, 14:] = 9, 10, 14  # packed, one of them of one token
    starts[1] = 11  # padding on the left
    given = (*given, starts, window, 3, 0.3, 0.0, distant_token(given[0]))
    found, expected = banded(*given), naive(*given)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize("start", [0, 9, 33])  # with the last one not all keys of the band are its row's
def test_a_step_whose_rows_begin_at_the_same_key(start) -> None:
    given = (*inputs(1, 37, heads=6, kv=3, batch=2), torch.full((2, 1), start), 8, 3, 0.3)
    distant = distant_token(given[0])
    found, expected = banded(*given, 0.0, distant), naive(*given, 0.0, distant)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    band = Band.of(given[3], given[4], 8, 3)
    assert (band.step is not None) == (start < 33)
    for heads, groups in ((slice(0, 6, 2), [0, 1, 2]), (slice(0, 4), [0, 1]), ([0, 1, 4, 5], [0, 2])):
        own = (given[0][:, heads], given[1], given[2], band, 0.3, 0.0, (distant[0][:, heads], distant[1][heads]))
        for ids in (torch.tensor(groups), as_slice(groups)):
            found = local_attention(*own, ids)
            torch.testing.assert_close(found.double(), expected[:, :, heads], rtol=1e-5, atol=1e-5)


def test_what_a_static_cache_holds_later_is_not_read() -> None:
    queries, keys, values, positions = inputs(5, 9, after=12)
    starts = torch.zeros_like(positions)
    found = banded(queries, keys, values, positions, starts, 4, 2, 0.3)
    keys[:, :, 14:], values[:, :, 14:] = 1e9, 1e9
    assert banded(queries, keys, values, positions, starts, 4, 2, 0.3).equal(found)


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("distant", [False, True])
@pytest.mark.parametrize(("heads", "kv"), [(4, 4), (4, 2), (6, 1)])
def test_gradients_are_the_loops(heads, kv, distant, on_cpu, monkeypatch) -> None:
    if not on_cpu:
        monkeypatch.setattr(local_attention_moh, "has_flash_kernel", lambda tensor: False)
    given = inputs(19, heads=heads, kv=kv, dtype=torch.float64)
    starts = torch.zeros(2, 19, dtype=torch.long)
    starts[0, 7:] = 7  # packed
    grads = []
    for function in (banded, naive):
        leaves = [tensor.clone().requires_grad_() for tensor in (*given[:3], *distant_token(given[0]))]
        out = function(*leaves[:3], given[3], starts, 4, 2, 0.3, 0.0, tuple(leaves[3:]) if distant else None)
        out.square().sum().backward()
        grads.append([leaf.grad for leaf in leaves[: 5 if distant else 3]])
    for found, expected in zip(*grads, strict=True):
        torch.testing.assert_close(found, expected)


def test_gradients_of_a_model_in_lower_precision(make_pair, monkeypatch) -> None:
    """Under autocast, of every weight, with heads of which all tokens, some and none are on."""
    plan = {
        "router_type": "threshold",
        "head_fallback": "local",
        "local_window": 8,
        "local_sinks": 2,
        "local_start": 16,
    }
    plan |= {"num_shared_heads": 1, "num_active_heads": 2, "shared_heads": [[1], [0]], "local_heads": [[0], [2, 3]]}
    _, moh = make_pair(**plan)
    ids = torch.randint(1, 257, (2, 60), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(60).expand(2, -1).clone()
    positions[0, 33:] -= 33

    def gradients(enabled: bool) -> dict[str, torch.Tensor]:
        moh.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            moh(ids, labels=ids, position_ids=positions, use_cache=False).loss.backward()
        return {name: weight.grad.clone() for name, weight in moh.named_parameters() if weight.grad is not None}

    found, low = gradients(False), gradients(True)
    monkeypatch.setattr(local_attention_moh, "has_flash_kernel", lambda tensor: False)
    expected, expected_low = gradients(False), gradients(True)
    assert found.keys() == low.keys() == expected.keys() and any("distant" in name for name in found)
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 1e-4 * gradient.norm(), name
        error = (expected_low[name] - gradient).norm()  # what autocast itself does
        assert (low[name] - gradient).norm() <= max(1.5 * error, 0.05 * gradient.norm()), name


@pytest.mark.parametrize("is_trained", [True, False])
@pytest.mark.parametrize("router_type", ["threshold", "none"])
def test_attention_in_another_dtype_than_its_queries(make_pair, monkeypatch, router_type, is_trained) -> None:
    """As under autocast on CUDA, where rotary embedding gives float32; in the second layer no head is on for all."""
    fields = {"router_type": router_type, "num_shared_heads": [1, 0], "num_active_heads": [1, 0]}
    fields |= {"head_fallback": "local", "local_window": 4, "local_sinks": 3, "local_start": 9}
    _, moh = make_pair(**fields, shared_heads=[[0], []], local_heads=[[1, 2, 3], [0, 1, 2, 3]])
    ids = torch.randint(1, 257, (1, 60), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = moh(ids, use_cache=False).logits
    attend = torch.nn.functional.scaled_dot_product_attention

    def in_bfloat16(query, key, value, attn_mask=None, **kwargs):
        mask = attn_mask.bfloat16() if attn_mask is not None and attn_mask.is_floating_point() else attn_mask
        with torch.autocast("cpu", enabled=False):
            return attend(query.bfloat16(), key.bfloat16(), value.bfloat16(), attn_mask=mask, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", in_bfloat16)
    monkeypatch.setattr(local_attention_moh, "scaled_dot_product_attention", in_bfloat16)
    monkeypatch.setattr(local_attention_moh, "has_flash_kernel", lambda tensor: False)
    with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(is_trained):
        logits = moh(ids, use_cache=False).logits
    if is_trained:
        logits.float().sum().backward()
    assert (logits - expected).norm() <= 0.05 * expected.norm()


def test_where_everything_is_seen() -> None:
    queries, keys, values, positions = inputs(12, kv=4)
    starts = torch.zeros_like(positions)
    full = torch.nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=0.3)
    found = banded(queries, keys, values, positions, starts, 4, 2, 0.3)
    same = (found - full.transpose(1, 2)).abs().amax((0, 2, 3)) < 1e-5
    assert same.tolist() == Band.of(positions, starts, 4, 2).all_on[0].tolist() == [True] * 6 + [False] * 6
