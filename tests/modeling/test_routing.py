"""Gradients of the gate, the load-balance loss, recorded router logits, and the head budget at run time."""

import numpy as np
import pytest
import torch

from moh_llm.modeling import MoHLlamaConfig, MoHRouter, load_balancing_loss


def make_router(score: str, router_type: str = "linear", group_size: int = 1) -> MoHRouter:
    config = MoHLlamaConfig(
        **{"hidden_size": 12, "num_attention_heads": 6, "num_key_value_heads": 6 // group_size, "num_hidden_layers": 1},
        **{"num_shared_heads": 2, "num_active_heads": 4, "router_type": router_type, "router_score": score},
        routing_granularity="kv_group" if group_size > 1 else "head",
    )
    torch.manual_seed(0)
    return MoHRouter(config, 0).double()


@pytest.mark.parametrize("group_size", [1, 2], ids=["heads", "groups of 2"])
@pytest.mark.parametrize("router_type", ["linear", "query_norm", "two_stage"])
def test_straight_through_gradient_is_the_real_valued_scores_gradient(router_type, group_size):
    x = torch.randn(2, 5, 12, dtype=torch.float64, requires_grad=True)
    queries = torch.randn(2, 5, 6, 2, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 5, 6, dtype=torch.float64)
    router = make_router("quantized", router_type, group_size)

    def real_valued(x: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
        """All groups' real-valued scores, written out again from the equations."""
        ones = torch.ones(2, 5, 2 // group_size, dtype=x.dtype)
        if router_type == "query_norm":
            norms = queries[:, :, 2:].reshape(2, 5, 4 // group_size, -1).pow(2).sum(-1).sqrt()
            routed = (norms / norms.std(-1, keepdim=True)).softmax(-1)
            return torch.cat([ones, routed], -1)
        routed = (x @ router.routed.weight.T + (0 if router.routed.bias is None else router.routed.bias)).softmax(-1)
        if router_type == "linear":
            return torch.cat([ones, routed], -1)
        stage = (x @ router.stage.weight.T).softmax(-1)
        shared = (x @ router.shared.weight.T).softmax(-1)
        return torch.cat([stage[..., :1] * shared, stage[..., 1:] * routed], -1)

    inputs = [x, queries, *router.parameters()]
    _, gate = router(x, queries)
    assert set(gate.unique().tolist()) == {0.0, 1.0} and (gate.sum(-1) == 4).all()
    got = torch.autograd.grad((gate * weight).sum(), inputs, allow_unused=True)
    by_group = weight.unflatten(-1, (-1, group_size)).sum(-1)
    expected = torch.autograd.grad((real_valued(x, queries) * by_group).sum(), inputs, allow_unused=True)
    for a, b in zip(got, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("norm", [0.0, 1.0, 1e4])
def test_heads_of_equal_norm_are_routed(norm):
    """Copied heads, as in an upcycled model: no spread to divide by, and still a clean choice."""
    router = make_router("quantized", "query_norm").float()
    logits, gate = router(torch.randn(1, 3, 12), torch.full((1, 3, 6, 2), norm))
    assert logits.isfinite().all()
    assert set(gate.unique().tolist()) == {0.0, 1.0} and (gate.sum(-1) == 4).all()


@pytest.mark.parametrize(("score", "row_weights"), [("weighted", None), ("weighted", [3, 1]), ("normalized", None)])
def test_balance_loss_is_the_equation(score, row_weights):
    generator = torch.Generator().manual_seed(0)
    logits = [torch.randn(2, 7, groups, generator=generator, dtype=torch.float64) for groups in (3, 4, 5)]
    mask = torch.ones(2, 7)
    mask[0, :3] = 0
    expected = 0
    for layer, k in zip(logits, (1, 2, 5), strict=True):
        for row, tokens in enumerate([layer[0, 3:], layer[1]]):
            groups = layer.shape[-1]
            f = [0.0] * groups
            for token in tokens:
                for head in token.argsort(descending=True)[:k]:
                    f[head] += 1 / len(tokens)
            p = [sum(token.softmax(-1)[head] for token in tokens) / len(tokens) for head in range(groups)]
            # By default a row counts by its tokens.
            weight = (row_weights or [4, 7])[row] / sum(row_weights or [4, 7])
            factor = groups if score == "normalized" else 1
            expected += factor * weight * sum(a * b for a, b in zip(p, f, strict=True)) / 3
    weights = None if row_weights is None else torch.tensor(row_weights)
    got = load_balancing_loss(logits, (1, 2, 5), mask, weights, score)
    torch.testing.assert_close(got, expected)


def test_router_logits_are_recorded_on_demand(make_pair, ids):
    _, moh = make_pair(num_shared_heads=[1, 4], num_active_heads=[2, 4], router_type="linear")
    with torch.no_grad():
        assert moh(ids).get("router_logits") is None
        output = moh(ids, output_router_logits=True, labels=ids)
        plain = moh(ids, labels=ids)
    assert [tuple(layer.shape) for layer in output.router_logits] == [(3, 24, 3), (3, 24, 0)]
    torch.testing.assert_close(output.aux_loss, load_balancing_loss(output.router_logits, [1, 0]))
    torch.testing.assert_close(output.loss, plain.loss + 0.01 * output.aux_loss)


def test_active_heads_at_run_time(make_pair, ids):
    _, moh = make_pair(num_shared_heads=1, num_active_heads=2, router_type="query_norm")
    with torch.no_grad():
        two = moh(ids).logits
        moh.set_active_heads([3, 2])
        assert not torch.equal(moh(ids).logits, two)
        assert [router.num_active for router in moh.routers] == [3, 2]
        with moh.all_heads_active():
            assert [router.num_active for router in moh.routers] == [4, 4]
        assert [router.num_active for router in moh.routers] == [3, 2]
        moh.set_active_heads(None)
        assert torch.equal(moh(ids).logits, two)
        moh.set_active_heads(np.arange(4)[2])
        assert [type(router.num_active) for router in moh.routers] == [int, int]
    with pytest.raises(ValueError, match=r"num_active_heads=5 must lie between .* \(layer 0\)"):
        moh.set_active_heads(5)
    with pytest.raises(ValueError, match=r"^num_active_heads has 3 entries for 2 layers; give one each, or one"):
        moh.set_active_heads([2, 2, 2])


def test_the_balance_loss_of_groups(make_pair, ids):
    _, moh = make_pair(num_shared_heads=0, num_active_heads=2, router_type="linear", routing_granularity="kv_group")
    with torch.no_grad():
        output = moh(ids, output_router_logits=True)
    assert [tuple(layer.shape) for layer in output.router_logits] == [(3, 24, 2)] * 2
    torch.testing.assert_close(output.aux_loss, load_balancing_loss(output.router_logits, [1, 1]))


def test_a_threshold_has_one_number_of_heads_and_no_balance(make_pair, ids):
    base, moh = make_pair(num_shared_heads=1, num_active_heads=[2, 3], router_type="threshold")
    with torch.no_grad():
        output = moh(ids, output_router_logits=True, labels=ids)
        assert output.aux_loss == 0 and torch.equal(output.loss, moh(ids, labels=ids).loss)
        on = [(logits > 0).sum(-1) for logits in output.router_logits]
        assert all(len(counts.unique()) > 1 for counts in on)  # tokens differ in their number of heads
        with pytest.raises(ValueError, match=r"must be 2, the mean number .*, or be .*=4 \(layer 0\)"):
            moh.set_active_heads(3)
        with moh.all_heads_active():
            assert torch.equal(moh(ids).logits, base(ids).logits)
        assert torch.equal(moh(ids).logits, output.logits)


def test_scores_are_float32_in_a_bfloat16_model_and_the_gate_is_exact(make_pair, ids):
    _, moh = make_pair(dtype=torch.bfloat16, num_shared_heads=1, num_active_heads=2, router_type="linear")
    logits, gate = moh.routers[0](torch.randn(1, 99, 32).bfloat16(), torch.randn(1, 99, 4, 8).bfloat16())
    assert logits.dtype == gate.dtype == torch.float32 and set(gate.unique().tolist()) == {0.0, 1.0}
    with torch.no_grad():
        assert moh(ids).logits.dtype == torch.bfloat16
