"""The heads that each token has on, as `heads_on` reads them, against the naive loop."""

import numpy as np
import pytest
import torch

from moh_llm.analysis.heads import heads_on
from moh_llm.modeling import MoHLlamaForCausalLM
from tests.modeling import naive
from tests.modeling.test_forward import GROUPS, plan

START = 12  # first tokens that have all heads on, where not just those that see every key have
LOCAL = {"head_fallback": "local", "local_window": 5, "local_sinks": 2}
SIZES = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72}
PLANS = {
    "paper": plan(2, 3, "query_norm"),
    "weighted": plan(2, 3, "two_stage", router_score="weighted"),
    "value": plan([1, 4, 1], [2, 4, 2], head_fallback="value", num_hidden_layers=3),
    "local, top k": plan(1, 2, **LOCAL),
    "local, threshold, never on": plan(1, 2, "threshold", never_on_heads=[[3], [1, 2]], local_start=START, **LOCAL),
    "local, fixed": plan([2, 0], [2, 0], "none", local_start=START, **LOCAL),
    "groups": plan(3, 6, "linear", routing_granularity="kv_group", head_fallback="value", **SIZES)
    | {"shared_heads": GROUPS["3 heads"]["shared_heads"]},
    "groups, threshold": plan(
        3, 4, "threshold", routing_granularity="kv_group", never_on_heads=[[0, 1, 2], [6, 7, 8]], **SIZES, **LOCAL
    )
    | {"shared_heads": [[3, 4, 5], [0, 1, 2]], "num_active_heads": 6, "local_start": START},
}


def by_loops(moh: MoHLlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """The gates of the naive loop that are not zero, `[B, layers, T, H]`."""
    weights = {name: tensor.double().numpy() for name, tensor in moh.state_dict().items()}
    rows = [naive.decode(moh.config, weights, row)[1] for row in ids.numpy()]
    return torch.from_numpy(np.array([[layer.gates != 0 for layer in row] for row in rows]))


@pytest.mark.parametrize("fields", PLANS.values(), ids=PLANS)
def test_heads_on_are_those_of_the_naive_loop(make_pair, ids, fields):
    _, moh = make_pair(dtype=torch.float64, **fields)
    gates = []  # that multiply the heads
    handles = [router.register_forward_hook(lambda *seen: gates.append(seen[2][1] != 0)) for router in moh.routers]
    found, wanted = heads_on(moh, ids), by_loops(moh, ids)
    assert found.dtype == torch.bool and torch.equal(found, wanted) and torch.equal(found, torch.stack(gates, 1))
    for handle in handles:
        handle.remove()
    first = moh.config.all_heads_until if moh.config.head_fallback == "local" else 0
    assert found[:, :, :first].all() and not found[:, :, first:].all()
    assert heads_on(moh, ids[:, : max(1, first)]).all() == bool(first)
    with moh.all_heads_active():
        assert heads_on(moh, ids).all()
    assert torch.equal(heads_on(moh, ids), wanted)
    assert torch.equal(heads_on(moh.model, ids), wanted)
    assert not any(module._forward_hooks for module in moh.modules())
