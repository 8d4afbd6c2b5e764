"""The watched pass against plain loops."""

import numpy as np
import pytest
import torch

from moh_llm.analysis.heads import last_routed_layer, watch
from moh_llm.errors import UserError


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


def test_hooks_are_removed(make_moh, batch) -> None:
    model = make_moh()

    def fail(_: object) -> None:
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        watch(model, [batch], fail)
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks


def test_the_last_layer_with_routed_heads(make_moh) -> None:
    assert last_routed_layer(make_moh(num_shared_heads=[1, 4], num_active_heads=[2, 4])) == 0
    assert last_routed_layer(make_moh(num_shared_heads=[1, 3], num_active_heads=[2, 3])) == 1
    with pytest.raises(UserError, match="no routed heads"):
        last_routed_layer(make_moh(num_shared_heads=4, num_active_heads=4))


@pytest.mark.parametrize("layer", [0, 1])
def test_states_are_those_of_the_loops(make_moh, batches, recompute, plan, layer) -> None:
    model = make_moh(**plan)
    wanted = recompute(model, batches)[layer]
    seen = []
    assert watch(model, batches, seen.append) == 37
    found = [one for one in seen if one.layer == layer]
    on = torch.cat([one.on.flatten(0, 1) for one in found])
    assert on.tolist() == (np.asarray(wanted.gates) != 0).tolist()
    heads = torch.cat([one.heads.flatten(0, 1) for one in found])
    np.testing.assert_allclose(heads.numpy(), wanted.heads, atol=1e-6)
