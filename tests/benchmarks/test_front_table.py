"""The table of what some time gets: the real command on a tiny base, and that what is finished is kept."""

import json
import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import front_table


@pytest.mark.slow
def test_a_row_for_each_level_and_finished_models_are_kept(make_llama, river, tmp_path, monkeypatch, capfd):
    base = make_llama(max_position_embeddings=256, initializer_range=0.3)
    words = [
        "front_table.py",
        str(base),
        "--mixture",
        str(river),
        "--text",
        str(river),
        "--output",
        str(tmp_path / "out"),
    ]
    words += ["--shares", "0.5", "0.75", "--levels", "1024:0", "1024:4", "--context", "64", "--documents", "8"]
    words += ["--set", "mixed_precision=no", "optimizer.learning_rate=1e-3", "--last", "--tokens-per-document", "200"]
    monkeypatch.setattr(sys, "argv", words)
    assert front_table.main() == 0
    printed = capfd.readouterr().out
    rows = re.findall(r"^\| \d.* s \| (.*) \|$", printed, re.MULTILINE)
    kl = [[float(value) for value in re.findall(r"KL ([\d.]+)", row)] for row in rows]
    assert len(kl) == 2 and len(kl[0]) == len(kl[1]) == 2 and kl[0] != kl[1]
    assert kl[0][0] > kl[0][1]
    scores = json.loads((tmp_path / "out" / "scores.json").read_text())["models"]
    assert len(scores) == 4
    run = json.loads((tmp_path / "out" / "runs" / "0.5-1024-4" / "run.json").read_text())
    conversion = json.loads((tmp_path / "out" / "models" / "0.5-1024" / "conversion.json").read_text())
    assert front_table.make(_arguments(words), 0.5, 1024, 4)[1] == conversion["seconds"] + run["seconds"]


def _arguments(words: list[str]):
    import argparse

    output = Path(words[words.index("--output") + 1])
    return argparse.Namespace(base=words[1], mixture=words[3], output=output, context=64, set=words[-5:-3])
