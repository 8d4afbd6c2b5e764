"""The benchmark of how long a model writes what its base writes."""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import generation

PROMPTS, PROMPT, NEW = 6, 48, 24


def test_the_counts_are_those_of_two_generations(make_llama, convert, river, tmp_path, monkeypatch, capsys):
    base = make_llama(num_attention_heads=4, num_key_value_heads=2, initializer_range=0.1, max_position_embeddings=256)
    for heads in ("3", "4"):
        flags = ["--num-active-heads", heads, "--heldout-tokens", "0", "--context", "64", "--local-window", "4"]
        flags += ["--local-start", "0", "--calibration", str(river), "--calibration-tokens", "1024"]
        assert convert(base, tmp_path / heads, *flags) == 0
    words = ["generation.py", str(tmp_path / "3"), str(tmp_path / "4"), "--base", str(base), "--text", str(river)]
    words += ["--documents", str(PROMPTS), "--prompt-tokens", str(PROMPT), "--new-tokens", str(NEW)]
    monkeypatch.setattr(sys, "argv", words)
    shown, show = [], generation.show
    monkeypatch.setattr(generation, "show", lambda *given: shown.append(given[0]) or show(*given))
    assert generation.main() == 0
    assert f"{PROMPTS} prompts of {PROMPT} tokens" in capsys.readouterr().out
    whole, found, _, all_on = shown  # of each model whether the counts are the whole, and the counts
    assert all_on == [NEW] * PROMPTS  # with all heads on the model is its base
    assert min(found) < NEW and whole == [count == NEW for count in found]

    tokenizer = AutoTokenizer.from_pretrained(base)
    texts = [json.loads(line)["text"] for line in river.read_text().splitlines()]
    rows = [ids[:PROMPT] for text in texts if len(ids := tokenizer(text)["input_ids"]) >= PROMPT][:PROMPTS]
    written = {}
    for folder in (base, tmp_path / "3"):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        written[folder] = [generation.continuation(model, torch.tensor([row]), NEW)[0] for row in rows]
    pairs = zip(written[base], written[tmp_path / "3"], strict=True)
    assert [int((own == other).long().cumprod(0).sum()) for own, other in pairs] == found
