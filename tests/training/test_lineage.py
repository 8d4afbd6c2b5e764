"""The base never drifts: runs one after the other are taught by, scored and described against the original model."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from cards import check_card
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from moh_llm.cli import main
from moh_llm.data.tokens import tokens_for
from moh_llm.data.windows import validation_batches
from moh_llm.hub.card import build_card
from moh_llm.metrics import compare_to_reference, logits_of
from moh_llm.modeling import MoHLlamaForCausalLM
from moh_llm.training import networks
from moh_llm.training.recipe import load_config


@pytest.fixture(scope="module")
def origin(
    make_llama: Callable[..., Path], convert: Callable[..., int], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A folder with a dense model `llama` and its default conversion `moh`, not to be changed."""
    folder = tmp_path_factory.mktemp("origin")
    shutil.move(make_llama(num_hidden_layers=3), folder / "llama")
    assert convert(folder / "llama", folder / "moh", "--num-active-heads", "2") == 0
    return folder


@pytest.fixture
def place(origin: Path, tmp_path: Path) -> Path:
    """`origin` in a folder that a test may change, its conversion naming the model there."""
    place = Path(shutil.copytree(origin, tmp_path / "place"))
    path = place / "moh" / "conversion.json"
    record = json.loads(path.read_text())
    record["base"]["name"] = str(place / "llama")
    path.write_text(json.dumps(record))
    return place


@pytest.fixture
def tune(mixture_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """`moh-llm train --model MODEL --output OUTPUT`, 8 steps; returns what it printed."""
    content = {
        "model": "",
        "output": "",
        "max_steps": 8,
        "data": {"mixture": str(mixture_file), "block_length": 32, "batch_size": 4, "micro_batch_size": 4},
        "optimizer": {"learning_rate": 1e-2, "router_learning_rate": 1e-2},
        "schedule": {"warmup_steps": 1, "start_learning_rate": 1e-4, "final_learning_rate": 1e-3},
        "evaluation": {"every": 4, "max_tokens": 512},
        "trackers": [],
    }
    recipe = tmp_path / "tune.yaml"
    recipe.write_text(yaml.safe_dump(content))

    def run(model: Path, output: Path, *flags: str, status: int = 0) -> str:
        capsys.readouterr()
        assert main(["train", str(recipe), "--model", str(model), "--output", str(output), *flags]) == status
        found = capsys.readouterr()
        return found.out if status == 0 else found.err

    run.recipe = recipe  # type: ignore[attr-defined]
    return run


def record_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "run.json").read_text())


def truth(tune: Any, run: Path, base: Path, all_heads: bool = False) -> Any:
    """The saved model against the dense checkpoint, which transformers' own LLaMA computes, on the run's text."""
    model = run / "model"
    config = load_config(tune.recipe, ["--model", str(model), "--output", str(run)])
    sources = tokens_for(config.data.mixture, networks.load_tokenizer(model), print).sources
    batches = validation_batches(sources, 32, 512, 2)
    dense = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    tuned = MoHLlamaForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    tuned.set_active_heads(tuned.config.num_attention_heads if all_heads else None)
    return compare_to_reference({"tuned": logits_of(tuned)}, logits_of(dense), batches)["tuned"]


def check_figures(tune: Any, run: Path, base: Path) -> None:
    found, wanted, dense = record_of(run)["evaluation"], truth(tune, run, base), truth(tune, run, base, all_heads=True)
    assert found["reference"] == "base"
    assert found["perplexity"] / found["reference_perplexity"] == pytest.approx(wanted.perplexity_ratio, rel=1e-4)
    assert found["kl"] == pytest.approx(wanted.kl, rel=1e-4)
    assert found["all_heads"]["kl"] == pytest.approx(dense.kl, rel=1e-4)
    assert dense.kl > 0.01  # tuning has moved the model away from its base


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_second_run_is_against_the_original_base(place: Path, tune: Any, method: str) -> None:
    flags = ["--lora.rank", "4"] if method == "lora" else []
    one, two = place / "run1", place / "run2"
    first = tune(place / "moh", one, *flags)
    assert "teacher: the base, llama, which the model is with all heads on" in first
    second = tune(one / "model", two, "--seed", "1", "--max_steps", "4", *flags)
    assert f"teacher: the base, llama, from {place / 'llama'}" in second
    for run in (one, two):
        check_figures(tune, run, place / "llama")
    # What the second run logs before its first step is what the first one ended with.
    log = [json.loads(line) for line in (two / "log.jsonl").read_text().splitlines()]
    ended = record_of(one)["evaluation"]
    assert log[0]["validation"]["kl"] == pytest.approx(ended["kl"], rel=1e-4)
    assert log[0]["validation"]["reference_perplexity"] == pytest.approx(ended["reference_perplexity"], rel=1e-5)
    assert "floor" not in log[0]["validation"] and "floor" not in record_of(two)["evaluation"]

    entries = json.loads((two / "model" / "lineage.json").read_text())["entries"]
    assert [entry["kind"] for entry in entries] == ["conversion", "run", "run"]
    assert [entry.get("tokens") for entry in entries] == [None, 8 * 128, 4 * 128]
    assert entries[1]["began_with"] == entries[0]["made"] and entries[2]["began_with"] == entries[1]["made"]
    assert entries[0]["made"]["dense"] == entries[0]["dense_sha256"] != entries[1]["made"]["dense"]
    assert str(place) not in (two / "model" / "lineage.json").read_text()
    assert json.loads((one / "model" / "lineage.json").read_text())["entries"] == entries[:2]


def card_of(run: Path) -> str:
    return (run / "model" / "README.md").read_text()


def test_the_card_lists_every_run_and_its_tokens(place: Path, tune: Any) -> None:
    one, two = place / "run1", place / "run2"
    tune(place / "moh", one)
    tune(one / "model", two, "--seed", "7", "--max_steps", "4", "--objective.kind", "cross_entropy", "--lora.rank", "4")
    found = record_of(two)["evaluation"]
    sections, card = check_card(card_of(two)), card_of(two)
    rows = [line for line in sections["Lineage"].split("\n") if line.startswith("|")][2:]
    assert rows == [
        "| conversion | of llama | - | - |  |  |",
        "| run 1 | distillation, teacher: the base; all weights | 1,024 | 8 | `mixture` | 0 |",
        "| run 2 | cross-entropy on the text; LoRA of rank 4 | 512 | 4 | `mixture` | 7 |",
    ]
    assert "1,536 training tokens in all." in sections["Lineage"] and "not on record" not in sections["Lineage"]
    ratio = found["perplexity"] / found["reference_perplexity"]
    assert (
        f"Tuned on 1,536 tokens in 2 runs, it has {ratio:.4f} times the perplexity of its base, on held-out text"
        in card
    )
    proof = sections["Conversion proof"]
    assert "When it was converted, with every head on each layer's output equalled the base's bit for bit" in proof
    assert f"with every head on, it has KL {found['all_heads']['kl']:#.3g} nats per token to the base" in proof
    assert "equals" not in proof
    assert "ratio to the base's | KL to the base, nats" in sections["Recovery"]
    assert f"with every head on, the saved model has KL {found['all_heads']['kl']:#.3g}." in sections["Recovery"]
    # The converted model's own card claims it of itself, in the present.
    untuned = check_card(build_card(place / "moh", None))
    assert "With every head on, each layer's output equals the base's bit for bit" in untuned["Conversion proof"]
    assert "Lineage" not in untuned


def test_weights_that_were_changed_between_runs_are_told(place: Path, tune: Any) -> None:
    one, two = place / "run1", place / "run2"
    tune(place / "moh", one, "--max_steps", "1")
    weights = load_file(one / "model" / "model.safetensors")
    save_file(weights | {"model.norm.weight": weights["model.norm.weight"] + 1}, one / "model" / "model.safetensors")
    tune(one / "model", two, "--max_steps", "1")
    assert "**What was done to the weights before run 2 is not on record in full.**" in card_of(two)


def test_a_base_that_has_moved_is_named(place: Path, tune: Any) -> None:
    one, two = place / "run1", place / "run2"
    tune(place / "moh", one)
    shutil.move(place / "llama", place / "elsewhere")
    said = tune(one / "model", two, "--base", str(place / "elsewhere"))
    assert f"teacher: the base, llama, from {place / 'elsewhere'}" in said
    check_figures(tune, two, place / "elsewhere")
    # Laid out in other files it is the same checkpoint; so is the untuned conversion, whose dense part it is.
    LlamaForCausalLM.from_pretrained(place / "elsewhere").save_pretrained(place / "shards", max_shard_size="30KB")
    assert len([*(place / "shards").glob("*.safetensors")]) > 1
    for number, again in enumerate(("shards", "moh")):
        run = place / f"again{number}"
        assert f"from {place / again}" in tune(one / "model", run, "--base", str(place / again))
        assert record_of(run)["evaluation"] == record_of(two)["evaluation"]


def test_without_its_base_a_run_is_against_what_it_began_with_and_says_so(place: Path, tune: Any) -> None:
    one, two = place / "run1", place / "run2"
    tune(place / "moh", one)
    shutil.rmtree(place / "llama")
    said = tune(one / "model", two)
    assert (
        "teacher: the model it began with, all heads on, since the checkpoint it was converted from is not at" in said
    )
    assert not re.search(r"\bbase\b", said.lower())
    record, log = record_of(two), (two / "log.jsonl").read_text()
    wanted = truth(tune, two, one_with_all_heads(one, place / "twin"))
    assert record["evaluation"]["reference"] == "start" and "base" not in log
    assert record["evaluation"]["kl"] == pytest.approx(wanted.kl, rel=1e-4)
    assert json.loads(log.split("\n")[0])["validation"]["floor"] == pytest.approx(0, abs=1e-6)
    sections = check_card(card_of(two))
    assert "times the perplexity of the model it began with, all heads on, on held-out text" in card_of(two)
    assert "base" not in sections["Recovery"] + sections["Training"]
    assert "nats per token to the model it began with, all heads on (" in sections["Conversion proof"]
    assert (
        "| run 2 | distillation, teacher: the model it began with, all heads on; all weights |" in sections["Lineage"]
    )
    report(two, place / "report")
    page = (place / "report" / "report.md").read_text() + (place / "report" / "report.html").read_text()
    assert "model it began with, all heads on" in page and not re.search(r"the base\b|base's", page)


def one_with_all_heads(run: Path, folder: Path) -> Path:
    """The dense model inside a tuned one."""
    assert main(["convert", str(run / "model"), "--to-dense", "--output", str(folder)]) == 0
    return folder


def report(run: Path, output: Path) -> None:
    assert main(["report", str(run), "--output", str(output)]) == 0


def test_a_wrong_base_is_refused(place: Path, tune: Any, make_llama: Callable[..., Path]) -> None:
    other = make_llama(num_hidden_layers=3, initializer_range=0.1)
    told = tune(place / "moh", place / "run1", "--base", str(other), status=2)
    assert len(told.splitlines()) == 1
    assert (
        "holds other weights than the checkpoint that model=" in told and "converted from, llama (fingerprint" in told
    )
    assert f"folder {place / 'no'} does not exist" in tune(
        place / "moh", place / "run1", "--base", str(place / "no"), status=2
    )
    assert not (place / "run1").exists()
    # What lies where the base lay is not taken for it either.
    tune(place / "moh", place / "run1")
    shutil.rmtree(place / "llama")
    shutil.copytree(other, place / "llama")
    said = tune(place / "run1" / "model", place / "run2")
    assert "all heads on, since" in said and "holds other weights than those it was converted from" in said
    (place / "moh" / "conversion.json").unlink()
    told = tune(place / "moh", place / "run3", "--base", str(other), status=2)
    assert "holds no record of a conversion that names a base; drop base" in told


def unfinished(run: Path, checkpoint: int) -> None:
    """Make a finished run one that stopped after a checkpoint."""
    (run / "run.json").write_text(json.dumps(record_of(run) | {"status": "running"}))
    shutil.rmtree(run / "model")
    for path in (run / "checkpoints").iterdir():
        if int(path.name.removeprefix("step-")) > checkpoint:
            shutil.rmtree(path)


def test_a_resumed_run_keeps_what_it_is_compared_with(place: Path, tune: Any) -> None:
    flags = ["--checkpoint.every", "4"]
    one, two, three = place / "run1", place / "run2", place / "run3"
    tune(place / "moh", one)
    tune(one / "model", two, *flags)
    before = record_of(two)["evaluation"]
    shutil.move(place / "llama", place / "elsewhere")
    tune(one / "model", three, *flags)
    unfinished(two, 4)
    told = tune(one / "model", two, *flags, status=2)
    assert "was begun against the base, and now the checkpoint it was converted from is not at" in told
    tune(one / "model", two, "--base", str(place / "elsewhere"), *flags)
    assert record_of(two)["evaluation"] == before
    unfinished(three, 4)
    told = tune(one / "model", three, "--base", str(place / "elsewhere"), *flags, status=2)
    assert "was begun without its base, against the model it began with, all heads on" in told
    shutil.move(place / "elsewhere", place / "llama")
    assert "teacher: the model it began with, all heads on, as when the run was begun" in tune(
        one / "model", three, *flags
    )


def test_the_floor_is_what_precision_alone_leaves(place: Path, tune: Any) -> None:
    run = place / "run1"
    said = tune(place / "moh", run, "--mixed_precision", "bf16", "--max_steps", "1")
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    floor = log[0]["validation"]["floor"]
    config = load_config(tune.recipe, ["--model", str(place / "moh"), "--output", str(run)])
    sources = tokens_for(config.data.mixture, networks.load_tokenizer(place / "moh"), print).sources
    teacher = LlamaForCausalLM.from_pretrained(place / "llama", dtype=torch.bfloat16).eval()
    student = LlamaForCausalLM.from_pretrained(place / "llama", dtype=torch.float32).eval()
    with torch.autocast("cpu", torch.bfloat16):
        found = compare_to_reference(
            {"student": logits_of(student)}, logits_of(teacher), validation_batches(sources, 32, 512, 2)
        )
    assert floor > 1e-6 and floor == pytest.approx(found["student"].kl, rel=0.05)
    assert log[0]["validation"]["kl"] > 10 * floor
    assert record_of(run)["evaluation"]["floor"] == floor and record_of(run)["evaluation"]["dtype"] == "bfloat16"
    assert said.count(f", floor {floor:.2g}") == 2  # step 0, and the saved model
    recovery = check_card(card_of(run))["Recovery"]
    assert f"KL was {floor:#.2g}, which the precisions of student and teacher alone leave" in recovery
    assert "The saved model and what it is compared with were scored in bfloat16" in recovery


def test_a_tuned_model_that_is_converted_again_keeps_its_history(
    place: Path, tune: Any, convert: Callable[..., int]
) -> None:
    tune(place / "moh", place / "run1", "--max_steps", "2")
    dense = one_with_all_heads(place / "run1", place / "dense")
    assert convert(dense, place / "again", "--num-active-heads", "3") == 0
    tune(place / "again", place / "run2", "--max_steps", "1")
    entries = json.loads((place / "run2" / "model" / "lineage.json").read_text())["entries"]
    assert [entry["kind"] for entry in entries] == ["conversion", "run", "conversion", "run"]
    card = card_of(place / "run2")
    assert (
        "384 training tokens in all." in card and "| conversion | of dense |" in card and "not on record in" not in card
    )
