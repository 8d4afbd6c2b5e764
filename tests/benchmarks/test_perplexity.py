"""The benchmark of several models on several texts, and the texts of languages and code."""

import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import perplexity


def test_each_model_has_the_figures_it_has_alone(make_llama, convert, river, tmp_path, monkeypatch, capsys):
    base = make_llama(num_attention_heads=4, num_key_value_heads=2, initializer_range=0.1, max_position_embeddings=256)
    for name, heads in (("three", "3"), ("two", "2")):
        flags = ["--num-active-heads", heads, "--heldout-tokens", "0", "--context", "64", "--calibration", str(river)]
        assert convert(base, tmp_path / name, *flags, "--calibration-tokens", "1024") == 0
    chosen = ["--documents", "6", "--last", "--tokens-per-document", "100"]

    def figures(*names: str) -> dict:
        models = [str(tmp_path / name) for name in names]
        words = ["perplexity.py", *models, "--base", str(base), "--text", str(river), *chosen]
        monkeypatch.setattr(sys, "argv", [*words, "--json", str(tmp_path / "found.json")])
        assert perplexity.main() == 0
        printed, found = capsys.readouterr().out, json.loads((tmp_path / "found.json").read_text())
        assert "6 documents" in printed and "; float32, " in printed
        assert found["compute_dtype"] == "float32"  # what auto stands for in tests
        return found["means"]

    both, alone = figures("three", "two"), figures("two")
    three, two = str(tmp_path / "three"), str(tmp_path / "two")
    assert both[two] == alone[two] and both.keys() == {three, two, "paper's layer"}
    assert 0 < both[three]["kl"] < both[two]["kl"]
    assert both["paper's layer"] != alone["paper's layer"]  # of as many heads as the first model has
