"""The base never drifts: runs one after the other are taught by, scored and described against the original model."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cards import check_card
from safetensors.torch import load_file, save_file
from trained import load_config, read_record, unfinish
from transformers import LlamaForCausalLM

from moh_llm.cli import main
from moh_llm.data.shards import tokens_for
from moh_llm.data.windows import validation_batches
from moh_llm.metrics import compare_to_reference, logits_of
from moh_llm.modeling import MoHLlamaForCausalLM
from moh_llm.training import networks


@pytest.fixture
def place(base_folder: Path, model_folder: Path, finished_run: Path, tmp_path: Path) -> Path:
    """A folder with a dense model `llama`, its conversion `moh`, whose records name it, and a first run `run1`."""
    place = tmp_path / "place"
    for folder, name in ((base_folder, "llama"), (model_folder, "moh"), (finished_run, "run1")):
        shutil.copytree(folder, place / name)
    for path in place.rglob("conversion.json"):
        record = json.loads(path.read_text())
        record["base"]["name"] = str(place / "llama")
        path.write_text(json.dumps(record))
        (path.parent / "seal.json").unlink()
    return place


@pytest.fixture
def tune(recipe: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """`moh-llm train --model MODEL --output-dir OUTPUT FLAGS`; returns what it printed."""

    def run(model: Path, output: Path, *flags: str, status: int = 0) -> str:
        capsys.readouterr()
        assert main(["train", str(recipe), "--model", str(model), "--output-dir", str(output), *flags]) == status
        found = capsys.readouterr()
        return found.out if status == 0 else found.err

    run.recipe = recipe  # type: ignore[attr-defined]
    return run


def truth(tune: Any, run: Path, base: Path, all_heads: bool = False) -> Any:
    """The saved model against the dense checkpoint, which transformers' own LLaMA computes, on the run's text."""
    model = run / "model"
    config = load_config(tune.recipe, ["--model", str(model), "--output-dir", str(run)])
    sources = tokens_for(config.data.mixture, networks.load_tokenizer(model)).sources
    batches = validation_batches(sources, 32, 512, 2)
    dense = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    tuned = MoHLlamaForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    tuned.set_active_heads(tuned.config.num_attention_heads if all_heads else None)
    return compare_to_reference({"tuned": logits_of(tuned)}, logits_of(dense), batches)["tuned"]


def check_figures(tune: Any, run: Path, base: Path) -> None:
    found, wanted, dense = (
        read_record(run)["evaluation"],
        truth(tune, run, base),
        truth(tune, run, base, all_heads=True),
    )
    assert found["reference"] == "base"
    assert found["perplexity"] / found["reference_perplexity"] == pytest.approx(wanted.perplexity_ratio, rel=1e-4)
    assert found["kl"] == pytest.approx(wanted.kl, rel=1e-4)
    assert found["all_heads_kl"] == pytest.approx(dense.kl, rel=1e-4)
    assert dense.kl > 1e-4  # tuning has moved the model away from its base


def entries_of(run: Path) -> list[dict[str, Any]]:
    return json.loads((run / "model" / "lineage.json").read_text())["entries"]


def card_of(run: Path) -> str:
    return (run / "model" / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["", "--lora.rank 4", "--freeze_base true"])
def test_a_second_run_is_against_the_original_base(place: Path, tune: Any, method: str) -> None:
    one, two = place / "run1", place / "run2"
    said = tune(one / "model", two, "--max_steps", "2", *method.split())
    assert f"teacher: the base, llama, from {place / 'llama'}" in said
    for run in (one, two):
        check_figures(tune, run, place / "llama")
    # What the second run logs before its first step is what the first one ended with.
    log = [json.loads(line) for line in (two / "log.jsonl").read_text().splitlines()]
    ended = read_record(one)["evaluation"]
    assert log[0]["validation"]["kl"] == pytest.approx(ended["kl"], rel=1e-4)
    assert log[0]["validation"]["reference_perplexity"] == pytest.approx(ended["reference_perplexity"], rel=1e-5)

    entries = entries_of(two)
    assert [entry["kind"] for entry in entries] == ["conversion", "run", "run"]
    assert entries[1]["began_with"] == entries[0]["made"] and entries[2]["began_with"] == entries[1]["made"]
    assert entries[0]["made"]["dense"] == entries[0]["dense_sha256"] != entries[1]["made"]["dense"]
    assert (entries[1]["made"]["dense"] == entries[2]["made"]["dense"]) == ("freeze_base" in method)
    assert str(place) not in (two / "model" / "lineage.json").read_text() and entries_of(one) == entries[:2]
    assert "1,024 training tokens in all:" in check_card(card_of(two))["How it was made"]


def test_weights_that_were_changed_between_runs_are_told(place: Path, tune: Any) -> None:
    one, two = place / "run1", place / "run2"
    weights = load_file(one / "model" / "model.safetensors")
    save_file(weights | {"model.norm.weight": weights["model.norm.weight"] + 1}, one / "model" / "model.safetensors")
    tune(one / "model", two, "--max_steps", "1", "--objective.kind", "cross_entropy")
    lineage = check_card(card_of(two))["How it was made"]
    assert "| 3 | cross-entropy | 128 | 1 | `tiny` | 0 | changed | changed |" in lineage
    assert "; **what was done to the weights before entry 3 is not on record in full**" in lineage


@pytest.mark.slow
def test_without_its_base_a_run_is_against_what_it_began_with_and_says_so(place: Path, tune: Any) -> None:
    one, two = place / "run1", place / "run2"
    shutil.rmtree(place / "llama")
    said = tune(one / "model", two)
    assert "teacher: the model it began with, all heads on, since" in said
    record, log = read_record(two), (two / "log.jsonl").read_text()
    wanted = truth(tune, two, one_with_all_heads(one, place / "twin"))
    assert record["evaluation"]["reference"] == "start" and "base" not in log
    assert record["evaluation"]["kl"] == pytest.approx(wanted.kl, rel=1e-4)
    assert "is compared with the model it began with" in check_card(card_of(two))["What it keeps"]
    assert main(["report", str(two)]) == 0
    page = (two / "report.md").read_text()
    assert "model it began with, all heads on" in page and not re.search(r"the base\b|base's", page)


def one_with_all_heads(run: Path, folder: Path) -> Path:
    """The dense model inside a tuned one."""
    assert main(["convert", str(run / "model"), "--to-dense", "--output-dir", str(folder)]) == 0
    return folder


def test_a_wrong_base_is_refused(place: Path, tune: Any, make_llama: Callable[..., Path]) -> None:
    other = make_llama(max_position_embeddings=64, tie_word_embeddings=True, initializer_range=0.1)
    told = tune(place / "moh", place / "run2", "--base", str(other), status=2)
    assert len(told.splitlines()) == 1 and "holds other weights than the checkpoint that model=" in told
    told = tune(place / "moh", place / "run2", "--base", str(place / "no"), status=2)
    assert f"folder {place / 'no'} does not exist" in told
    assert not (place / "run2").exists()
    # What lies where the base lay is not taken for it either.
    shutil.rmtree(place / "llama")
    shutil.copytree(other, place / "llama")
    said = tune(place / "run1" / "model", place / "run2", "--max_steps", "1")
    assert "all heads on, since" in said and "holds other weights than those it was converted from" in said
    (place / "moh" / "conversion.json").unlink()
    told = tune(place / "moh", place / "run3", "--base", str(other), status=2)
    assert "holds no record of a conversion that names a base; drop base" in told


@pytest.mark.slow
def test_a_resumed_run_keeps_what_it_is_compared_with(place: Path, tune: Any) -> None:
    flags = ["--max_steps", "4"]
    one, two, three = place / "run1", place / "run2", place / "run3"
    tune(one / "model", two, *flags)
    before = read_record(two)["evaluation"]
    shutil.move(place / "llama", place / "elsewhere")
    tune(one / "model", three, *flags)
    unfinish(two, 2)
    told = tune(one / "model", two, *flags, status=2)
    assert "was begun against the base, and now the checkpoint it was converted from is not at" in told
    tune(one / "model", two, "--base", str(place / "elsewhere"), *flags)
    assert read_record(two)["evaluation"] == before
    unfinish(three, 2)
    told = tune(one / "model", three, "--base", str(place / "elsewhere"), *flags, status=2)
    assert "was begun without its base, against the model it began with, all heads on" in told
    shutil.move(place / "elsewhere", place / "llama")
    assert "teacher: the model it began with, all heads on, as when the run was begun" in tune(
        one / "model", three, *flags
    )
