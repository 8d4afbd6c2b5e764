"""The card that a model has where it was made: what `convert` leaves, and what publishing makes of it."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cards import LLAMA_3, check_card, write_run
from huggingface_hub import ModelCard
from huggingface_hub.utils import filter_repo_objects

from moh_llm.cli import main
from moh_llm.errors import UserError
from moh_llm.hub.card import build_card, write_local_card

FRONT = "---\nlicense: apache-2.0\nlanguage: [en, fr]\n---\n\n# A base, by somebody else\n"
NOTE = "> Written beside the model, from its records."


def read(folder: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Sections and metadata of the card in a folder."""
    card = (folder / "README.md").read_text()
    return check_card(card), ModelCard(card).data.to_dict()


@pytest.fixture(scope="module")
def conversion(
    make_llama: Callable[..., Path], convert: Callable[..., int], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """What `convert` makes of a base with a card, not to be changed."""
    base, output = make_llama(), tmp_path_factory.mktemp("out") / "moh_3"
    (base / "README.md").write_text(FRONT)
    (base / "LICENSE").write_text("Apache License\nVersion 2.0, January 2004\n")
    assert convert(base, output, "--preset", "paper") == 0
    return output


@pytest.fixture
def bare(folder: Path) -> Path:
    """A model that says nothing of a licence."""
    (folder / "README.md").unlink()
    return folder


def test_a_conversion_leaves_its_card(conversion: Path) -> None:
    sections, data = read(conversion)
    card = (conversion / "README.md").read_text()
    assert data["license"] == "apache-2.0" and data["language"] == ["en", "fr"] and "base_model" not in data
    assert f"\n# moh_3\n\n{NOTE}" in card and "somebody else" not in card
    proof = json.loads((conversion / "conversion.json").read_text())["verification"]
    assert f"{proof['held_out_tokens']:,} tokens of held-out text" in sections["Conversion proof"]
    assert "according to LICENSE of the base" in sections["Base model and licence"]
    assert 'folder = "path/to/this/folder"' in sections["How to load"] and "revision=" not in sections["How to load"]
    assert str(conversion.parent) not in card


@pytest.mark.slow
def test_how_to_load_runs_as_written(conversion: Path) -> None:
    """In a process of its own, without MoH-LLM and without anybody to answer questions."""
    sections, _ = read(conversion)
    code = (
        sections["How to load"].split("```python\n")[1].split("```")[0].replace("path/to/this/folder", str(conversion))
    )
    ran = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.modules['moh_llm'] = None\n{code}"],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=100,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() and "trust_remote_code" not in ran.stdout + ran.stderr


@pytest.mark.slow
def test_publishing_writes_the_card_anew(
    conversion: Path, forked_proof: None, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (conversion / "README.md").read_text()
    assert main(["publish", str(conversion), "--repo-id", "me/toy", "--dry-run"]) == 0
    assert "checks: passed" in capsys.readouterr().out
    card = conversion.with_name("moh_3.card.md").read_text()
    assert check_card(card) and "\n# toy\n" in card and NOTE not in card
    assert 'from_pretrained("me/toy", trust_remote_code=True)' in card
    # The licence is the base's word, not that of the card that is replaced.
    assert "according to LICENSE of the base" in card
    assert (conversion / "README.md").read_text() == before


def test_the_way_back_has_no_card(conversion: Path, tmp_path: Path) -> None:
    assert main(["convert", str(conversion), "--to-dense", "--output", str(tmp_path / "dense")]) == 0
    assert not (tmp_path / "dense" / "README.md").exists()


def test_a_tuned_model_is_called_after_its_run(conversion: Path, tmp_path: Path) -> None:
    run = write_run(tmp_path / "recovery", str(conversion))
    model = Path(shutil.copytree(conversion, run / "model"))
    write_local_card(model)
    sections, data = read(model)
    assert "\n# recovery\n" in (model / "README.md").read_text() and data["license"] == "apache-2.0"
    assert (
        "| 192 (saved model) | 40 | 22.000 |" in sections["Recovery"] and "books" in sections["Text it was trained on"]
    )


def test_a_base_of_the_hub_brings_licence_and_language(
    make_llama: Callable[..., Path], convert: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published, commit = make_llama(), "c" * 40
    (published / "README.md").write_text(FRONT)
    (published / "pytorch_model.bin").write_text("pickled")

    def download(name: str, allow_patterns: list[str], ignore_patterns: str, **_: object) -> str:
        snapshot = tmp_path / "cache" / f"models--{name.replace('/', '--')}" / "snapshots" / commit
        snapshot.mkdir(parents=True)
        names = [file.name for file in published.iterdir()]
        for file in filter_repo_objects(names, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns):
            shutil.copyfile(published / file, snapshot / file)
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    assert convert(Path("org/base"), tmp_path / "moh", "--preset", "paper", "--heldout-tokens", "0") == 0
    sections, data = read(tmp_path / "moh")
    assert (data["license"], data["language"], data["base_model"]) == ("apache-2.0", ["en", "fr"], "org/base")
    assert "according to the model card of the base" in sections["Base model and licence"]
    assert "Not proven" in sections["Conversion proof"] and not (tmp_path / "moh" / "pytorch_model.bin").exists()


def test_an_unknown_licence_is_said_and_left_out(bare: Path) -> None:
    write_local_card(bare)
    sections, data = read(bare)
    assert "Licence: **not on record**: no `README.md` found here names" in sections["Base model and licence"]
    assert not [key for key in data if key.startswith("license")]
    with pytest.raises(UserError, match="the base's licence is not known"):
        build_card(bare, "me/toy")
    # What its owner then writes into it counts.
    place = bare / "README.md"
    place.write_text(place.read_text().replace("---\n", "---\nlicense: mit\n", 1))
    assert ModelCard(build_card(bare, "me/toy")).data.license == "mit"


def test_contradicting_licences_are_told(bare: Path) -> None:
    (bare / "LICENSE").write_text("MIT License\n")
    (bare / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    write_local_card(bare)
    sections, data = read(bare)
    told = "contradict each other: apache-2.0 in the model card of the model, mit in LICENSE of the model."
    assert told in sections["Base model and licence"] and "license" not in data


def test_a_llamas_card_needs_neither_its_name_nor_its_text_yet(bare: Path) -> None:
    (bare / "README.md").write_text("---\nlicense: llama3\n---\n")
    write_local_card(bare)
    sections, data = read(bare)
    found = sections["Base model and licence"]
    assert data["license"] == "llama3" and "**Its text is missing**" in found and "llama3/use-policy" in found
    assert "**Built with Meta Llama 3**" in (bare / "README.md").read_text()
    (bare / "LICENSE").write_text(LLAMA_3)
    assert "is missing" not in build_card(bare, None)
    (bare / "LICENSE").unlink()
    (bare / "README.md").write_text("---\nlicense: other\n---\n")
    assert "Licence: `other`, according to the model card of the model. **Its text" in build_card(bare, None)


def test_a_hostile_name_of_a_folder_stays_text(bare: Path) -> None:
    place = bare.rename(bare.with_name('x")\n# <b>`{{ 7*7 }}'))
    write_local_card(place)
    card = (place / "README.md").read_text()
    assert check_card(card) and '\n# x") \\# &lt;b&gt;\\`{{ 7\\*7 }}\n' in card
