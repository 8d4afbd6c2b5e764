"""Places that a command is given: a home folder's ``~``, and outputs that are links."""

import json
import os
import pwd
import shutil
from argparse import Namespace
from pathlib import Path

import pytest
import yaml

from moh_llm.cli import main
from moh_llm.commands.reference import KINDS
from moh_llm.data.mixture import load_mixture
from moh_llm.devices import check_disk
from moh_llm.errors import UserError
from moh_llm.files import new_folder
from moh_llm.options import Folder, Place, Places, options_of
from moh_llm.reading import expand_home
from moh_llm.recipe import read_options

# ---- a home folder


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    return folder


def test_a_leading_tilde_is_a_home_folder(home):
    me = pwd.getpwuid(os.getuid())
    assert expand_home("~") == str(home) and expand_home("~/moh") == f"{home}/moh"
    assert expand_home(Path("~/moh")) == f"{home}/moh"
    assert expand_home(f"~{me.pw_name}/moh") == f"{me.pw_dir}/moh"
    assert [expand_home(name) for name in ("org/name", "a~b", "a/~/b", "")] == ["org/name", "a~b", "a/~/b", ""]
    with pytest.raises(UserError, match=r"no home folder ~nobody-of-that-name; write \./~nobody-of-that-name"):
        expand_home("~nobody-of-that-name/moh")


# Commands whose options are no dataclass, with every path option, and how many of its values name a place in the home.
CALLS = {
    "quickstart": ("--base ~/x --output ~/x", 2),
    "recipes": ("copy data_mixtures --output ~/x", 1),
    "mixture": ("show ~/x --tokenizer ~/x", 2),
    "tokenize": ("~/x --tokenizer ~/x --output ~/x", 3),
    "init": ("~/x --tokenizer ~/x --output ~/x", 3),
    "checkpoint": ("export ~/x --output ~/x", 2),
    "doctor": ("x.yaml --json ~/x", 1),
    "report": ("~/x ~/x --output ~/x --baseline ~/x", 4),
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
    assert str(config).count(f"{home}/x") == len(paths) >= 3 and "~" not in str(config)


def test_a_mixtures_own_folder_may_hold_one_named_tilde(home, tmp_path):
    content = {"sources": {"a": {"weight": 1, "files": ["~/c4.jsonl", "./~/c4.jsonl"]}}}
    (tmp_path / "m.yaml").write_text(yaml.safe_dump(content))
    (source,) = load_mixture(tmp_path / "m.yaml").sources
    assert source.files == (f"{home}/c4.jsonl", f"{tmp_path}/~/c4.jsonl")


# ---- outputs that are links


def test_what_a_link_leads_to_is_replaced_and_the_link_stays(tmp_path):
    (tmp_path / "disk" / "made").mkdir(parents=True)
    (tmp_path / "out").symlink_to("disk/made")
    for number in range(2):
        with new_folder(tmp_path / "out", overwrite=True) as folder:
            assert folder.parent == tmp_path / "disk"  # renaming is possible on one disk alone
            (folder / f"{number}.txt").write_text("")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "out"] and (tmp_path / "out").is_symlink()
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.txt")] == ["disk/made/1.txt"]
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["made"]


@pytest.fixture(scope="module")
def made(made_once, make_llama) -> Path:
    """A base and its conversion, `moh`."""

    def make(folder: Path) -> None:
        (folder / "base").symlink_to(make_llama())
        assert main(["convert", str(folder / "base"), *PLAIN, "--output", str(folder / "moh")]) == 0

    return made_once("linked", make)


PLAIN = ["--preset", "paper", "--heldout-tokens", "0"]


def call(writer: str, made: Path, place: Path, output: Path) -> list[str]:
    """The command line of a command that writes a folder."""
    base, moh, to = str(made / "base"), str(made / "moh"), ["--output", str(output)]
    recipe = {"model": moh, "output_dir": str(output), "max_steps": 1, "report_to": []}
    (place / "recipe.yaml").write_text(yaml.safe_dump(recipe | {"schedule": {"warmup_steps": 1}}))
    return {
        "convert": ["convert", base, *PLAIN, *to],
        "tokenize": ["tokenize", "embedded", "--tokenizer", base, *to],
        "train": ["train", str(place / "recipe.yaml")],
    }[writer]


@pytest.mark.parametrize("writer", ["convert", "tokenize", "train"])
@pytest.mark.parametrize("target", ["nothing", "file", "out"])  # the last is a circle
def test_a_link_to_no_folder_ends_in_one_line(writer, target, made, tmp_path, capsys):
    (tmp_path / "file").write_text("kept")
    (tmp_path / "out").symlink_to(target)
    assert main(call(writer, made, tmp_path, tmp_path / "out")) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ") and "out" in error
    left = sorted(path.name for path in tmp_path.iterdir() if path.suffix != ".yaml")
    assert left == ["file", "out"] and (tmp_path / "out").is_symlink() and (tmp_path / "file").read_text() == "kept"


# ---- disks


def test_a_disk_that_cannot_be_written_is_told_as_such(tmp_path, monkeypatch):
    kind = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda _: Namespace(f_flag=kind.f_flag | os.ST_RDONLY))
    with pytest.raises(UserError, match=r"the disk of .* is read-only; name another place") as refused:
        check_disk(1, tmp_path / "moh", "calibration", "take fewer tokens")
    assert "tokens" not in str(refused.value)


# ---- configs that transformers refuses


@pytest.mark.parametrize("command", ["convert", "train"])
def test_a_config_that_transformers_refuses_ends_in_one_line(command, made, tmp_path, capsys):
    for name in ("base", "moh"):
        shutil.copytree(made / name, tmp_path / name)
        config = json.loads((tmp_path / name / "config.json").read_text())
        (tmp_path / name / "config.json").write_text(json.dumps(config | {"initializer_range": 1.02}))
        (tmp_path / name / "seal.json").unlink(missing_ok=True)  # which would tell that it was edited
    assert main(call(command, tmp_path, tmp_path, tmp_path / "out")) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "initializer_range" in line]
    assert "config.json" in line
