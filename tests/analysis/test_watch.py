"""The watched pass: what it hands over, and what it leaves behind."""

from dataclasses import is_dataclass

import pytest
import torch

from moh_llm.analysis import features
from moh_llm.analysis.features import feature_rank, head_similarity
from moh_llm.analysis.heads import head_load
from moh_llm.analysis.scores import routing_scores
from moh_llm.analysis.watch import attention_patterns, last_routed_layer, shared_heads, watch
from moh_llm.errors import UserError


def test_a_pass_holds_what_the_loops_compute(make_moh, batch, recompute, plan) -> None:
    model = make_moh(**plan)
    seen = []
    with attention_patterns(model):
        assert watch(model, [batch], seen.append) == 27
    assert [one.layer for one in seen] == [0, 1]
    for one, naive in zip(seen, recompute(model, [batch]), strict=True):
        heads = model.config.num_attention_heads
        assert one.on.flatten(0, 1).tolist() == (naive.gates != 0).tolist()
        got = one.heads.flatten(0, 1)
        torch.testing.assert_close(got, torch.from_numpy(naive.heads), atol=1e-5, rtol=1e-5)
        off = torch.from_numpy(naive.gates == 0)
        assert bool(got[off].any()) == (model.config.head_fallback != "none" and bool(off.any()))
        patterns = torch.stack([torch.from_numpy(pattern) for pattern in naive.patterns]).view(3, 9, heads, 9)
        torch.testing.assert_close(one.patterns.transpose(1, 2).double(), patterns, atol=1e-5, rtol=1e-4)
        local = model.config.local_heads_per_layer[one.layer]
        assert sorted([*shared_heads(one.router), *one.router.routed_heads, *local]) == list(range(heads))
        assert shared_heads(one.router) == model.config.shared_heads_per_layer[one.layer]


def test_a_weighted_score_of_zero_is_still_on(make_moh, batch) -> None:
    model = make_moh(num_shared_heads=1, num_active_heads=3, router_type="linear", router_score="weighted")
    with torch.no_grad():
        for router in model.routers:
            router.routed.weight.zero_()
            router.routed.bias.copy_(torch.tensor([9000.0, 0.0, -9000.0]))
    seen = []
    watch(model, [batch], seen.append)
    for one in seen:
        assert not one.heads[:, :, 2].any()
        assert one.on.all((0, 1)).tolist() == [True, True, True, False]


@pytest.mark.parametrize("before", ["eager", "sdpa"])
def test_the_attention_backend_and_hooks_are_put_back(make_moh, batch, before) -> None:
    model = make_moh()
    model.set_attn_implementation(before)

    def fail(_: object) -> None:
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"), attention_patterns(model):
        watch(model, [batch], fail)
    assert model.config._attn_implementation == before
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks


def test_text_without_tokens_is_refused(make_moh, batch) -> None:
    model = make_moh()
    for nothing in ([], [{name: tensor[:0] for name, tensor in batch.items()}]):
        with pytest.raises(UserError, match="no tokens"):
            watch(model, nothing, lambda seen: None)


def test_the_last_layer_with_routed_heads(make_moh) -> None:
    assert last_routed_layer(make_moh(num_shared_heads=[1, 4], num_active_heads=[2, 4])) == 0
    assert last_routed_layer(make_moh(num_shared_heads=[1, 3], num_active_heads=[2, 3])) == 1
    with pytest.raises(UserError, match="no routed heads"):
        last_routed_layer(make_moh(num_shared_heads=4, num_active_heads=4))


@pytest.mark.parametrize("function", [head_load, routing_scores, head_similarity, feature_rank])
def test_batches_do_not_matter(make_moh, batches, function, monkeypatch) -> None:
    model = make_moh(num_shared_heads=1, num_active_heads=2, router_type="two_stage")
    found = _numbers(function(model, batches))
    monkeypatch.setattr(features, "_ROWS", 4)
    rows = [
        {name: tensor[row : row + 1] for name, tensor in batch.items()}
        for batch in batches
        for row in range(len(batch["input_ids"]))
    ]
    assert _numbers(function(model, rows)) == pytest.approx(found, abs=1e-7)


def _numbers(value) -> list:
    """All numbers in a result, in order."""
    if is_dataclass(value):
        value = list(vars(value).values())
    return [number for part in value for number in _numbers(part)] if isinstance(value, list) else [value]
