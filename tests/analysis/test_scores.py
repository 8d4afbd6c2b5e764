"""Score distributions against lists of every score, from the equations."""

import numpy as np
import pytest
import torch

from moh_llm.analysis.scores import BINS, QUANTILES, routing_scores


def check(found, scores: list[float]) -> None:
    assert (found is None) == (not scores)
    if not scores:
        return
    assert found.count == len(scores)
    assert found.mean == pytest.approx(sum(scores) / len(scores), abs=1e-6)
    bins = [0] * BINS
    for score in scores:
        bins[min(int(score * BINS), BINS - 1)] += 1
    assert found.histogram == bins
    wanted = np.quantile(scores, QUANTILES, method="inverted_cdf")
    np.testing.assert_allclose(found.quantiles, wanted, atol=1e-4, rtol=0)


def test_scores_are_those_of_the_equations(make_moh, batches, recompute, plan) -> None:
    model = make_moh(**plan)
    found = routing_scores(model, batches)
    assert len(found) == 2
    for layer, naive in enumerate(recompute(model, batches)):
        shared = model.config.shared_heads_per_layer[layer]
        routed = model.config.routed_heads(layer)
        tokens = list(zip(naive.scores, naive.gates, strict=True))
        check(found[layer].shared, [scores[h] for scores, _ in tokens for h in shared if scores[h] is not None])
        check(found[layer].routed, [scores[h] for scores, _ in tokens for h in routed])
        assert (found[layer].shared is None) == (model.config.router_type != "two_stage")
        check(found[layer].selected, [scores[h] for scores, gate in tokens for h in routed if gate[h] != 0])


def test_certain_routers_fill_the_last_bin(make_moh, batch) -> None:
    model = make_moh(num_shared_heads=2, num_active_heads=3, router_type="linear", dtype=torch.bfloat16)
    with torch.no_grad():
        for router in model.routers:
            router.routed.weight.zero_()
            router.routed.bias.copy_(torch.tensor([800.0, -800.0]))
    for layer in routing_scores(model, [batch]):
        assert layer.selected.histogram[-1] == layer.selected.count == 27 and layer.selected.mean == 1
        assert layer.routed.histogram[0] == 27 and layer.routed.mean == 0.5


def test_the_router_is_left_as_it_was(make_moh, batch, unlike_plan) -> None:
    model = make_moh(**unlike_plan)
    with torch.no_grad():
        before = model(**{name: batch[name] for name in ("input_ids", "position_ids")}, use_cache=False).logits
        state = [dict(vars(router)) for router in model.routers]
        routing_scores(model, [batch])
        assert [dict(vars(router)) for router in model.routers] == state
        after = model(**{name: batch[name] for name in ("input_ids", "position_ids")}, use_cache=False).logits
    assert torch.equal(before, after)
