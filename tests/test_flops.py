"""FLOPs against a counter on a real pass, and against sums by hand; keys read against a loop."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from moh_llm.flops import forward_flops, keys_read
from moh_llm.modeling import MoHLlamaConfig, MoHLlamaForCausalLM

LENGTH, LAYERS, HEADS = 24, 3, 4
SIZES = {
    **{"vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS, "head_dim": 10},
    **{"num_attention_heads": HEADS, "num_key_value_heads": 2, "tie_word_embeddings": False},
    # All heads are shared, so that no router and no fallback is counted.
    **{"num_shared_heads": HEADS, "num_active_heads": HEADS, "router_type": "linear"},
}
EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 3}


# Scores and weighted sums of later positions, which eager attention computes and masks.
LATER = LAYERS * HEADS * (LENGTH * (LENGTH - 1) // 2) * 2 * 2 * SIZES["head_dim"]


@pytest.mark.parametrize("experts", [{}, EXPERTS], ids=["dense", "experts"])
def test_the_count_is_a_real_pass(experts):
    config = MoHLlamaConfig(**SIZES, **experts)
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}  # whose products are counted
    model = MoHLlamaForCausalLM._from_config(config, **eager)
    with FlopCounterMode(display=False) as counted:
        model(torch.randint(100, (1, LENGTH)))
    assert forward_flops(config, LENGTH) == forward_flops(config, LENGTH, dense=True)
    assert forward_flops(config, LENGTH) == counted.get_total_flops() - LATER


def test_hand_counted_sums():
    """Multiply-adds over two tokens of one layer; its second head is off and the first one shared."""
    sizes = {"vocab_size": 5, "hidden_size": 4, "intermediate_size": 3, "num_hidden_layers": 1, "head_dim": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "num_shared_heads": 1, "num_active_heads": 1}
    keys_and_values, feed_forward, vocabulary, router = 32, 72, 40, 8
    always = keys_and_values + feed_forward + vocabulary
    linear = MoHLlamaConfig(**sizes, router_type="linear")
    #                                                        queries, 3 pairs of scores and sums, output projection
    assert forward_flops(linear, 2, dense=True) == 2 * (always + 32 + 24 + 32)
    assert forward_flops(linear, 2) == 2 * (always + router + 16 + 12 + 16)
    # The fallback is a row of 4 weights a token and b + a v of 2 numbers; it goes through the projection, too.
    value = MoHLlamaConfig(**sizes, router_type="linear", head_fallback="value")
    assert forward_flops(value, 2) == 2 * (always + router + 16 + 12 + 32 + 8 + 4)
    # A local fallback needs the query as well, and here one key in sight for each of the two tokens.
    seen = {"local_window": 1, "local_sinks": 0}
    local = MoHLlamaConfig(**sizes, router_type="linear", head_fallback="local", **seen)
    assert forward_flops(local, 2) == 2 * (always + router + 32 + 12 + 8 + 32 + 8 + 4)
    score = {"router_type": "two_stage", "router_score": "normalized"}  # the one shared head has no score
    assert forward_flops(MoHLlamaConfig(**sizes, **score), 2) == forward_flops(linear, 2) + 2 * 2 * router
    # The paper's router takes all queries' norms.
    assert forward_flops(MoHLlamaConfig(**sizes), 2) == 2 * (always + 32 + 12 + 16)


@pytest.mark.parametrize(("window", "sinks"), [(5, 2), (60, 4)])
@pytest.mark.parametrize("until", [0, 20])
def test_keys_read_are_those_of_a_loop(window, sinks, until):
    sizes = {"hidden_size": 12, "num_attention_heads": 3, "num_hidden_layers": 2, "num_key_value_heads": 3}
    plan = {"num_shared_heads": [2, 0], "num_active_heads": [2, 1], "router_type": "linear"}
    seen = {"local_window": window, "local_sinks": sinks, "local_start": until}
    local = MoHLlamaConfig(**sizes, **plan, head_fallback="local", **seen)
    on = [position + 1 for position in range(40)]
    off = [position + 1 if position < until else min(position + 1, window + sinks) for position in range(40)]
    assert keys_read(local, 40) == pytest.approx((3 * sum(on) + 3 * sum(off)) / (6 * sum(on)))
    assert keys_read(MoHLlamaConfig(**sizes, **plan, head_fallback="value"), 40) == pytest.approx(0.5)
