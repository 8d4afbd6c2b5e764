"""Fetching a suite's data: from local folders in place of the Hub and of the addresses of converted datasets."""

import csv
import hashlib
import io
import json
import urllib.request
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moh_llm.cli import main
from moh_llm.evaluation import fetch as fetching

pytest.importorskip("lm_eval")

Run = Callable[[Path], int]
LOGIQA = """
b
All rivers run to the sea.The Elbe is a river.
Which follows? The share is 3.5 %.
A.The Elbe runs uphill
B.The Elbe runs to the sea.
C.No river runs
D.The sea is a river

d
Some cats are grey.
Which is true?
A.All cats are grey
B.No cat is grey
C.Only cats are grey
D.A cat may be grey
"""
SUITE = """
name: mine
title: Mine
benchmarks:
  - {name: LogiQA, shots: 0, metric: acc, task: logiqa, stock: logiqa/logiqa.yaml, dataset: EleutherAI/logiqa,
     config: logiqa, eval_split: test, items: 2}
  - {name: CMMLU, shots: 2, metric: acc, task: "cmmlu_{part}", stock: "cmmlu/cmmlu_{part}.yaml",
     dataset: haonan-li/cmmlu, config: "{part}", eval_split: test, fewshot_split: dev, items: 6,
     parts: [agronomy, arts]}
  - {name: SciQ, shots: 1, metric: acc, task: sciq, stock: sciq/sciq.yaml, dataset: allenai/sciq,
     revision: SCIQ, config: default, eval_split: test, fewshot_split: train, items: 3}
  - {name: ARC, shots: 0, metric: acc, task: arc_easy, stock: arc/arc_easy.yaml, dataset: allenai/ai2_arc,
     config: ARC-Easy, eval_split: test, items: 1}
"""


def cmmlu_zip() -> bytes:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as archive:
        for split, count in (("dev", 2), ("test", 3)):
            for subject in ("agronomy", "arts"):
                text = io.StringIO()
                lines = csv.writer(text)
                lines.writerow(["", "Question", "A", "B", "C", "D", "Answer"])
                for number in range(count):
                    question = f'{subject} {split} {number}, "so\ncalled"'
                    lines.writerow([number, question, "007", "0.50", "NA", "\u6c34", "ABCD"[number]])
                archive.writestr(f"{split}/{subject}.csv", text.getvalue())
    return held.getvalue()


@pytest.fixture
def served(tmp_path: Path) -> Path:
    """A folder in place of the addresses of converted datasets."""
    folder = tmp_path / "served"
    folder.mkdir()
    for name, content in {"Test.txt": LOGIQA.encode(), "cmmlu.zip": cmmlu_zip()}.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are downloaded from here on."""
    asked, real = [], urllib.request.urlopen

    def urlopen(address: str, timeout: float) -> Any:
        asked.append(address.rsplit("/", 1)[-1])
        return real(address, timeout=timeout)

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    return asked


@pytest.fixture
def sources(served: Path) -> dict[str, Any]:
    """Sources as the package has them, at the folder's addresses."""
    text, archive = (
        {"address": file.as_uri(), "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
        for file in (served / "Test.txt", served / "cmmlu.zip")
    )
    return {
        "EleutherAI/logiqa": {"converter": "logiqa", "revision": "LOGI", "files": {"test": text}},
        "haonan-li/cmmlu": {"converter": "cmmlu", "revision": "CMM", "files": {"dev": archive, "test": archive}},
    }


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """A local server in place of the Hub, read by the real library; the list is of what it was asked for."""
    import datasets

    asked: list[tuple[Any, ...]] = []
    real = datasets.load_dataset
    sciq = {"question": "Why?", "correct_answer": "so", "support": "It is so.", "distractor1": "a", "distractor2": "b"}
    arc = {"question": "What?", "choices": {"text": ["x", "y"], "label": ["A", "B"]}, "answerKey": "B"}
    files = {
        "allenai/sciq/test.jsonl": [sciq | {"distractor3": "\u00e9"}] * 3,
        "allenai/sciq/train.jsonl": [sciq | {"distractor3": "\u00e9"}] * 2,
        "allenai/ai2_arc/ARC-Easy/test.jsonl": [arc],
        "allenai/ai2_arc/ARC-Challenge/test.jsonl": [arc] * 2,
    }
    for name, held in files.items():
        (tmp_path / "hub" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "hub" / name).write_text("".join(json.dumps(row) + "\n" for row in held))
    configs = [{"config_name": name, "data_dir": name} for name in ("ARC-Challenge", "ARC-Easy")]
    (tmp_path / "hub" / "allenai" / "ai2_arc" / "README.md").write_text(f"---\nconfigs: {json.dumps(configs)}\n---\n")

    def load(path: str, name: str | None, split: str, revision: str | None) -> datasets.Dataset:
        asked.append((path, name, split, revision))
        return real(str(tmp_path / "hub" / path), name, split=split, cache_dir=str(tmp_path / "cache"))

    monkeypatch.setattr(datasets, "load_dataset", load)
    return asked


@pytest.fixture
def suite(tmp_path: Path) -> str:
    path = tmp_path / "mine.yaml"
    path.write_text(SUITE)
    return str(path)


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def run(suite: str, sources: dict[str, Any], hub: list[Any], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`moh-llm data fetch-benchmarks` with all fallbacks; returns the exit status."""
    monkeypatch.setattr(fetching, "read_yaml", lambda path: sources)
    return lambda folder: main(["data", "fetch-benchmarks", str(folder), "--suite", suite])


def test_data_is_fetched_with_its_commits(
    run: Run, tmp_path: Path, hub: list[Any], downloads: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data"
    assert run(data) == 0
    assert "[8/8] allenai/ai2_arc ARC-Easy test: 1 rows" in capsys.readouterr().out
    assert hub == [
        ("allenai/sciq", None, "test", "SCIQ"),
        ("allenai/sciq", None, "train", "SCIQ"),
        ("allenai/ai2_arc", "ARC-Easy", "test", None),
    ]
    assert sorted(downloads) == ["Test.txt", "cmmlu.zip"]
    first = rows(data / "EleutherAI__logiqa" / "logiqa" / "test.jsonl")[0]
    assert first == {
        "label": "b",
        "context": "All rivers run to the sea. The Elbe is a river.",
        "question": "Which follows? The share is 3. 5 %.",
        "options": ["The Elbe runs uphill", "The Elbe runs to the sea.", "No river runs", "The sea is a river"],
    }
    second = rows(data / "haonan-li__cmmlu" / "arts" / "test.jsonl")[1]
    assert second["Question"] == 'arts test 1, "so\ncalled"' and [second[c] for c in "ABC"] == ["007", "0.50", "NA"]
    assert {len(rows(file)) for file in data.glob("haonan-li__cmmlu/*/*.jsonl")} == {2, 3}
    assert len(list(data.rglob("*.*"))) == 8


def test_what_is_there_is_kept(run: Run, tmp_path: Path, hub: list[Any], downloads: list[str]) -> None:
    data = tmp_path / "data"
    assert run(data) == 0
    before = {file: file.read_bytes() for file in data.rglob("*.*")}
    hub.clear()
    downloads.clear()
    assert run(data) == 0
    assert (hub, downloads) == ([], [])
    (data / "haonan-li__cmmlu" / "arts" / "dev.jsonl").unlink()
    (data / "allenai__sciq" / "default" / "train.jsonl").unlink()
    assert run(data) == 0
    assert hub == [("allenai/sciq", None, "train", "SCIQ")] and downloads == ["cmmlu.zip"]
    assert {file: file.read_bytes() for file in data.rglob("*.*")} == before


def test_what_cannot_be_fetched_is_named_and_the_rest_is_kept(
    run: Run, served: Path, suite: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (served / "Test.txt").write_text(LOGIQA + "more")
    (served / "cmmlu.zip").unlink()
    data = tmp_path / "data"
    assert run(data) == 1
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 + 4
    assert "EleutherAI/logiqa logiqa test: " in said[0] and "has SHA-256 " in said[0]
    assert "haonan-li/cmmlu agronomy test: " in said[1] and "No such file" in said[1]
    assert (data / "allenai__sciq" / "default" / "test.jsonl").is_file()


def test_without_a_network_it_ends_at_once(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import datasets

    def refuse(*_: object, **__: object) -> None:
        raise ConnectionError("Couldn't reach the Hub")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    assert run(tmp_path / "data") == 2
    said = capsys.readouterr()
    assert "the Hub cannot be reached" in said.err and "ai2_arc" not in said.out
