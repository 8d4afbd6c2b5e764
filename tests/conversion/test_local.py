"""Conversion with local fallbacks, through the command: what a user gets, and that it loads and runs anywhere."""

import json

import pytest
import torch

from moh_llm.conversion.plan import PlanOptions, shared_and_active
from moh_llm.flops import keys_read
from moh_llm.modeling import MoHLlamaForCausalLM
from moh_llm.modeling.configuration_moh_llama import MoHLlamaConfig

LONG = {"max_position_embeddings": 4096, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def base(make_llama):
    return make_llama(**LONG)


@pytest.mark.parametrize("router", ["threshold", "none"])
def test_long_context_is_converted_with_local_fallbacks(base, convert, tmp_path, capsys, router):
    """The default router, and fixed heads: the budget is met, and shown as a share of keys."""
    flags = ["--local-window", "256", *([] if router == "threshold" else ["--router", router])]
    assert convert(base, tmp_path / "moh", "--keys", "0.6", "--context", "2048", *flags) == 0
    moh = MoHLlamaForCausalLM.from_pretrained(tmp_path / "moh")
    config, heads = moh.config, 8
    assert f"  reads {keys_read(config, 2048):.1%} of the base's keys in 2,048 tokens\n" in capsys.readouterr().out
    assert (config.head_fallback, config.router_type) == ("local", router)
    assert config.moh_format == (6 if config.never_on_heads else 3)
    assert (config.local_start, config.all_heads_until) == (256, 260)
    pairs = zip(config.shared_heads_per_layer, config.never_on_heads_per_layer, strict=True)
    never_routed = all({*shared, *local} == {*range(4)} for shared, local in pairs)
    on = sum(config.active_heads_per_layer)
    assert keys_read(config, 2048) <= 0.6 < keys_read(config, 2048) + (1 - 1 / 8) / heads
    assert on == shared_and_active(PlanOptions(keys=0.6, context=2048, local_window=256), config)[1]
    assert never_routed == (router == "none")
    assert never_routed == (not [name for name in moh.state_dict() if ".router." in name])
    record = json.loads((tmp_path / "moh" / "conversion.json").read_text())
    assert record["verification"]["all_heads_active"]["equals_base"] is True
    assert record["plan"]["keys_read"] == round(keys_read(config, 2048), 4)
    parts = record["verification"]["by_position"]
    assert [part["start"] for part in parts] == [0, 512]  # one sequence of 2,048 tokens
    assert sum(part["tokens"] for part in parts) == record["verification"]["held_out_tokens"]
    assert parts[0]["kl"] < parts[1]["kl"]


def test_fixed_heads_with_value_fallbacks(base, convert, tmp_path):
    flags = ["--router", "none", "--fallback", "value", "--num-active-heads", "3", "--context", "128"]
    assert convert(base, tmp_path / "moh", *flags, "--heldout-tokens", "0") == 0
    config = MoHLlamaConfig.from_pretrained(tmp_path / "moh")
    assert config.shared_heads_per_layer and sum(config.active_heads_per_layer) == 6
    moh = MoHLlamaForCausalLM.from_pretrained(tmp_path / "moh")
    gates = []
    for router in moh.routers:
        router.register_forward_hook(lambda module, args, output: gates.append(output[1]))
    moh(torch.arange(1, 60)[None])
    for gate, shared in zip(gates, config.shared_heads_per_layer, strict=True):
        assert gate[0].sum(0).nonzero()[:, 0].tolist() == shared and gate[0, :, shared].eq(1).all()


def test_documents_within_the_window_are_too_short(base, convert, tmp_path, capsys):
    text = tmp_path / "short.jsonl"
    text.write_text("".join(f'{{"text": "{number} boats lay on the river at noon."}}\n' for number in range(3000)))
    assert convert(base, tmp_path / "moh", "--context", "2048", "--calibration", str(text)) == 2
    error = capsys.readouterr().err
    assert "has 0 tokens that are more than 256 after the first of their document" in error
    assert "--fallback value" in error and "Traceback" not in error and not (tmp_path / "moh").exists()
