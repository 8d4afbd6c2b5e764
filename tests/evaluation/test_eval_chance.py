"""What guessing scores is known for every benchmark of the package's suites, and is that of the rows' own choices."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moh_llm.evaluation.suite import Benchmark, known_suites, load_suite
from moh_llm.evaluation.tasks import Loaded, data_file, load_tasks

Row = dict[str, Any]

# Answers that are written, and words that are predicted.
WRITTEN = {"GSM8K", "LAMBADA", "Natural Questions", "Answers"}


def _truthful(row: Row) -> float:
    """The mean of a guess among mc1's choices, one of them right, and of the share of mc2's that are right."""
    right = row["mc2_targets"]["labels"]
    return (1 / len(row["mc1_targets"]["choices"]) + sum(right) / len(right)) / 2


# By hand, from the fields of the rows.
CHANCES: dict[str, Callable[[Row], float]] = {
    "MMLU": lambda row: 1 / len(row["choices"]),
    "C-Eval": lambda row: 1 / sum(letter in row for letter in "ABCD"),
    "CMMLU": lambda row: 1 / sum(letter in row for letter in "ABCD"),
    "TruthfulQA": _truthful,
    "HellaSwag": lambda row: 1 / len(row["endings"]),
    "LogiQA": lambda row: 1 / len(row["options"]),
    "BoolQ": lambda row: 1 / 2,
    "SciQ": lambda row: 1 / (1 + sum(f"distractor{number}" in row for number in (1, 2, 3))),
    "PIQA": lambda row: 1 / sum(f"sol{number}" in row for number in (1, 2)),
    "WinoGrande": lambda row: 1 / sum(f"option{number}" in row for number in (1, 2)),
    "ARC-Challenge": lambda row: 1 / len(row["choices"]["text"]),
    "ARC-Easy": lambda row: 1 / len(row["choices"]["text"]),
    "OpenBookQA": lambda row: 1 / len(row["choices"]["text"]),
    "Facts": lambda row: 1 / len(row["choices"]),
    "Stories": lambda row: 1 / len(row["endings"]),
}


@pytest.mark.parametrize("name", known_suites())
def test_every_benchmark_has_a_rule(name: str) -> None:
    for benchmark in load_suite(name).benchmarks:
        assert benchmark.chance == (0 if benchmark.name in WRITTEN else "choices"), benchmark.name
        assert (benchmark.name in WRITTEN) != (benchmark.name in CHANCES)


def _every_benchmark() -> list[Benchmark]:
    found = {benchmark.name: benchmark for name in known_suites() for benchmark in load_suite(name).benchmarks}
    return list(found.values())


@pytest.mark.parametrize("benchmark", _every_benchmark(), ids=lambda benchmark: benchmark.name)
def test_chances_are_those_of_the_rows(benchmark: Benchmark, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """The real rows, of many subjects the first three; the smoke suite's are in the package."""
    pytest.importorskip("lm_eval")
    suite = load_suite("smoke")
    own = benchmark.stock is None
    folder = None if own else request.getfixturevalue("shared_benchmarks")
    parts = [part for part in benchmark.expand() if own or data_file(folder, benchmark, part, "dev").is_file()]
    if benchmark.parts and benchmark.average == "items":
        names = [part.config.removeprefix(benchmark.config.partition("{part}")[0]) for part in parts[:3]]
        benchmark = dataclasses.replace(benchmark, parts=names)
    suite = dataclasses.replace(suite, benchmarks=[benchmark], columns=list(benchmark.published))
    suite = suite if own else dataclasses.replace(suite, data=None)
    (loaded,) = load_tasks(suite, tmp_path, folder, limit=100)
    where = suite.data_folder(folder)
    expand = benchmark.expand() if benchmark.average == "items" else benchmark.expand()[:1]
    files = [data_file(where, benchmark, part, benchmark.eval_split) for part in expand]
    rows = [[json.loads(line) for line in file.open(encoding="utf-8")][:100] for file in files]
    by_hand = CHANCES.get(benchmark.name, lambda row: 0.0)
    assert loaded.chances == [[pytest.approx(by_hand(row)) for row in found] for found in rows]
    assert sum(len(values) for values in loaded.chances) >= 6


def _question(choices: int) -> Row:
    letters = "ABCDE"[:choices]
    return {
        "id": "1",
        "question": "Which?",
        "choices": {"text": [f"the {letter}" for letter in letters], "label": list(letters)},
        "answerKey": "B",
    }


def test_each_row_counts_by_its_number_of_choices(load_rows: Callable[..., Loaded]) -> None:
    """Of the rows that are scored, not of all."""
    rows = [_question(4), _question(3), _question(5), _question(2)]
    assert load_rows("ARC-Challenge", rows).chances == [[1 / 4, 1 / 3, 1 / 5, 1 / 2]]
    assert load_rows("ARC-Challenge", rows, limit=2).chances == [[1 / 4, 1 / 3]]


def test_a_rule_of_the_suites_own(load_rows: Callable[..., Loaded]) -> None:
    """A letter that is written, of four: the task does not tell, the suite does; or it is not known."""
    rows = [{"question": "1 + 1?", "answer": "#### 2"}] * 3
    assert load_rows("GSM8K", rows, chance=0.25).chances == [[0.25] * 3]
    assert load_rows("GSM8K", rows, chance=None).chances is None
