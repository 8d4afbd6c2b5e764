"""The record's FLOPs against a counter on a real forward pass; with heads off, see tests/test_flops.py."""

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


@pytest.mark.parametrize("router", ["linear", "two_stage"])
def test_with_all_heads_on_the_count_is_a_real_forward_pass(router):
    config, length = MoHLlamaConfig(**SIZES, router_type=router, num_active_heads=4), 16
    assert forward_flops(config, length) + above_the_diagonal(config, length) == counted_flops(config, length)


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
