"""Places that a command is given: a home folder's ``~``; and configs that transformers refuses."""

import json
import shutil
from argparse import Namespace
from pathlib import Path

import pytest
import yaml

from moh_llm.cli import main
from moh_llm.commands.recipes import KINDS
from moh_llm.options import Folder, Place, Places, options_of
from moh_llm.recipe import read_options


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    return folder


# Commands whose options are no dataclass, with every path option, and how many of its values name a place in the home.
CALLS = {
    "quickstart": ("--base ~/x --output-dir ~/x", 2),
    "recipes": ("copy data_mixtures --output-dir ~/x", 1),
    "mixture": ("show ~/x", 1),
    "tokenize": ("~/x --tokenizer ~/x --output-dir ~/x", 3),
    "init": ("~/x --tokenizer ~/x --output-dir ~/x", 3),
    "checkpoint": ("export ~/x --output-dir ~/x", 2),
    "report": ("~/x", 1),
    "data": ("fetch-benchmarks ~/x --suite ~/x", 2),
    "serve": ("~/x", 1),
}


def words(value: object) -> list[str]:
    return [word for item in value for word in words(item)] if isinstance(value, list | tuple) else [str(value)]


def parsed(monkeypatch, command: str, *arguments: str) -> Namespace:
    """What a command's job is given."""
    seen: list[Namespace] = []
    monkeypatch.setattr(f"moh_llm.commands.{command}.run", lambda args: seen.append(args) or 0)
    assert main([command, *arguments]) == 0
    return seen[0]


@pytest.mark.parametrize("command", CALLS)
def test_every_path_option_expands_it(command, home, monkeypatch):
    line, number = CALLS[command]
    args = vars(parsed(monkeypatch, command, *line.split()))
    args.pop("command_line")
    found = [word for value in args.values() for word in words(value)]
    assert sum(word.endswith(f"{home}/x") for word in found) == number, found
    assert not [word for word in found if "~" in word]


@pytest.mark.parametrize("kind", KINDS.values())
def test_every_path_of_options_expands_it(kind, home):
    given = {"max_steps": 3, "repo_id": "org/name"}
    paths = [name for name, option in options_of(kind).items() if option.kind in (Place, Folder, Places)]
    values = {name: value for name, value in given.items() if name in options_of(kind)} | dict.fromkeys(paths, "~/x")
    config = read_options(kind, [("test", *item) for item in values.items()])
    assert str(config).count(f"{home}/x") == len(paths) >= 2 and "~" not in str(config)


@pytest.mark.parametrize("command", ["convert", "train"])
def test_a_config_that_transformers_refuses_ends_in_one_line(command, make_llama, tmp_path, capsys):
    shutil.copytree(make_llama(), tmp_path / "base")
    plain = ["convert", str(tmp_path / "base"), "--preset", "paper", "--heldout-tokens", "0"]
    assert main([*plain, "--output-dir", str(tmp_path / "moh")]) == 0
    recipe = {"model": str(tmp_path / "moh"), "output_dir": str(tmp_path / "out"), "max_steps": 1}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe | {"schedule": {"warmup_steps": 1}}))
    for name in ("base", "moh"):
        config = json.loads((tmp_path / name / "config.json").read_text())
        (tmp_path / name / "config.json").write_text(json.dumps(config | {"initializer_range": 1.02}))
        (tmp_path / name / "seal.json").unlink(missing_ok=True)  # which would tell that it was edited
    train = ["train", str(tmp_path / "recipe.yaml")]
    assert main([*plain, "--output-dir", str(tmp_path / "out")] if command == "convert" else train) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "initializer_range" in line]
    assert "config.json" in line
