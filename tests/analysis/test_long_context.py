"""The long-context benchmark: its figures against naive ones, and that it goes on where it stopped."""

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from moh_llm.flops import forward_flops
from moh_llm.modeling import MoHLlamaForCausalLM

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import long_context


@pytest.fixture(scope="module")
def folders(make_llama, convert, tmp_path_factory):
    base, moh = make_llama(), tmp_path_factory.mktemp("moh") / "local"
    flags = ["--fallback", "local", "--local-window", "8", "--num-active-heads", "2", "--heldout-tokens", "0"]
    assert convert(base, moh, *flags) == 0
    return base, moh


def test_figures_are_those_of_a_naive_loop(folders, monkeypatch):
    monkeypatch.setattr(long_context, "EDGES", (0, 30, 70, 8192))
    monkeypatch.setattr(long_context, "HEADLINE", 50)
    base, moh = (
        LlamaForCausalLM.from_pretrained(folders[0]).eval(),
        MoHLlamaForCausalLM.from_pretrained(folders[1]).eval(),
    )
    ids = torch.randint(3, 200, (90,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = long_context.compare(base, {"moh": moh}, ids)["moh"]
        p, q = (model(ids[None], use_cache=False).logits[0].double().log_softmax(-1) for model in (moh, base))
    kl = [sum(float(b.exp() * (b - a)) for a, b in zip(p[t], q[t], strict=True)) for t in range(89)]
    for part, (low, high) in {"0": (0, 30), "30": (30, 70), "70": (70, 89), "headline": (50, 89)}.items():
        count, loss, _, sum_kl, _ = found["sums"][part]
        assert count == high - low and sum_kl == pytest.approx(sum(kl[low:high]), rel=1e-3)
        assert loss == pytest.approx(-sum(float(p[t, ids[t + 1]]) for t in range(low, high)), rel=1e-4)
    config, heads = moh.config, moh.config.num_attention_heads * moh.config.num_hidden_layers
    on = sum(config.active_heads_per_layer)
    read = sum(on * (t + 1) + (heads - on) * min(t + 1, 12) for t in range(50, 90))
    assert found["keys"]["from 50"] == pytest.approx(read / (heads * sum(range(51, 91))))


def test_the_command_goes_on_where_it_stopped(folders, tmp_path, monkeypatch, capsys):
    base, moh = map(str, folders)
    text = tmp_path / "long.jsonl"
    text.write_text("".join(json.dumps({"text": f"{n} " * 800}) + "\n" for n in range(3)))
    command = ["long_context.py", moh, str(text), "--base", base, "--context", "640"]
    command += ["--prompts", "4", "--json", str(tmp_path / "f.json")]
    monkeypatch.setattr(sys, "argv", [*command, "--documents", "2"])
    assert long_context.main() == 0
    out, config = capsys.readouterr().out, MoHLlamaForCausalLM.from_pretrained(moh).config
    assert "2 documents of 640 tokens" in out
    theory = forward_flops(config, 640) / forward_flops(config, 640, dense=True)
    assert theory < 1 and f"in theory {theory:.3f} of the base's FLOPs" in out
    compared = []
    original = long_context.compare
    monkeypatch.setattr(long_context, "compare", lambda *args: compared.append(1) or original(*args))
    monkeypatch.setattr(sys, "argv", [*command, "--documents", "3"])
    assert long_context.main() == 0 and len(compared) == 1
    monkeypatch.setattr(sys, "argv", [*command, "--documents", "3", "--context", "64"])
    assert long_context.main() == 1 and "holds figures of other models or text" in capsys.readouterr().err
