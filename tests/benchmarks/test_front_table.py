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
    base, mixture, output = make_llama(max_position_embeddings=256), tmp_path / "mixture.yaml", tmp_path / "out"
    source = f"sources:\n  river:\n    weight: 1\n    files: {river}\n"
    mixture.write_text(f"name: river\nvalidation_share: 0.2\n{source}")
    words = ["front_table.py", str(base), "--mixture", str(mixture), "--text", str(river), "--output", str(output)]
    words += ["--shares", "0.5", "--levels", "1024:0", "1024:4", "--context", "64", "--documents", "8"]
    words += ["--last", "--tokens-per-document", "200"]
    words += ["--set", "mixed_precision=no", "optimizer.learning_rate=1e-3", "evaluation.max_tokens=512"]
    monkeypatch.setattr(sys, "argv", words)
    assert front_table.main() == 0
    rows = re.findall(r"^\| \d.* s \| (.*) \|$", capfd.readouterr().out, re.MULTILINE)
    kl = [[float(value) for value in re.findall(r"KL ([\d.]+)", row)] for row in rows]
    assert len(kl) == 2 and len(kl[0]) == len(kl[1]) == 1 and kl[0] != kl[1]
    run, conversion = (
        json.loads((output / name).read_text())
        for name in ("runs/0.5-1024-4/run.json", "models/0.5-1024/conversion.json")
    )
    # Again: nothing is made anew.
    made = [path.stat().st_mtime_ns for path in sorted(output.glob("*/*/**/*.safetensors"))]
    assert front_table.main() == 0
    assert (
        f"0.5 of the heads, 1024 tokens, 4 steps: {conversion['seconds'] + run['seconds']:.0f} s"
        in capfd.readouterr().out
    )
    # Models of another length are not taken.
    monkeypatch.setattr(sys, "argv", [word if word != "64" else "32" for word in words])
    assert front_table.main() == 1
    assert "holds results of another context (" in capfd.readouterr().err
    assert made and made == [path.stat().st_mtime_ns for path in sorted(output.glob("*/*/**/*.safetensors"))]
