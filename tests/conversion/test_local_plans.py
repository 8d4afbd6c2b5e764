"""The benchmark that converts a base in several ways writes what the converter writes."""

import json
import sys
from pathlib import Path

import pytest

from moh_llm.modeling.configuration_moh_llama import MoHLlamaConfig

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import local_plans


@pytest.fixture
def base(make_llama):
    return make_llama(max_position_embeddings=256, num_attention_heads=4, num_key_value_heads=2)


@pytest.fixture
def text(tmp_path):
    sentences = [f"{i} boats were counted on the river at noon, and {i * 7} birds. " for i in range(400)]
    rows = [json.dumps({"text": "".join(sentences[i : i + 8])}) + "\n" for i in range(392)]
    (tmp_path / "text.jsonl").write_text("".join(rows))
    return tmp_path / "text.jsonl"


@pytest.mark.slow
def test_each_model_is_the_converters(base, text, convert, read_tensors, tmp_path, monkeypatch, capsys):
    numbers = ["--keys", "0.6", "--context", "128", "--calibration-tokens", "1024"]
    command = ["local_plans.py", str(base), "--calibration", str(text), "--output", str(tmp_path / "plans"), *numbers]
    local = ["--windows", "16", "--routers", "threshold", "none"]
    monkeypatch.setattr(sys, "argv", [*command, *local, "--granularities", "head", "kv_group"])
    assert local_plans.main() == 0
    assert capsys.readouterr().out.count("heads per layer, estimated KL") == 4
    monkeypatch.setattr(sys, "argv", [*command, "--fallback", "value", "--routers", "linear"])
    assert local_plans.main() == 0
    shared = ["--calibration", str(text), "--heldout-tokens", "0", *numbers[2:]]
    flags = ["--local-window", "16", *shared]
    asked = {f"0.6-{router}-head-16": [*flags, *numbers[:2], "--router", router] for router in ("threshold", "none")}
    asked["0.6-linear-head-8"] = ["--fallback", "value", *shared, *numbers[:2]]
    for name, words in asked.items():
        alone = tmp_path / name
        assert convert(base, alone, *words) == 0
        written = tmp_path / "plans" / name
        assert MoHLlamaConfig.from_pretrained(written).to_dict() == MoHLlamaConfig.from_pretrained(alone).to_dict()
        ours, theirs = read_tensors(written), read_tensors(alone)
        assert ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in ours)
    monkeypatch.setattr(sys, "argv", [*command, *local])
    assert local_plans.main() == 1 and "0.6-threshold-head-16" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", [*command, "--streaming", "--fallback", "value", "--routers", "none"])
    assert local_plans.main() == 1 and "--streaming plans have local fallbacks" in capsys.readouterr().err
