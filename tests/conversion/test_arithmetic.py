"""The record's FLOPs against a counter on a real forward pass and against a count by hand."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig

from moh_llm.conversion.arithmetic import LENGTHS, arithmetic, forward_flops
from moh_llm.modeling import MoHLlamaConfig

SIZES = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
}


def counted_flops(config, length):
    """Matrix products of an eager forward pass, whose scores are all T x T."""
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, length, dtype=torch.long), use_cache=False)
    return counter.get_total_flops()


def above_the_diagonal(config, length):
    """Scores and weighted sums of later positions, which `forward_flops` leaves out."""
    pairs = length * (length - 1) // 2
    return config.num_hidden_layers * config.num_attention_heads * pairs * 2 * 2 * config.head_dim


@pytest.mark.parametrize("length", [1, 7, 64])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_dense_count_is_a_real_forward_pass(length, kv_heads):
    sizes = SIZES | {"num_key_value_heads": kv_heads}
    ours = forward_flops(MoHLlamaConfig(**sizes), length, dense=True)
    config = LlamaConfig(**sizes)
    assert ours + above_the_diagonal(config, length) == counted_flops(config, length)


@pytest.mark.parametrize(
    "plan",
    [
        {"router_type": "linear"},
        {"router_type": "linear", "head_stand_in": "value", "num_shared_heads": [0, 1, 4]},
        {"router_type": "two_stage"},
    ],
    ids=["linear", "with stand-ins", "two stages"],
)
def test_with_all_heads_on_the_count_is_a_real_forward_pass(plan):
    config, length = MoHLlamaConfig(**SIZES, **plan, num_active_heads=4), 16
    routed = sum(4 - len(shared) for shared in config.shared_heads_per_layer)
    # The counter does not see the product of a share and a value vector.
    elementwise = 2 * length * routed * config.head_dim if config.head_stand_in != "none" else 0
    expected = counted_flops(config, length) + elementwise
    assert forward_flops(config, length) + above_the_diagonal(config, length) == expected


@pytest.mark.parametrize("stand_in", ["none", "value"])
@pytest.mark.parametrize("router", ["linear", "query_norm", "two_stage"])
def test_heads_that_are_off_cost_nothing(router, stand_in):
    shared, active, length, size, hidden = [[0, 3], [2], [1]], [2, 4, 3], 9, 10, 32
    config = MoHLlamaConfig(
        **SIZES,
        num_shared_heads=[2, 1, 1],
        shared_heads=shared,
        num_active_heads=active,
        router_type=router,
        head_stand_in=stand_in,
    )
    products = 0
    for ids, on in zip(shared, active, strict=True):
        for position in range(length):
            for _ in range(4 if router == "query_norm" else on):
                products += hidden * size  # query, of which that router takes the norm
            for _ in range(on):
                products += 2 * size * (position + 1)  # scores and weighted sum
                products += size * hidden  # its rows of the output projection
            products += 2 * 2 * hidden * size  # keys and values of both groups
            products += 3 * hidden * 48
            for _ in set(range(4)) - set(ids):
                products += 0 if router == "query_norm" else hidden
                products += hidden + size if stand_in == "value" else 0
            products += (len(ids) + 2) * hidden if router == "two_stage" else 0
    products += length * hidden * 100
    assert forward_flops(config, length) == 2 * products


def test_record():
    config = MoHLlamaConfig(**SIZES, num_active_heads=4, router_type="query_norm")
    record = arithmetic(config, 1000, [])
    assert record["parameters"] == {"dense": 1000, "moh": 1000}
    assert [flops["ratio"] for flops in record["forward_flops"].values()] == [1, 1, 1]

    config = MoHLlamaConfig(**SIZES, num_active_heads=2, router_type="linear")
    record = arithmetic(config, 1000, [64, 2, 64, 2, 64, 2])
    assert record["parameters"] == {"dense": 1000, "moh": 1198}
    assert record["forward_flops"].keys() == {str(length) for length in LENGTHS}
    for length in LENGTHS:
        flops = record["forward_flops"][str(length)]
        assert flops["dense"] == forward_flops(config, length, dense=True) > forward_flops(config, length)
        assert flops == flops | {"moh": forward_flops(config, length), "ratio": round(flops["moh"] / flops["dense"], 4)}
