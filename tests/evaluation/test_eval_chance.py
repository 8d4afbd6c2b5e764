"""What guessing scores is known for every benchmark of the package's suites, and is that of the rows' own choices."""

from collections.abc import Callable
from typing import Any

import pytest

from moh_llm.evaluation.suite import known_suites, load_suite
from moh_llm.evaluation.tasks import Loaded

Row = dict[str, Any]

# Answers that are written, and words that are predicted.
WRITTEN = {"GSM8K", "LAMBADA", "Natural Questions", "Answers"}


@pytest.mark.parametrize("name", [name for name in known_suites() if name != "ruler"])
def test_every_benchmark_has_a_rule(name: str) -> None:
    for benchmark in load_suite(name).benchmarks:
        assert benchmark.chance == (0 if benchmark.name in WRITTEN else "choices"), benchmark.name


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


def test_two_readings_are_averaged(load_rows: Callable[..., Loaded]) -> None:
    """A guess among the first reading's choices, and the share of the second's that is right."""
    first = {"choices": ["yes", "no", "so", "if"], "labels": [1, 0, 0, 0]}
    second = {"choices": ["yes", "no"], "labels": [1, 0]}
    row = {"question": "Is it?", "mc1_targets": first, "mc2_targets": second}
    assert load_rows("TruthfulQA", [row]).chances == [[(1 / 4 + 1 / 2) / 2]]
