"""Rows that lm-eval would score without a word are named, by file and number, before a model is loaded."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moh_llm.errors import UserError
from moh_llm.evaluation.rows import read_splits
from moh_llm.evaluation.suite import load_suite
from moh_llm.evaluation.tasks import load_tasks

pytest.importorskip("lm_eval")

SUITES = Path(__file__).resolve().parents[2] / "moh_llm" / "evaluation" / "suites"
Row = dict[str, Any]


@pytest.fixture
def load_changed(tmp_path: Path) -> Callable[..., None]:
    """Load the smoke suite after a change to one row of one file (path below its data, row from 1, change)."""
    shutil.copytree(SUITES / "smoke", tmp_path / "smoke")
    shutil.copy(SUITES / "smoke.yaml", tmp_path / "own.yaml")

    def load(file: str, number: int, change: Callable[[Row], Row], limit: int | None = None) -> None:
        path = tmp_path / "smoke" / "moh-llm__smoke" / file
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        rows[number - 1] = change(rows[number - 1])
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        load_tasks(load_suite(str(tmp_path / "own.yaml")), tmp_path / "tasks", None, limit)

    return load


def without(field: str) -> Callable[[Row], Row]:
    return lambda row: {key: value for key, value in row.items() if key != field}


CHANGES = [
    ("facts/test.jsonl", 5, without("sentence"), r"Facts \(facts/test: row 5 has no 'sentence'\)"),
    ("facts/test.jsonl", 2, lambda row: row | {"answer": None}, r"Facts \(facts/test: row 2 has no 'answer'\)"),
    ("facts/test.jsonl", 3, lambda row: row | {"answer": 4}, r"row 3: the answer 4 is none of the 4 choices"),
    ("facts/test.jsonl", 3, lambda row: row | {"answer": "b"}, r"test.jsonl: row 3: answer='b' is of another type"),
    ("stories/train.jsonl", 2, without("story"), r"Stories \(stories/test: row 2 of the examples has no 'story'\)"),
    ("answers/test.jsonl", 6, without("question"), r"Answers \(answers/test: row 6 has no 'question'\)"),
]


@pytest.mark.parametrize(("file", "number", "change", "message"), CHANGES)
def test_bad_rows_are_named(
    load_changed: Callable[..., None], file: str, number: int, change: Callable[[Row], Row], message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        load_changed(file, number, change)
    assert "\n" not in str(caught.value) and "mend the files" in str(caught.value)


def test_rows_that_are_not_scored_do_not_matter(load_changed: Callable[..., None]) -> None:
    load_changed("facts/test.jsonl", 5, without("sentence"), limit=4)


def test_fields_that_no_prompt_shows_may_be_missing(load_changed: Callable[..., None]) -> None:
    load_changed("facts/test.jsonl", 1, lambda row: row | {"source": "somewhere"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1}\n{"a": \n', r"facts/test.jsonl, line 2: not JSON"),
        ('{"a": 1}\n\n[1]\n', r"facts/test.jsonl, line 3: not an object"),
        ("\n \n", r"facts/test.jsonl holds no rows"),
        (b'{"a": "\xff"}\n', r"facts/test.jsonl cannot be read"),
    ],
)
def test_unreadable_files_are_named(tmp_path: Path, text: str | bytes, message: str) -> None:
    file = tmp_path / "facts" / "test.jsonl"
    file.parent.mkdir()
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=message):
        read_splits({"test": str(file)})


def test_rows_are_those_of_the_library(shared_benchmarks: Path, tmp_path: Path) -> None:
    """Every kind of field: numbers, lists of strings, lists within records."""
    import datasets

    for file in ("cais__mmlu/anatomy/test", "truthfulqa__truthful_qa/multiple_choice/validation"):
        path = str(shared_benchmarks / f"{file}.jsonl")
        theirs = datasets.load_dataset("json", data_files=path, split="train", cache_dir=str(tmp_path))
        ours = read_splits({"x": path})["x"]
        assert ours.to_list() == theirs.to_list()
