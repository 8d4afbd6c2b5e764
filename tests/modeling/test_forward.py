"""The model against the naive loop and the dense base."""

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import StaticCache

from tests.modeling import naive


def plan(shared, active, router_type="linear", **fields) -> dict:
    return {"num_shared_heads": shared, "num_active_heads": active, "router_type": router_type} | fields


PLANS = {
    "paper": plan(2, 3, "query_norm"),
    "linear": plan(1, 2),
    "two_stage": plan(1, 3, "two_stage"),
    "no shared head": plan(0, 2),
    "normalized": plan([2, 4], [3, 4], "two_stage", router_score="normalized"),
    "normalized, few shared": plan([1, 0], [3, 2], "two_stage", router_score="normalized"),
    "normalized, none routed on": plan([2, 1], [2, 1], "two_stage", router_score="normalized"),
    "fallbacks": plan([1, 4], [2, 4], head_fallback="value"),
    "local": plan(1, 2, head_fallback="local", local_window=5, local_sinks=2),
    "local, no sinks": plan([1, 0], [2, 1], "query_norm", head_fallback="local", local_window=3, local_sinks=0),
    "local, start": plan(
        1,
        2,
        "threshold",
        head_fallback="local",
        local_window=4,
        local_sinks=2,
        local_start=9,
        never_on_heads=[[3], [1, 2]],
    ),
    "local, fixed, start": plan(
        *([2, 0], [2, 0], "none"), head_fallback="local", local_window=4, local_sinks=1, local_start=12
    ),
    "threshold": plan(1, 2, "threshold"),
    "explicit ids": plan(2, 3, "query_norm", shared_heads=[[1, 3], [0, 2]]),
    "odd": plan(1, 3, "two_stage", num_attention_heads=5, num_key_value_heads=5, hidden_size=40),
    "head_dim apart": plan(1, 3, "query_norm", head_dim=12),
}


@pytest.mark.parametrize(
    ("name", "implementation"),
    [*((name, "sdpa") for name in PLANS), ("paper", "eager"), ("fallbacks", "eager"), ("local", "eager")],
)
def test_logits_are_those_of_the_naive_loop(make_pair, ids, name, implementation):
    _, moh = make_pair(attn_implementation=implementation, dtype=torch.float64, **PLANS[name])
    weights = {name: tensor.numpy() for name, tensor in moh.state_dict().items()}
    with torch.no_grad():
        got = moh(ids).logits.numpy()
    for row, sequence in enumerate(ids.numpy()):
        # The model's rotary tables and norms are float32 whatever its dtype, hence the tolerance.
        np.testing.assert_allclose(got[row], naive.logits(moh.config, weights, sequence), atol=1e-4, rtol=1e-5)


GROUPS = {  # heads, key-value heads; the heads shared in two layers
    "2 heads": {"heads": (8, 4), "shared_heads": [[4, 5], [7, 6]]},
    "3 heads": {"heads": (9, 3), "shared_heads": [[0, 1, 2], [3, 4, 5]]},
    "4 heads": {"heads": (8, 2), "shared_heads": [[0, 1, 2, 3], [4, 5, 6, 7]]},
}
SCORING = {
    "query_norm": {"router_type": "query_norm"},
    "linear": {"router_type": "linear"},
    "threshold": {"router_type": "threshold", "head_fallback": "local", "local_window": 4},
    "fallbacks": {"router_type": "linear", "head_fallback": "value"},
    "two_stage": {"router_type": "two_stage"},
    "two_stage weighted": {"router_type": "two_stage", "router_score": "weighted"},
    "normalized": {"router_type": "two_stage", "router_score": "normalized"},
}


@pytest.mark.parametrize(
    ("groups", "scoring"),
    [*(("3 heads", scoring) for scoring in SCORING), ("2 heads", "fallbacks"), ("4 heads", "normalized")],
)
def test_whole_groups_agree_with_the_naive_loop(make_pair, ids, groups, scoring):
    (heads, kv_heads), shared_heads = GROUPS[groups]["heads"], GROUPS[groups]["shared_heads"]
    group_size = heads // kv_heads
    _, moh = make_pair(
        dtype=torch.float64,
        **{"hidden_size": 8 * heads, "num_attention_heads": heads, "num_key_value_heads": kv_heads},
        **{"routing_granularity": "kv_group", "shared_heads": shared_heads, "num_shared_heads": group_size},
        num_active_heads=2 * group_size if kv_heads > 2 else group_size,
        **SCORING[scoring],
    )
    gates = []
    for router in moh.routers:
        router.register_forward_hook(lambda module, args, output: gates.append(output[1]))
    weights = {name: tensor.numpy() for name, tensor in moh.state_dict().items()}
    for active in (None, heads):
        moh.set_active_heads(active)
        moh.config.num_active_heads = active or moh.config.num_active_heads
        with torch.no_grad():
            got = moh(ids[:1]).logits[0].numpy()
        np.testing.assert_allclose(got, naive.logits(moh.config, weights, ids[0].numpy()), atol=1e-4, rtol=1e-5)
    for gate in gates:
        by_group = gate.unflatten(-1, (kv_heads, group_size))
        assert torch.equal(by_group, by_group[..., :1].expand_as(by_group))


@pytest.mark.parametrize(("dtype", "implementation"), [(torch.float32, "sdpa"), (torch.float32, "eager")], ids=str)
@pytest.mark.parametrize(
    "routing",
    [
        plan([1, 0], [2, 0], head_fallback="local", local_window=9, local_sinks=3),
        plan(1, 2, head_fallback="local", local_window=2, local_sinks=1, local_start=12, never_on_heads=[[3], []]),
    ],
    ids=["window", "start"],
)
def test_a_documents_first_tokens_are_the_base(make_pair, ids, dtype, implementation, routing):
    dense, moh = make_pair(dtype=dtype, attn_implementation=implementation, **routing)
    with torch.no_grad():
        expected, got = dense(ids).logits, moh(ids).logits
        assert torch.equal(moh(ids[:, :12]).logits, dense(ids[:, :12]).logits)
    torch.testing.assert_close(got[:, :12], expected[:, :12])
    assert not torch.isclose(got[:, 12:], expected[:, 12:]).all(-1).any()


@pytest.mark.parametrize("name", [name for name in PLANS if "local" in name])
def test_a_pass_without_numbers_has_the_shapes(make_pair, ids, name):
    """On the meta device, as tools that estimate memory run it, and with fake tensors."""
    _, moh = make_pair(**PLANS[name])
    shape = moh(ids).logits.shape
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert moh(ids).logits.shape == shape
    assert moh.to("meta")(ids.to("meta")).logits.shape == shape


@pytest.mark.parametrize(("fallback", "start"), [("none", 0), ("value", 0), ("local", 0), ("local", 10)])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_decoding_with_a_cache_gives_one_full_pass(make_pair, ids, implementation, fallback, start):
    routing = plan(1, 2, head_fallback=fallback, local_window=5, local_sinks=2, local_start=start)
    _, moh = make_pair(attn_implementation=implementation, **routing)
    with torch.no_grad():
        full = moh(ids).logits
        past, steps = None, []
        for step in ids.split(1, dim=1):
            output = moh(step, past_key_values=past, use_cache=True)
            past = output.past_key_values
            steps.append(output.logits)
    torch.testing.assert_close(torch.cat(steps, 1), full, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["linear", "fallbacks", "local", "local, start"])
def test_packed_documents_do_not_see_each_other(make_pair, ids, name, implementation):
    _, moh = make_pair(attn_implementation=implementation, **PLANS[name])
    positions = torch.cat([torch.arange(10), torch.arange(14)]).expand(3, -1)
    changed = ids.clone()
    changed[:, :10] = changed[:, :10].flip(1)
    with torch.no_grad():
        first = moh(ids, position_ids=positions, use_cache=False).logits
        second = moh(changed, position_ids=positions, use_cache=False).logits
        alone = moh(ids[:, 10:], use_cache=False).logits
    assert not torch.allclose(first[:, :10], second[:, :10], atol=1e-2)
    torch.testing.assert_close(first[:, 10:], second[:, 10:], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(first[:, 10:], alone, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def check_compiled(moh, ids: torch.Tensor, backend: str) -> None:
    """A prefill, and a step of decoding over a static cache, are one graph each and give what the model gives."""
    expected, cache = moh(ids, use_cache=False).logits, StaticCache(moh.config, max_cache_len=30)
    compiled = torch.compile(moh, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(ids, use_cache=False).logits, expected, atol=1e-4, rtol=1e-4)
    moh(ids[:, :-1], past_key_values=cache)
    got = compiled(ids[:, -1:], past_key_values=cache).logits
    torch.testing.assert_close(got, expected[:, -1:], atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["paper", "fallbacks", "local, start"])
def test_a_prefill_and_a_step_compile_as_one_graph(make_pair, ids, name):
    _, moh = make_pair(**PLANS[name])
    check_compiled(moh, ids, "aot_eager")


@pytest.mark.slow
@torch.no_grad()
def test_a_step_compiles_as_one_graph_for_all_sizes(make_pair, ids):
    _, moh = make_pair(**PLANS["local, start"])
    expected, cache = moh(ids, use_cache=False).logits, StaticCache(moh.config, max_cache_len=30)
    moh(ids[:, :-1], past_key_values=cache)
    compiled = torch.compile(moh, fullgraph=True, backend="eager", dynamic=True)
    got = compiled(ids[:, -1:], past_key_values=cache).logits
    torch.testing.assert_close(got, expected[:, -1:], atol=1e-4, rtol=1e-4)


def test_attention_maps_are_the_bases_and_refused_of_layers_with_heads_off(make_pair, ids):
    base, moh = make_pair(attn_implementation="eager", **PLANS["fallbacks"])
    with torch.no_grad(), moh.all_heads_active():
        maps, expected = (model(ids, output_attentions=True).attentions for model in (moh, base))
    assert len(maps) == 2 and all(map(torch.equal, maps, expected))
    with torch.no_grad(), pytest.raises(ValueError, match=r"^output_attentions=True: layers with heads off give no"):
        moh(ids, output_attentions=True)
