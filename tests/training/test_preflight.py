"""What `moh-llm doctor` says of a job, and the faults that it finds before a model is loaded."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from trained import load_config, unfinish

from moh_llm.cli import main
from moh_llm.errors import UserError
from moh_llm.modeling import MoHLlamaConfig, MoHLlamaForCausalLM
from moh_llm.training.config import TrainConfig
from moh_llm.training.loop import train
from moh_llm.training.preflight import check_model, diagnose, read_model_config

RECIPES = sorted(
    path
    for path in (Path(__file__).parents[2] / "recipes").glob("*.yaml")
    if not path.stem.startswith(("convert_", "evaluate_")) and "\nimages:" not in path.read_text()
)


@pytest.fixture
def model_copy(model_folder: Path, tmp_path: Path) -> Path:
    """The tiny model, to be changed."""
    return Path(shutil.copytree(model_folder, tmp_path / "model"))


@pytest.fixture
def make(configure: Callable[..., TrainConfig]) -> Callable[..., TrainConfig]:
    """`configure`, of paths too."""
    return lambda **keys: configure(
        **{key: str(value) if isinstance(value, Path) else value for key, value in keys.items()}
    )


def edit(model: Path, **fields: object) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_a_fit_job_is_described(recipe, run, capsys) -> None:
    """Its text is in the cache, as the fixture's run has read it."""
    config = load_config(recipe)
    assert main(["doctor", str(recipe), "--processes=2", "--output-dir", str(run.parent / "new")]) == 0
    said = capsys.readouterr().out
    assert {line.split()[0] for line in said.splitlines()} == {"ok"}
    network = MoHLlamaForCausalLM.from_pretrained(config.model)
    weights = sum(weight.numel() for weight in network.parameters())
    assert f"{4 * weights / 2**30:.2f} GiB of weights" in said
    assert "2 processes x 1 micro-batches x 2 sequences" in said
    read = json.loads((run / "run.json").read_text())["data_read"]
    for name, entry in read.items():
        assert f"{name}: {entry['tokens']:,} tokens to be read of" in said
    assert "6 steps x 4 sequences x 32 tokens = 768 tokens" in said


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_is_one_that_the_doctor_takes(path, model_folder, tmp_path) -> None:
    keys = {"model": model_folder, "output_dir": tmp_path / "run", "data.mixture": tmp_path / "none"}
    config = load_config(path, [f"--{name}={value}" for name, value in keys.items()])
    found = list(diagnose(config))
    assert [finding.check for finding in found if finding.state == "fault"] == ["data"]
    assert found[-1].check == "job"


def test_faults_are_status_1_and_name_their_way_out(recipe, model_copy, finished_run, capsys, monkeypatch) -> None:
    def fault(*flags: object) -> str:
        assert main(["doctor", str(recipe), *map(str, flags)]) == 1
        (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("fault")]
        return line

    assert "data.batch_size=4 must be a multiple" in fault("--processes", 3)
    assert "is not a folder" in fault("--model", "none")
    assert "report_to: aim needs the package aim" in fault("--report_to", "[aim]")
    assert "different: seed" in fault("--output-dir", finished_run, "--seed", 1)
    assert "tokens, fewer than one" in fault("--data.sequence_length", 10**6)
    assert "objective.keys=0.5 has no effect" in fault("--objective.keys", 0.5)
    (model_copy / "nowhere.yaml").write_text("name: n\nsources: {a: {weight: 1, files: /nowhere/*.jsonl}}\n")
    assert "no file at /nowhere/*.jsonl" in fault("--data.mixture", model_copy / "nowhere.yaml")
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: False)
        assert f"{model_copy.parent} cannot be written" in fault("--output-dir", model_copy.parent / "run")
    for path in model_copy.glob("tokenizer*"):
        path.unlink()
    assert "has no tokenizer that loads" in fault("--model", model_copy)
    next(model_copy.glob("*.safetensors")).unlink()
    assert "fault    model" in fault("--model", model_copy)


def test_text_that_is_not_the_runs(configure, run, mixture_file, tmp_path, monkeypatch) -> None:
    text = Path(shutil.copytree(mixture_file.parent, tmp_path / "text"))
    unfinish(run, 4)

    def found(**keys: str) -> list[tuple[str, str]]:
        return [(each.state, each.check) for each in diagnose(configure(**keys)) if each.state != "ok"]

    assert found() == []
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 0))
        assert found() == [("warning", "job")]
    with next(text.glob("one*")).open("a") as file:
        file.write('{"text": "One more document."}\n')
    assert found(**{"data.mixture": str(text / "mixture.yaml")}) == [("warning", "data")]
    record = json.loads((run / "run.json").read_text())
    record["data"] = dict(reversed(record["data"].items()))
    (run / "run.json").write_text(json.dumps(record))
    assert found() == [("fault", "data")]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "llama"}, "has model_type=llama, not moh_llama; convert it first"),
        ({"router_score": "weighted", "head_fallback": "none"}, "it is not its dense form, so there is no teacher"),
        ({"num_active_heads": 4}, "there is nothing for distillation to recover; set objective.kind to cross_entropy"),
    ],
)
def test_models_that_cannot_be_trained_so_are_refused(make, model_copy, fields, message) -> None:
    edit(model_copy, **fields)
    with pytest.raises(UserError) as error:
        read_model_config(make(model=model_copy))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_sequences_in_which_all_heads_are_on_are_refused(make, model_copy) -> None:
    """There student and teacher are the same; cross-entropy has something to learn, and longer sequences have, too."""
    edit(model_copy, head_fallback="local", local_window=8, local_sinks=2, local_start=64)
    short, long = ({"model": model_copy, "data.sequence_length": length} for length in (64, 65))
    by_text = {"objective.kind": "cross_entropy"}
    for keys in (short, short | by_text | {"freeze_base": True}):
        with pytest.raises(UserError, match=r"data.sequence_length=64: .* for a document's first 64 tokens.*--context"):
            read_model_config(make(**keys))
    assert read_model_config(make(**short, **by_text)).local_start == 64
    assert read_model_config(make(**long)).local_start == 64


def test_documents_in_which_all_heads_are_on_are_warned_of(make, budget_folder, tmp_path) -> None:
    """Sequences are longer than that, and no document is."""
    place, source = tmp_path / "text.yaml", {"weight": 1, "files": "text.jsonl"}
    place.write_text(json.dumps({"name": "text", "sources": {"text": source}}))
    for letters in (40, 4):
        (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": "a" * letters}) + "\n" for _ in range(999)))
        config = make(model=budget_folder, freeze_base=True, max_steps=1, **{"data.mixture": place})
        said: list[str] = []
        train(replace(config, output_dir=str(tmp_path / str(letters))), say=said.append)
        warned = [line for line in said if "(local_start)" in line]
        assert warned == [f"warning: {found.text}" for found in diagnose(config) if found.state == "warning"]
        assert len(warned) == (letters < 8)
    assert "has 5 tokens" in warned[0]


@pytest.mark.parametrize(
    ("rope", "length", "warned"),
    [
        (None, 65, "data.sequence_length=65 is above the 64 positions"),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256, None),
    ],
)
def test_sequences_beyond_the_positions_are_warned_of(make, model_copy, rope, length, warned) -> None:
    if rope is not None:
        edit(model_copy, rope_parameters=rope | {"rope_theta": 10000.0})
    found = check_model(make(model=model_copy, **{"data.sequence_length": length}), divided=False)
    assert found is None if warned is None else found.startswith(warned)


def test_training_warns_and_goes_on(configure) -> None:
    said: list[str] = []
    train(configure(max_steps=1, **{"evaluation.eval_steps": 0, "data.sequence_length": 80}), say=said.append)
    assert any(line.startswith("warning: data.sequence_length=80") for line in said)
    assert MoHLlamaConfig.from_pretrained(configure().model).max_position_embeddings == 64
