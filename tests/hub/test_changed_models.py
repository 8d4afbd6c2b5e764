"""Folders that changed since they were made, and records of another model: found by all who read them."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file, save_file

from moh_llm.cli import main
from moh_llm.errors import UserError
from moh_llm.hub.card import build_card
from moh_llm.records.evaluation import read_evaluation
from moh_llm.records.identity import hash_model, hash_weights, read_records
from moh_llm.records.seal import Seal


@pytest.fixture(scope="session")
def sealed(
    make_llama: Callable[..., Path],
    convert: Callable[..., int],
    made_once: Callable[[str, Callable[[Path], object]], Path],
) -> Path:
    """A verified conversion as users get it, not to be changed."""

    def make(folder: Path) -> None:
        base = make_llama(num_attention_heads=8, hidden_size=64, initializer_range=0.1)
        (base / "LICENSE").write_text("Apache License\nVersion 2.0, January 2004\n")
        assert convert(base, folder / "moh", "--context", "64", "--fallback", "value", "--num-active-heads", "6") == 0

    return made_once("sealed", make) / "moh"


@pytest.fixture
def folder(sealed: Path, tmp_path: Path) -> Path:
    """A copy of `sealed`."""
    return Path(shutil.copytree(sealed, tmp_path / "moh"))


def flip(path: Path) -> None:
    """Flip a bit in the middle of a file; in texts it makes another letter or figure."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def fewer_heads(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_active_heads": [3, config["num_active_heads"][1]]}))


def change_tensor(folder: Path, name: str, factor: float) -> None:
    (shard,) = (path for path in folder.glob("*.safetensors") if name in load_file(path))
    tensors = load_file(shard)
    save_file(tensors | {name: tensors[name] * factor}, shard, {"format": "pt"})


# How a folder is changed, and what of it then differs from its records.
EDITS: dict[str, tuple[Callable[[Path], None], str]] = {
    "fewer heads": (fewer_heads, "head plan"),
    "a router negated": (
        lambda folder: change_tensor(folder, "model.layers.0.self_attn.router.routed.weight", -1),
        "weights of routers",
    ),
    "a matrix of an MLP": (
        lambda folder: change_tensor(folder, "model.layers.1.mlp.down_proj.weight", 1.5),
        "weights of the dense part",
    ),
}
FILES = ["model-00001-of-00002.safetensors", "tokenizer.json", "config.json", "conversion.json"]


def publish(folder: Path, *flags: str) -> int:
    return main(["publish", str(folder), "--repo-id", "org/moh", "--dry-run", *flags])


def only_line(capsys: pytest.CaptureFixture[str]) -> str:
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_what_was_made_is_as_it_was_sealed(folder: Path) -> None:
    records = read_records(folder)
    assert records.changed is None and records.conversion and records.conversion.verification
    seal = Seal.read(folder / "seal.json")
    assert set(seal.files) == {path.name for path in folder.iterdir()} - {"seal.json"}  # the card, too
    (folder / "seal.json").unlink()
    assert hash_model(folder) == seal.model == records.model  # by the tensors themselves
    assert hash_weights(folder).dense == records.conversion.base.dense_sha256


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_refused_by_publish_and_told_by_others(folder: Path, name: str, capsys) -> None:
    flip(folder / name)
    assert publish(folder) == 2
    assert name in only_line(capsys)
    try:
        records = read_records(folder)
    except UserError as error:  # a seal or a config that is none
        assert name in str(error)
    else:
        (line,) = records.lines("moh")
        assert name in line
        assert records.conversion is None or records.conversion.verification is None


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_model_without_a_seal_is_not_published_with_its_records(folder: Path, edit: str, capsys) -> None:
    change, part = EDITS[edit]
    change(folder)
    (folder / "seal.json").unlink()  # as another program would save it
    assert publish(folder) == 2
    line = only_line(capsys)
    assert part in line and "publish it without their figures" in line


def test_files_that_people_edit_are_no_fault(folder: Path) -> None:
    generation = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(generation | {"temperature": 0.7}))
    (folder / "chat_template.jinja").write_text("{{ messages }}")  # one that was not there
    for name in ("README.md", "LICENSE"):
        (folder / name).write_text("Mine.\n")
    assert read_records(folder).changed is None
    (folder / "seal.json").unlink()
    assert read_records(folder).changed is None


@pytest.mark.parametrize("name", ["model.safetensors", "added_tokens.json"])
def test_a_file_that_would_be_loaded_and_was_added_is_a_change(folder: Path, name: str) -> None:
    shutil.copyfile(folder / "model-00002-of-00002.safetensors", folder / name)
    assert "was added later" in str(read_records(folder).changed)


def test_a_record_of_another_folder_is_found(folder: Path) -> None:
    record = json.loads((folder / "conversion.json").read_text())
    other = dict.fromkeys(record["made"], "0" * 64)
    (folder / "conversion.json").write_text(json.dumps(record | {"made": other}))
    assert "conversion.json" in str(read_records(folder).changed)
    (folder / "seal.json").unlink()
    assert "conversion.json is of a model with weights" in str(read_records(folder).changed)


# ---- training


@pytest.fixture
def recipe(recipe: Path, folder: Path) -> Path:
    """A recipe of two steps from `folder` that does not publish."""
    content = yaml.safe_load(recipe.read_text()) | {"model": str(folder), "max_steps": 2, "hub": None}
    content |= {"evaluation": {"eval_steps": 0, "max_tokens": 128}, "checkpoint": {"save_steps": 1}}
    recipe.write_text(yaml.safe_dump(content))
    return recipe


def conversion_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "conversion.json").read_text())


def test_training_takes_nothing_from_records_of_another_model(folder: Path, recipe: Path, capsys) -> None:
    fewer_heads(folder)
    assert main(["train", str(recipe)]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "of its records only the base" in line)
    assert "config.json" in line
    made = recipe.parent / "run" / "model"
    assert read_records(made).changed is None
    kept = conversion_of(made)
    assert "config.json" in kept["set_aside"] and "fitted nothing" not in (made / "README.md").read_text()
    assert kept["base"] == conversion_of(folder)["base"] and not kept.get("verification") and not kept.get("plan")


def test_a_model_that_is_exchanged_while_it_is_trained_is_found(folder: Path, recipe: Path, monkeypatch, capsys):
    """What is not trained is read from it again when the result is saved."""
    from moh_llm.training.checkpoints import CheckpointWriter

    begin = CheckpointWriter.begin

    def exchange(self: CheckpointWriter, step: int, facts: dict[str, Any]) -> Path:
        if step == 2:
            change_tensor(folder, "model.layers.1.mlp.down_proj.weight", 1.5)
        return begin(self, step, facts)

    monkeypatch.setattr(CheckpointWriter, "begin", exchange)
    assert main(["train", str(recipe), "--freeze_base", "true"]) == 2
    assert "has weights of the dense part other than when the run began" in capsys.readouterr().err
    assert not (recipe.parent / "run" / "model").exists()


def test_a_tuned_model_is_sealed_with_its_card_and_stays_finished(folder: Path, recipe: Path, capsys) -> None:
    assert main(["train", str(recipe)]) == 0
    made = recipe.parent / "run" / "model"
    assert (made / "README.md").is_file() and read_records(made).changed is None
    capsys.readouterr()
    assert main(["train", str(recipe)]) == 0
    assert "nothing to do" in capsys.readouterr().out
    run = json.loads((recipe.parent / "run" / "run.json").read_text())
    assert run["made"] == hash_model(made).content()
    export, step = recipe.parent / "exported", made.parent / "checkpoints" / "step-000001"
    assert main(["checkpoint", "export", str(step), "--output-dir", str(export)]) == 0
    assert read_records(export).changed is None and (export / "seal.json").is_file()
    # The run beside it made another model.
    shutil.rmtree(made)
    shutil.copytree(export, made)
    capsys.readouterr()
    assert publish(made) == 2
    assert "other than the model that the run in" in only_line(capsys)


def test_a_base_with_one_other_tensor_teaches_nobody(folder: Path, recipe: Path, capsys) -> None:
    place = Path(conversion_of(folder)["base"]["name"])
    moved = Path(shutil.copytree(place, recipe.parent / "base"))
    change_tensor(moved, "model.layers.1.mlp.down_proj.weight", 1.5)
    recipe.write_text(yaml.safe_dump(yaml.safe_load(recipe.read_text()) | {"base": str(moved)}))
    assert main(["train", str(recipe)]) == 2
    assert "holds other weights than the checkpoint" in only_line(capsys)


# ---- evaluation


@pytest.mark.slow
def test_an_evaluation_says_that_a_model_is_not_what_its_records_describe(folder: Path, tmp_path: Path, capsys) -> None:
    """And it is on no card of a model with another plan."""
    before = Path(shutil.copytree(folder, tmp_path / "before"))
    fewer_heads(folder)
    flags = ["--suite", "smoke", "--limit", "2", "--no-analysis", "--output-dir", str(tmp_path / "report")]
    assert main(["evaluate", str(folder), *flags]) == 0
    said = capsys.readouterr()
    (line,) = (line for line in said.err.splitlines() if "of its records only the base" in line)
    assert "config.json was changed" in line and "CHANGED: model" in said.out + said.err
    about = read_evaluation(tmp_path / "report").models["model"]
    assert about.changed and not about.records and about.plan_sha256 == hash_model(folder).plan
    with pytest.raises(UserError, match=rf"scored the weights in {re.escape(str(before))} with another head plan"):
        build_card(before, None, evaluation=tmp_path / "report")
