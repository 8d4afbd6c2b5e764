"""`moh-llm recipes`: what is listed and copied, from the checkout and from a wheel."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from moh_llm.cli import main
from moh_llm.commands.recipes import summary
from moh_llm.data.mixture import load_mixture
from moh_llm.errors import UserError
from moh_llm.recipe import recipe_values, shipped_files

ROOT = Path(__file__).resolve().parents[1]


def test_each_file_is_listed_with_a_sentence(capsys) -> None:
    assert main(["recipes"]) == 0
    listed = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    in_checkout = [path for folder in ("recipes", "data_mixtures") for path in (ROOT / folder).rglob("*.*")]
    assert set(listed) == {str(path.relative_to(ROOT)) for path in in_checkout} and len(listed) > 30
    for name, told in listed.items():
        assert re.fullmatch(r"[A-Z].{20,}\.", told.strip()), f"the first line of {name} must be a sentence"


def test_what_files_name_is_copied_with_them() -> None:
    """A copy has the path that recipes and commands in their comments name."""
    files = shipped_files()
    named = [
        found
        for path in files.values()
        for found in re.findall(r"\b(?:recipes|data_mixtures)/[\w/]+\.\w+", path.read_text())
    ]
    assert len(named) > 40 and set(named) <= set(files)


def test_copies_are_the_files_and_replace_none(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    wanted = ["data_mixtures/paper.yaml", "recipes/launch/one_node.sh"]
    assert main(["recipes", "copy", wanted[0], "recipes/launch/"]) == 0
    copied = capsys.readouterr().out.split()
    assert set(wanted) < set(copied) and len(copied) == 4
    for name in copied:
        assert (tmp_path / name).read_bytes() == (ROOT / name).read_bytes()
        assert os.access(name, os.X_OK) == os.access(ROOT / name, os.X_OK), name
    Path(wanted[0]).write_text("mine")
    assert main(["recipes", "copy", "recipes/evaluate_paper.yaml", "data_mixtures"]) == 2
    assert capsys.readouterr().err.startswith("error: data_mixtures/paper.yaml exists already; ")
    assert Path(wanted[0]).read_text() == "mine" and not Path("recipes/evaluate_paper.yaml").exists()


@pytest.mark.parametrize("name", ["paper", "recipes/../README.md", str(ROOT / "README.md")])
def test_other_names_are_refused(tmp_path, capsys, name) -> None:
    assert main(["recipes", "copy", name, "--output-dir", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert re.fullmatch(rf"error: no recipe or data mixture '{re.escape(name)}'; the nearest name is '[\w/.]+'\n", told)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_wheel_holds_them_and_runs_the_quick_start(make_llama, tmp_path) -> None:
    """Through a source distribution, as packages are published; run from a folder without the checkout on the path."""
    pytest.importorskip("setuptools", minversion="77")
    pytest.importorskip("lm_eval")
    pytest.importorskip("matplotlib")
    source, site, here = tmp_path / "source", tmp_path / "site", tmp_path / "here"
    tracked = ("moh_llm", "recipes", "data_mixtures", "setup.py", "setup.cfg", "pyproject.toml", "MANIFEST.in")
    source.mkdir()
    here.mkdir()
    for name in (*tracked, "README.md", "LICENSE"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

    def python(*words: object, folder: Path = here, **variables: str) -> str:
        command = [sys.executable, *map(str, words)]
        return subprocess.run(
            command, cwd=folder, env=environment | variables, check=True, stdout=subprocess.PIPE, text=True
        ).stdout

    python("-c", "from setuptools import build_meta; build_meta.build_sdist('dist')", folder=source)
    (packed,) = (source / "dist").iterdir()
    pip = ("-m", "pip", "--disable-pip-version-check", "--quiet")
    python(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, packed)
    (wheel,) = tmp_path.glob("*.whl")
    python(*pip, "install", "--no-deps", "--target", site, wheel)

    place = python("-c", "import moh_llm; print(moh_llm.__file__)", PYTHONPATH=str(site)).strip()
    assert place == str(site / "moh_llm" / "__init__.py")
    files = shipped_files()
    listed = python("-m", "moh_llm.cli", "recipes", PYTHONPATH=str(site)).splitlines()
    assert [line.split("  ", 1)[0] for line in listed] == list(files)
    python("-m", "moh_llm.cli", "recipes", "copy", "recipes", "data_mixtures", PYTHONPATH=str(site))
    for name, path in files.items():
        assert (here / name).read_bytes() == path.read_bytes() and summary(here / name), name
        assert os.access(here / name, os.X_OK) == os.access(path, os.X_OK), name

    base = make_llama(max_position_embeddings=512, initializer_range=0.3)
    words = ("quickstart", "--base", base, "--output-dir", here / "out")
    said = python("-m", "moh_llm.cli", *words, PYTHONPATH=str(site), OMP_NUM_THREADS="1")
    assert (here / "out" / "report" / "report.html").is_file() and (here / "out" / "heads.html").is_file()
    assert "tuned goes on:" in said
    # A recipe is found by its name where no file has it.
    more = ("--model", here / "out" / "moh", "--max_steps", "2", "--data.batch_size", "2", "--output_dir", here / "run")
    python("-m", "moh_llm.cli", "train", "recipes/smollm2_recovery.yaml", *more, PYTHONPATH=str(site))
    assert (here / "run" / "model" / "config.json").is_file()


def test_a_recipe_of_the_package_is_read_by_its_name(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = "recipes/smollm2_recovery.yaml"
    assert ("max_steps", "20") in [(option, value) for _, option, value in recipe_values(name)]
    (tmp_path / "recipes").mkdir()
    (tmp_path / name).write_text("max_steps: 3\n")
    assert [value for _, _, value in recipe_values(name)] == ["3"]
    with pytest.raises(UserError, match=r"recipe recipes/none\.yaml"):
        recipe_values("recipes/none.yaml")


def test_mixtures_and_architectures_of_the_package_are_read_by_their_names(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_mixture("data_mixtures/paper.yaml").name == "paper"
    assert main(["init", "recipes/architectures/moh_llm_s.yaml", "--output-dir", "made"]) == 2
    assert "a language model needs a tokenizer" in capsys.readouterr().err  # which is said of an architecture
    assert main(["init", "recipes/architectures/none.yaml", "--output-dir", "made"]) == 2
    assert "recipes/architectures/none.yaml" in capsys.readouterr().err
