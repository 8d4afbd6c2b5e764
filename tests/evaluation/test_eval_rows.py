"""Rows that lm-eval would score without a word are named, by file and number, before a model is loaded."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moh_llm.errors import UserError
from moh_llm.evaluation.rows import read_splits
from moh_llm.evaluation.suite import load_suite
from moh_llm.evaluation.tasks import data_file, load_tasks

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
    ("stories/train.jsonl", 2, lambda row: row | {"endings": ["Only one."]}, r"row 2 of the examples: IndexError"),
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


@pytest.fixture
def load_stock(tmp_path: Path) -> Callable[..., None]:
    """Load a benchmark of the paper, without examples and of several subjects one, with the given rows."""

    def load(name: str, rows: list[Row], limit: int | None = None) -> None:
        suite = load_suite("paper")
        benchmark = next(benchmark for benchmark in suite.benchmarks if benchmark.name == name)
        parts = benchmark.parts if benchmark.average == "parts" else benchmark.parts[:1]
        benchmark = dataclasses.replace(benchmark, shots=0, fewshot_split=None, parts=parts)
        for part in benchmark.expand():
            file = data_file(tmp_path / "data", benchmark, part, benchmark.eval_split)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        suite = dataclasses.replace(suite, benchmarks=[benchmark])
        load_tasks(suite, tmp_path / "tasks", tmp_path / "data", limit)

    return load


MMLU = {"question": "Which is even?", "choices": ["1", "2", "3", "5"], "answer": 1}
WINOGRANDE = {"sentence": "The _ barked.", "option1": "dog", "option2": "cat", "answer": "1"}
HELLASWAG = {"ctx_a": "A man sits.", "ctx_b": "he", "activity_label": "Sitting", "endings": ["a", "b"], "label": "1"}
ARC: Row = {"question": "Which?", "choices": {"text": ["x", "y", "z"], "label": ["A", "B", "C"]}, "answerKey": "C"}
CHOICES = ARC["choices"]
TARGETS = {"choices": ["yes", "no"], "labels": [1, 0]}
TRUTHFULQA = {"question": "Is it?", "mc1_targets": TARGETS, "mc2_targets": TARGETS}
DAMAGES = [
    ("HellaSwag", HELLASWAG, {"ctx_b": None}, r"AttributeError: .*; default: row 3 of validation has no 'ctx_b'"),
    ("MMLU", MMLU, {"choices": ["1", "2", "3"]}, r"abstract_algebra/test: row 3: UndefinedError: .* no element 3"),
    ("MMLU", MMLU, {"choices": ["1", "2", None, "5"]}, r"abstract_algebra/test: row 3 has no 'choices'"),
    ("MMLU", MMLU, {"choices": []}, r"abstract_algebra/test: row 3: UndefinedError: .* no element 0"),
    ("MMLU", MMLU, {"answer": 4}, r"abstract_algebra/test: row 3: the answer 4 is none of the 4 choices"),
    ("MMLU", MMLU, {"question": 1984}, r"row 3: question='1984' is of another type"),
    ("WinoGrande", WINOGRANDE, {"sentence": "The dog barked."}, r"validation: row 3: ValueError: substring not found"),
    ("WinoGrande", WINOGRANDE, {"answer": "3"}, r"validation: row 3: KeyError: '3'"),
    ("ARC-Challenge", ARC, {"answerKey": "D"}, r"ARC-Challenge/test: row 3: .*"),
    ("ARC-Challenge", ARC, {"choices": CHOICES | {"text": ["x"]}}, r"row 3: the answer 2 is none of"),
    (
        "ARC-Challenge",
        ARC,
        {"choices": CHOICES | {"text": ["x", "y", None]}},
        r"row 3: its choices are",
    ),
    ("TruthfulQA", TRUTHFULQA, {"mc1_targets": {"choices": [], "labels": []}}, r"row 3: its choices are \[\], not"),
    ("TruthfulQA", TRUTHFULQA, {"mc2_targets": TARGETS | {"labels": [1]}}, r"validation: row 3: IndexError: "),
]


@pytest.mark.parametrize(("name", "row", "damage", "message"), DAMAGES)
def test_every_row_that_is_scored_is_tried(
    load_stock: Callable[..., None], name: str, row: Row, damage: Row, message: str
) -> None:
    """Also where a row with the same label went well, and where the damage lies within a list."""
    with pytest.raises(UserError, match=rf"{name} \(.*{message}") as caught:
        load_stock(name, [row, row, row | damage])
    assert "\n" not in str(caught.value) and "mend the files" in str(caught.value)
    load_stock(name, [row, row, row])
    if name != "HellaSwag" and "another type" not in message:
        load_stock(name, [row, row, row | damage], limit=2)


def test_fewer_choices_than_others_have_may_be_scored(load_stock: Callable[..., None]) -> None:
    four = {"text": ["w", "x", "y", "z"], "label": ["1", "2", "3", "4"]}
    load_stock("ARC-Challenge", [ARC | {"choices": four, "answerKey": "4"}, ARC])


def test_a_question_that_lm_eval_takes_for_a_label_is_named(load_changed: Callable[..., None]) -> None:
    with pytest.raises(UserError, match=r"facts/test: row 2: its question is 1984, which lm-eval does not take"):
        load_changed("facts/test.jsonl", 2, lambda row: row | {"sentence": "1984"})


def test_templates_are_compiled_anew_afterwards(load_changed: Callable[..., None]) -> None:
    """lm-eval is left as it was."""
    from lm_eval.utils import env

    load_changed("facts/test.jsonl", 1, lambda row: row)
    assert "from_string" not in vars(env)


def test_fields_that_no_prompt_shows_may_be_missing(load_changed: Callable[..., None]) -> None:
    load_changed("facts/test.jsonl", 1, lambda row: row | {"source": "somewhere"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1}\n{"a": \n', r"facts/test.jsonl, line 2 cannot be read as JSON"),
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
