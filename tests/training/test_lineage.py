"""The base never drifts: runs one after the other are taught by, scored and described against the original checkpoint."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import LlamaForCausalLM

from moh_llm.cli import main
from moh_llm.data.tokens import tokens_for
from moh_llm.data.windows import validation_batches
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
    assert "teacher: the base, llama; with all heads on the model is it still" in first
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
