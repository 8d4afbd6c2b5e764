"""The watched pass and attention maps against plain loops."""

import numpy as np
import pytest
import torch

from moh_llm.analysis.heads import (
    attention_patterns,
    last_routed_layer,
    watch,
)
from moh_llm.errors import UserError

TEXT = "A mill, two boats"


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


def test_the_last_layer_with_routed_heads(make_moh) -> None:
    assert last_routed_layer(make_moh(num_shared_heads=[1, 4], num_active_heads=[2, 4])) == 0
    assert last_routed_layer(make_moh(num_shared_heads=[1, 3], num_active_heads=[2, 3])) == 1
    with pytest.raises(UserError, match="no routed heads"):
        last_routed_layer(make_moh(num_shared_heads=4, num_active_heads=4))


@pytest.mark.parametrize("layer", [0, 1])
def test_maps_are_the_weights_of_the_loops(make_moh, recompute, tokenizer, plan, layer) -> None:
    model = make_moh(vocab_size=257, **plan)
    ids = torch.tensor([tokenizer(TEXT)["input_ids"]])
    batch = {"input_ids": ids, "position_ids": torch.arange(ids.shape[1])[None]}
    wanted = recompute(model, [batch])[layer]
    seen = []
    with attention_patterns(model):
        watch(model, [batch], seen.append)
    found = seen[layer]
    assert found.layer == layer and found.on[0].tolist() == (np.asarray(wanted.gates) != 0).tolist()
    for query, weights in enumerate(wanted.patterns):  # [H, keys up to the query, or all]
        own = found.patterns[0, :, query].numpy()
        np.testing.assert_allclose(own[:, : query + 1], np.asarray(weights)[:, : query + 1], atol=1e-6)
        assert not own[:, query + 1 :].any()
    assert model.config._attn_implementation == "sdpa"
