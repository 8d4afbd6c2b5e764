"""The benchmark of ways to choose heads: its table, and that the oracle is the best."""

import json
import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import local_routers


@pytest.mark.slow
def test_the_oracle_is_the_best(make_llama, tmp_path, monkeypatch, capsys):
    base = make_llama(max_position_embeddings=256, num_attention_heads=4, num_key_value_heads=2)
    text = tmp_path / "text.jsonl"
    sentences = [f"{i} boats were counted on the river at noon, and {i * 7} birds. " for i in range(400)]
    text.write_text("".join(json.dumps({"text": "".join(sentences[i : i + 8])}) + "\n" for i in range(392)))
    command = ["local_routers.py", str(base), "--calibration", str(text), "--context", "128", "--window", "16"]
    monkeypatch.setattr(sys, "argv", [*command, "--keys", "0.7", "0.4", "--calibration-tokens", "8192"])
    assert local_routers.main() == 0
    lines = [re.split(r"\s{2,}", line) for line in capsys.readouterr().out.splitlines()]
    table = {line[0]: [float(cell.split()[0]) for cell in line[1:3]] for line in lines if len(line) == 3}
    assert len(table) == 2 + 3 + 6
    for number in (0, 1):
        costs = {name: row[number] for name, row in table.items() if name not in ("keys read", "heads on")}
        assert costs["oracle"] == min(costs.values()) and all(cost > 0 for cost in costs.values())
    assert all(low > high for low, high in zip(table["fixed"][1:], table["fixed"], strict=False))
