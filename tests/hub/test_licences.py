"""The inherited licence: where it is found, and what the Llama licences ask."""

import json
import shutil
from pathlib import Path

import pytest
from cards import LLAMA_3, check_card, write_run
from huggingface_hub import ModelCard

from moh_llm.errors import UserError
from moh_llm.hub.card import build_card
from moh_llm.hub.lineage import LLAMA, Licence, check_terms, find_licence, read_lineage

LLAMA_32 = "LLAMA 3.2 COMMUNITY LICENSE AGREEMENT\nLlama 3.2 Version Release Date: September 25, 2024\n"


@pytest.fixture
def bare(folder: Path) -> Path:
    """A model without a licence."""
    (folder / "README.md").unlink()
    return folder


def licence_of(folder: Path, given: str | None = None) -> tuple[str, str]:
    found = find_licence(read_lineage(folder), given)
    return found.id, found.source


@pytest.mark.parametrize(
    ("text", "licence"),
    [
        (LLAMA_3, "llama3"),
        ("**LLAMA 3.3 COMMUNITY LICENSE AGREEMENT**\n", "llama3.3"),
        ("\n      Apache License\n   Version 2.0, January 2004\n", "apache-2.0"),
        ("\ufeffMIT License\n\nCopyright (c) 2026", "mit"),
    ],
)
def test_texts_are_recognised(bare: Path, text: str, licence: str) -> None:
    (bare / "LICENSE.txt").write_text(text, encoding="utf-8")
    assert licence_of(bare) == (licence, "LICENSE.txt of the model")


def test_a_licence_is_found_with_the_base(bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, record = tmp_path / "base", bare / "conversion.json"
    base.mkdir()
    record.write_text(json.dumps({"base": {"name": str(base), "revision": None, "dense_sha256": "0"}}))
    with pytest.raises(UserError, match=r"the licence is not known .* pass --licence ID"):
        find_licence(read_lineage(bare))
    (base / "README.md").write_text("---\nlicense: Apache-2.0\n---\n")
    assert licence_of(bare) == ("apache-2.0", "the model card of the base")
    # A base of the Hub, in the cache.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    snapshot = tmp_path / "cache" / "models--org--base" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "LICENSE.txt").write_text(LLAMA_32)
    record.write_text(json.dumps({"base": {"name": "org/base", "revision": "a" * 40, "dense_sha256": "0"}}))
    assert licence_of(bare) == ("llama3.2", "LICENSE.txt of the base")


def test_a_licence_is_found_with_what_training_began_with(bare: Path, tmp_path: Path) -> None:
    began = tmp_path / "began"
    began.mkdir()
    (began / "LICENSE").write_text(LLAMA_3)
    run = write_run(tmp_path / "run", str(began))
    found = find_licence(read_lineage(Path(shutil.copytree(bare, run / "model"))))
    assert (found.id, found.file) == ("llama3", began / "LICENSE")


@pytest.mark.parametrize("front", ["license: unknown", "license: [a, b]", "license: ["])
def test_an_unknown_licence_is_asked_for(bare: Path, front: str) -> None:
    (bare / "README.md").write_text(f"---\n{front}\n---\n")
    (bare / "LICENSE").write_text("Do as you like.")
    with pytest.raises(UserError, match=r"pass --licence ID, such as apache-2\.0"):
        find_licence(read_lineage(bare))
    assert "license" not in ModelCard(build_card(bare, None)).data.to_dict()  # a local card is written all the same
    assert licence_of(bare, "mit") == ("mit", "the publisher")


def test_contradictions_are_refused(folder: Path) -> None:
    (folder / "LICENSE").write_text("MIT License\n")
    with pytest.raises(UserError, match=r"contradict each other \(apache-2.0 in the model card .*, mit in LICENSE of"):
        find_licence(read_lineage(folder))
    assert "license" not in ModelCard(build_card(folder, None)).data.to_dict()
    assert licence_of(folder, "mit")[0] == "mit"


def test_a_llama_keeps_its_licence_and_text(bare: Path) -> None:
    (bare / "README.md").write_text("---\nlicense: llama3\n---\n")
    with pytest.raises(UserError, match=r"1\.b\.i\) asks for its text; put it into .*LICENSE \(https://"):
        build_card(bare, "org/Llama-3-MoH")
    (bare / "LICENSE").write_text(LLAMA_3)
    assert licence_of(bare)[0] == "llama3"
    with pytest.raises(UserError, match="--licence mit contradicts the model card of the model, which says llama3"):
        find_licence(read_lineage(bare), "mit")


def test_an_unlisted_licence_needs_a_name_and_its_text(bare: Path) -> None:
    with pytest.raises(UserError, match="licence `other` asks for its text"):
        build_card(bare, "a/b", licence="other")
    (bare / "LICENSE").write_text("\n  Tongyi Qianwen LICENSE AGREEMENT\n\nTerms.")
    data = ModelCard(build_card(bare, "a/b", licence="other")).data
    assert (data.license, data.license_name, data.license_link) == ("other", "see-license-link", "LICENSE")
    front = "license: other\nlicense_name: qwen\nlicense_link: https://x.org/LICENSE"
    (bare / "README.md").write_text(f"---\n{front}\n---\n")
    card = build_card(bare, "a/b")
    assert (ModelCard(card).data.license_name, ModelCard(card).data.license_link) == ("qwen", "https://x.org/LICENSE")
    assert "`qwen` ([text](https://x.org/LICENSE))" in card


@pytest.mark.parametrize(
    ("name", "licence", "better"),
    [
        ("Llama-30B", "llama3", "Llama-3-Llama-30B"),
        ("Llama3-MoH", "llama3", None),
        ("Llama-MoH", "llama3.1", None),
        ("anything", "llama2", None),
    ],
)
def test_names_follow_the_licence(name: str, licence: str, better: str | None) -> None:
    found, folder = Licence(licence, "", file=Path("LICENSE")), Path("moh")
    if better is not None:
        with pytest.raises(UserError, match=rf"section 1\.b\.i\).*for example to org/{better}$"):
            check_terms(found, f"org/{name}", folder)
    check_terms(found, f"org/{better or name}", folder)


def test_notices() -> None:
    rights = "Meta Platforms, Inc. All Rights Reserved."
    expected = f"Meta Llama 3 is licensed under the Meta Llama 3 Community License, Copyright © {rights}"
    assert LLAMA["llama3"].notice == expected
    expected = f"Llama 2 is licensed under the LLAMA 2 Community License, Copyright (c) {rights}"
    assert LLAMA["llama2"].notice == expected


def test_the_card_names_a_llamas_conditions(bare: Path) -> None:
    (bare / "LICENSE").write_text(LLAMA_3)
    with pytest.raises(UserError, match="org/Llama-3-MoH"):
        build_card(bare, "org/MoH")
    card = build_card(bare, "org/Llama-3-MoH")
    found = check_card(card)["Limits"]
    assert card.index("**Built with Meta Llama 3**") < card.index("## ")
    for words in (
        "(`LICENSE`)",
        "`NOTICE`",
        'display "Built with Meta Llama 3"',
        'begin the model\'s name with "Llama 3"',
    ):
        assert words in found
    assert ModelCard(card).data.license == "llama3"
