"""The model against the naive loop, the dense base, and the golden logits."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from moh_llm.modeling import MoHLlamaConfig, MoHLlamaForCausalLM

_spec = importlib.util.spec_from_file_location("naive", Path(__file__).with_name("naive.py"))
naive = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(naive)

PLANS = {
    "paper": {"num_shared_heads": 2, "num_active_heads": 3, "router_type": "query_norm"},
    "linear": {"num_shared_heads": 1, "num_active_heads": 2, "router_type": "linear"},
    "two_stage": {"num_shared_heads": 1, "num_active_heads": 3, "router_type": "two_stage"},
    "two_stage weighted": {
        "num_shared_heads": 2,
        "num_active_heads": 3,
        "router_type": "two_stage",
        "router_score": "weighted",
    },
    "linear weighted": {
        "num_shared_heads": 1,
        "num_active_heads": 3,
        "router_type": "linear",
        "router_score": "weighted",
    },
    "no shared head": {"num_shared_heads": 0, "num_active_heads": 2, "router_type": "linear"},
    "per layer": {"num_shared_heads": [1, 4], "num_active_heads": [2, 4], "router_type": "linear"},
    "fallbacks": {
        "num_shared_heads": [1, 4],
        "num_active_heads": [2, 4],
        "router_type": "linear",
        "head_fallback": "value",
    },
    "fallbacks, explicit ids": {
        "num_shared_heads": 2,
        "num_active_heads": 3,
        "shared_heads": [[1, 3], [0, 2]],
        "router_type": "linear",
        "head_fallback": "value",
    },
    "one routed head": {"num_shared_heads": 3, "num_active_heads": 3, "router_type": "query_norm"},
    "explicit ids": {
        "num_shared_heads": 2,
        "num_active_heads": 3,
        "shared_heads": [[1, 3], [0, 2]],
        "router_type": "query_norm",
    },
    "explicit ids, two_stage": {
        "num_shared_heads": 2,
        "num_active_heads": 3,
        "shared_heads": [[3, 0], [1, 2]],
        "router_type": "two_stage",
        "router_score": "weighted",
    },
}
HEADS = {
    "MHA": {"num_key_value_heads": 4},
    "odd": {"num_attention_heads": 5, "num_key_value_heads": 5, "hidden_size": 40},
    "head_dim apart": {"head_dim": 12},
}


@pytest.mark.parametrize(
    ("plan", "implementation"), [*((plan, "sdpa") for plan in PLANS), ("paper", "eager"), ("fallbacks", "eager")]
)
def test_logits_are_those_of_the_naive_loop(make_pair, ids, plan, implementation):
    _, moh = make_pair(attn_implementation=implementation, dtype=torch.float64, **PLANS[plan])
    weights = {name: tensor.numpy() for name, tensor in moh.state_dict().items()}
    with torch.no_grad():
        got = moh(ids).logits.numpy()
    for row, sequence in enumerate(ids.numpy()):
        # The model's rotary tables and norms are float32 whatever its dtype, hence the tolerance.
        np.testing.assert_allclose(got[row], naive.logits(moh.config, weights, sequence), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("router_type", ["query_norm", "two_stage"])
@pytest.mark.parametrize("heads", HEADS)
def test_head_layouts_agree_with_the_naive_loop(make_pair, ids, heads, router_type):
    plan = {"num_shared_heads": 1, "num_active_heads": 3, "router_type": router_type}
    _, moh = make_pair(dtype=torch.float64, **plan, **HEADS[heads])
    weights = {name: tensor.numpy() for name, tensor in moh.state_dict().items()}
    with torch.no_grad():
        got = moh(ids[:1]).logits[0].numpy()
    np.testing.assert_allclose(got, naive.logits(moh.config, weights, ids[0].numpy()), atol=1e-4, rtol=1e-5)


GROUPS = {  # heads, key-value heads; the heads shared in two layers
    "2 heads": {"heads": (8, 4), "shared_heads": [[4, 5], [7, 6]]},
    "3 heads": {"heads": (9, 3), "shared_heads": [[0, 1, 2], [3, 4, 5]]},
    "4 heads": {"heads": (8, 2), "shared_heads": [[0, 1, 2, 3], [4, 5, 6, 7]]},
}
SCORING = {
    "query_norm": {"router_type": "query_norm"},
    "query_norm weighted": {"router_type": "query_norm", "router_score": "weighted"},
    "linear": {"router_type": "linear"},
    "linear weighted": {"router_type": "linear", "router_score": "weighted"},
    "fallbacks": {"router_type": "linear", "head_fallback": "value"},
    "two_stage": {"router_type": "two_stage"},
    "two_stage weighted": {"router_type": "two_stage", "router_score": "weighted"},
}


@pytest.mark.parametrize(
    ("groups", "scoring"),
    [*(("3 heads", scoring) for scoring in SCORING), ("2 heads", "fallbacks"), ("4 heads", "two_stage weighted")],
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


@pytest.mark.parametrize("scoring", SCORING.values(), ids=SCORING)
def test_a_group_of_one_head_is_a_head(make_pair, ids, scoring):
    plan = {"num_key_value_heads": 4, "num_shared_heads": 1, "num_active_heads": 3, **scoring}
    _, by_head = make_pair(**plan)
    _, by_group = make_pair(**plan, routing_granularity="kv_group")
    with torch.no_grad():
        assert torch.equal(by_group(ids).logits, by_head(ids).logits)


@pytest.mark.parametrize(("dtype", "implementation"), [(torch.float32, "sdpa"), (torch.bfloat16, "eager")], ids=str)
@pytest.mark.parametrize(
    "routing",
    [
        {"router_type": "query_norm"},
        {"router_type": "linear"},
        {"router_type": "linear", "head_fallback": "value"},
        {"router_type": "two_stage"},
    ],
    ids=lambda routing: " ".join(routing.values()),
)
def test_all_heads_active_is_the_base_bit_for_bit(make_pair, ids, dtype, implementation, routing):
    dense, moh = make_pair(
        dtype=dtype, attn_implementation=implementation, num_shared_heads=1, num_active_heads=2, **routing
    )
    with torch.no_grad(), moh.all_heads_active():
        assert torch.equal(moh(ids).logits, dense(ids).logits)
        dense_past, moh_past = None, None
        for step in ids.split([10, 1, 13], dim=1):  # with cache
            expected = dense(step, past_key_values=dense_past, use_cache=True)
            got = moh(step, past_key_values=moh_past, use_cache=True)
            dense_past, moh_past = expected.past_key_values, got.past_key_values
            assert torch.equal(got.logits, expected.logits)
    with torch.no_grad():
        assert not torch.equal(moh(ids).logits, dense(ids).logits)  # heads were off outside the block


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"attention_bias": True, "mlp_bias": True},
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 1},
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ],
    ids=["plain", "biases", "tied", "one KV head", "llama3 rope"],
)
def test_config_with_all_heads_active_is_the_base(make_pair, ids, fields):
    dense, moh = make_pair(num_shared_heads=2, num_active_heads=4, router_type="query_norm", **fields)
    with torch.no_grad():
        assert torch.equal(moh(ids).logits, dense(ids).logits)


@pytest.mark.parametrize("fallback", ["none", "value"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_decoding_with_a_cache_gives_one_full_pass(make_pair, ids, implementation, fallback):
    plan = {"num_shared_heads": 1, "num_active_heads": 2, "router_type": "linear", "head_fallback": fallback}
    _, moh = make_pair(attn_implementation=implementation, **plan)
    with torch.no_grad():
        full = moh(ids).logits
        past, steps = None, []
        for step in ids.split(1, dim=1):
            output = moh(step, past_key_values=past, use_cache=True)
            past = output.past_key_values
            steps.append(output.logits)
    torch.testing.assert_close(torch.cat(steps, 1), full, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("router_type", ["query_norm", "linear"])
def test_left_padded_rows_are_the_single_rows(make_pair, ids, implementation, router_type):
    _, moh = make_pair(
        attn_implementation=implementation, num_shared_heads=1, num_active_heads=2, router_type=router_type
    )
    lengths = [24, 17, 5]
    padded, mask = torch.zeros_like(ids), torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        padded[row, 24 - length :], mask[row, 24 - length :] = ids[row, :length], 1
    with torch.no_grad():
        positions = (mask.cumsum(1) - 1).clamp_min(0)
        batch = moh(padded, attention_mask=mask, position_ids=positions).logits
        for row, length in enumerate(lengths):
            alone = moh(ids[row : row + 1, :length]).logits[0]
            torch.testing.assert_close(batch[row, 24 - length :], alone, atol=1e-4, rtol=1e-4)


def test_generate_with_padding_and_cache(make_pair, ids):
    _, moh = make_pair(num_shared_heads=1, num_active_heads=2, router_type="linear")
    arguments = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    padded, mask = ids[:2].clone(), torch.ones_like(ids[:2])
    padded[1, :10], mask[1, :10] = 0, 0
    together = moh.generate(padded, attention_mask=mask, **arguments)[:, -8:]
    without_cache = moh.generate(padded, attention_mask=mask, use_cache=False, **arguments)[:, -8:]
    alone = moh.generate(ids[1:2, 10:], **arguments)[:, -8:]
    assert torch.equal(together, without_cache)
    assert torch.equal(together[1:], alone)


def test_packed_documents_do_not_see_each_other(make_pair, ids):
    _, moh = make_pair(num_shared_heads=1, num_active_heads=2, router_type="linear")
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


@pytest.mark.slow
@pytest.mark.parametrize("router_type", ["query_norm", "two_stage"])  # linear: in test_documents.py
def test_compiled_model_agrees(make_pair, ids, router_type):
    _, moh = make_pair(num_hidden_layers=1, num_shared_heads=1, num_active_heads=2, router_type=router_type)
    with torch.no_grad():
        expected = moh(ids, use_cache=False).logits
        # fullgraph: nothing in the routing falls back to Python.
        got = torch.compile(moh, fullgraph=True, backend="aot_eager")(ids, use_cache=False).logits
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_compiled_by_inductor_agrees(make_pair, ids):
    _, moh = make_pair(num_shared_heads=1, num_active_heads=2, router_type="linear")
    with torch.no_grad():
        expected = moh(ids, use_cache=False).logits
        got = torch.compile(moh, fullgraph=True)(ids, use_cache=False).logits
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_golden_logits_of_the_authors_code(shared, implementation):
    from transformers import LlamaForCausalLM

    golden = np.load(shared / "golden" / "official_moh_stories260K.npz")
    folder = shared / "data" / "checkpoints" / "stories260K-hf"
    base = LlamaForCausalLM.from_pretrained(folder)
    fields = {k: v for k, v in base.config.to_dict().items() if k not in ("model_type", "architectures", "dtype")}
    moh = MoHLlamaForCausalLM(MoHLlamaConfig(**fields, num_shared_heads=4, num_active_heads=6))
    moh.load_state_dict(base.state_dict())
    moh.set_attn_implementation(implementation)
    with torch.no_grad():
        got = moh.eval()(torch.from_numpy(golden["input_ids"])).logits
    np.testing.assert_allclose(got.numpy(), golden["logits"], atol=1e-4)


@pytest.mark.parametrize(("dtype", "implementation"), [(torch.float32, "eager"), (torch.bfloat16, "sdpa")], ids=str)
def test_first_tokens_of_documents_are_the_bases(make_pair, ids, dtype, implementation):
    """They attend to nothing but themselves, which is what their fallbacks do."""
    plan = {"num_shared_heads": 1, "num_active_heads": 2, "router_type": "linear", "head_fallback": "value"}
    dense, moh = make_pair(dtype=dtype, attn_implementation=implementation, **plan)
    positions = torch.cat([torch.arange(10), torch.arange(14)]).expand(3, -1)
    with torch.no_grad():
        expected, got = (m(ids, position_ids=positions, use_cache=False).logits for m in (dense, moh))
    assert torch.equal(got[:, [0, 10]], expected[:, [0, 10]])
    assert not torch.equal(got[:, [1, 11]], expected[:, [1, 11]])
