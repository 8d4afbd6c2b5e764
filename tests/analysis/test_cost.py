"""Cost against a count of products, and the order and statistics of measurements with a false clock."""

import pytest
import torch

from moh_llm.analysis import cost
from moh_llm.analysis.cost import dense_attention, flops_by_length, seconds_by_length

LENGTHS = [1, 7, 64]


def count_flops(config, length: int, active: list[int], routing: bool) -> int:
    """Two per multiply-add, product by product and token by token."""
    total, size, hidden = 0, config.head_dim, config.hidden_size
    for shared, on in zip(config.shared_heads_per_layer, active, strict=True):
        for position in range(length):
            total += 2 * hidden * size * on  # queries
            total += 2 * 2 * hidden * size * config.num_key_value_heads  # keys and values
            total += 2 * 2 * size * (position + 1) * on  # scores and weighted sums
            total += 2 * size * hidden * on  # output projection
            total += 2 * 3 * hidden * config.intermediate_size
            if routing:
                total += 2 * hidden * (config.num_attention_heads - len(shared))
    return total + 2 * length * hidden * config.vocab_size


def test_flops_are_a_count_of_products(make_moh) -> None:
    config = make_moh(num_shared_heads=[1, 2], num_active_heads=[2, 3], router_type="linear").config
    found = flops_by_length(config, LENGTHS)
    assert [one.length for one in found] == LENGTHS
    for one in found:
        assert one.moh == count_flops(config, one.length, [2, 3], routing=True)
        assert one.dense == count_flops(config, one.length, [4, 4], routing=False)


def test_seconds_are_medians_of_turns(make_moh, monkeypatch) -> None:
    """The clock moves only while the model runs: by numbers of our choice."""
    model = make_moh(num_shared_heads=1, num_active_heads=2)
    # For each length a turn that is not counted, and three that are.
    durations = iter([100.0, 200.0, 5.0, 10.0, 1.0, 30.0, 9.0, 20.0, 300.0, 400.0, 2.0, 8.0, 4.0, 7.0, 3.0, 6.0])
    now, calls = [0.0], []

    def forward(input_ids: torch.Tensor, use_cache: bool) -> None:
        now[0] += next(durations)
        dense = ["forward" in vars(layer.self_attn) for layer in model.model.layers]
        calls.append((tuple(input_ids.shape), use_cache, dense))

    monkeypatch.setattr(model, "forward", forward)
    monkeypatch.setattr(cost.time, "perf_counter", lambda: now[0])
    found = seconds_by_length(model, [3, 5], repeats=3)
    assert [(one.length, one.moh, one.dense) for one in found] == [(3, 5.0, 20.0), (5, 3.0, 7.0)]
    durations = iter([1.0, 1.0, 1.0, 6.0, 1.0, 1.0])
    assert [one.length for one in seconds_by_length(model, [3, 5], repeats=2, most=5.0)] == [3]  # with turns to spare
    del calls[-6:]
    turns = [[False, False], [True, True]] * 4
    assert calls == [((1, length), False, dense) for length in (3, 5) for dense in turns]


@pytest.mark.parametrize(
    "fields",
    [
        {"converted": True},
        {"head_fallback": "value", "router_type": "linear"},
        {"query_key_norm": True, "attention_bias": True, "attention_output_bias": False},
        {"router_type": "two_stage", "num_key_value_heads": 4},
    ],
    ids=["conversion", "fallbacks", "Qwen3", "two_stage"],
)
@torch.no_grad()
def test_dense_attention_is_the_base_without_its_routers(make_moh, batch, fields) -> None:
    model = make_moh(num_shared_heads=1, num_active_heads=2, **fields)
    inputs = {name: batch[name] for name in ("input_ids", "position_ids")} | {"use_cache": False}
    before = model(**inputs).logits
    with model.all_heads_active():
        expected = model(**inputs).logits
    routed = []
    handles = [router.register_forward_hook(lambda *_: routed.append(1)) for router in model.routers]
    with dense_attention(model):
        assert torch.equal(model(**inputs).logits, expected)
    assert not routed
    assert torch.equal(model(**inputs).logits, before) and len(routed) == 2
    assert not torch.equal(before, expected)
    for handle in handles:
        handle.remove()
