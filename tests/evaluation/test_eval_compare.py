"""Evaluations are put side by side only if their scores mean the same, and regressions are caught."""

import copy
import json
from pathlib import Path

import pytest
from records import make_record, page_of, row_of, verdict

from moh_llm.errors import UserError
from moh_llm.evaluation.compare import check_regression, merge
from moh_llm.records.evaluation import EvaluationRecord, Failure, read_evaluation

BASE = {"base": ("dense", 1.0)}


@pytest.fixture
def one() -> EvaluationRecord:
    return make_record({**BASE, "model": ("first", 0.9)})


@pytest.fixture
def two() -> EvaluationRecord:
    return make_record({**BASE, "model": ("second", 0.8)})


def test_what_was_written_is_read(one, tmp_path: Path) -> None:
    one.write(tmp_path / "report.json")
    assert read_evaluation(tmp_path) == one


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "is not the report of an evaluation"),
        ({"benchmarks": [], "version": 1}, "is of another version of moh-llm; evaluate again"),
        ({"benchmarks": [], "version": 2}, "report.json lacks suite"),
        (None, "holds no report.json"),
    ],
)
def test_what_is_no_evaluation_is_refused(tmp_path: Path, content: object, message: str) -> None:
    if content is not None:
        (tmp_path / "report.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(UserError, match=message):
        read_evaluation(tmp_path)


def test_a_common_base_appears_once(one, two) -> None:
    assert merge({"first": one}) is one
    row_of(two, "A").scores["model"].samples = "samples/model/A.jsonl"
    merged = merge({"first": one, "second": two})
    assert list(merged.models) == ["base", "first", "second"]
    for row, own in zip(merged.benchmarks, two.benchmarks, strict=True):
        assert row.scores["second"] == own.scores["model"] and row.scores["base"] == own.scores["base"]
    assert row_of(merged, "A").scores["second"].samples is None  # they are elsewhere
    for label, record in {"first": one, "second": two}.items():
        assert merged.average.scores[label] == record.average.scores["model"]
    page = page_of(merged)
    assert "| base | first | delta | recovery % | of margin % | second | delta | recovery % | of margin % |" in page
    assert f"**{verdict(merged, 'second')}**" in page


def test_different_bases_are_refused(one, two) -> None:
    other = make_record({"base": ("another", 0.95), "model": ("second", 0.8)})
    with pytest.raises(UserError, match="first and second have different bases"):
        merge({"first": one, "second": other})
    row_of(two, "C").scores["base"].value += 1e-9
    merge({"first": one, "second": two})
    row_of(two, "C").scores["base"].value += 0.5
    with pytest.raises(UserError, match=r"the base scores .* on C in first and .* in second"):
        merge({"first": one, "second": two})


def test_labels_tell_the_models_apart(one) -> None:
    several = {**BASE, "left": ("l", 0.9), "right": ("r", 0.8)}
    records = {"run": make_record(several), "shots": make_record({**BASE, "model": ("m", 0.7)})}
    records |= {"left": make_record({**BASE, "model": ("n", 0.6)}), "base": make_record({**BASE, "model": ("b", 0.6)})}
    merged = merge(records)
    expected = ["left (run)", "right", "shots", "model (left)", "model (base)"]
    assert list(merged.models) == ["base", *expected]
    assert [merged.models[label].weights_sha256 for label in expected] == ["l", "r", "m", "n", "b"]


def test_rows_are_united_and_averages_are_over_the_common_ones(one) -> None:
    two = make_record({**BASE, "model": ("second", 0.8)}, names="CB", suite="fewer")
    merged = merge({"second": two, "first": one})
    assert [row.name for row in merged.benchmarks] == ["C", "B", "A"]
    for label, record in {"first": one, "second": two}.items():
        values = [row_of(record, name).scores["model"].value for name in "BC"]
        assert merged.average.scores[label].value == pytest.approx(sum(values) / 2)
    # The base is one column, with the figures of both.
    assert all("base" in row.scores for row in merged.benchmarks) and "second" not in row_of(merged, "A").scores
    assert (merged.suite.name, merged.suite.title) == ("fewer + three", "Suite fewer + Suite three")
    assert "on only 2 of 3 benchmarks, those that every model has, and" in verdict(merged, "first")


def test_settings_that_differ_are_named_with_their_folder(one, two) -> None:
    one.created, one.command, one.partial_data = "2026-01-01T00:00:00+00:00", "first command", ["B"]
    two.created, two.command, two.partial_data = "2026-01-02T00:00:00+00:00", "second command", ["C", "B"]
    two.versions = {**two.versions, "torch": "9.9"}
    two.data, two.processes, two.analysis = "folder", 4, {"model": {"error": "no memory"}}
    failed = {"benchmark": "A", "error": "out of luck"}
    one.errors = [Failure(model="base", **failed), Failure(model="model", **failed)]
    two.errors = [Failure(model="base", **failed)]
    merged = merge({"first": one, "second": two})
    assert merged.errors == [Failure(model="base", **failed), Failure(model="first", **failed)]
    assert merged.partial_data == ["B", "C"] and merged.limit is None
    assert merged.data == "Hugging Face Hub (first) / folder (second)" and merged.batch_size == 8
    assert merged.versions["torch"] == f"{one.versions['torch']} (first) / 9.9 (second)"
    assert merged.command == "first command\nsecond command" and merged.created == two.created
    assert merged.processes == 4 and list(merged.analysis) == ["second"]
    assert "first command\nsecond command" in page_of(merged)


@pytest.mark.parametrize(
    ("field", "value", "other"),
    [
        ("shots", 0, 5),
        ("metric", "acc", "acc_norm"),
        ("revision", "0" * 40, None),
        ("data_sha256", "5a", "7b"),
    ],
)
def test_other_benchmarks_of_one_name_are_refused(one, two, field: str, value: object, other: object) -> None:
    for record in (one, two):
        setattr(row_of(record, "B"), field, value)
    merge({"first": copy.deepcopy(one), "second": copy.deepcopy(two)})
    setattr(row_of(two, "B"), field, other)
    words = f"{field} is {value} in first and {other} in second".replace("None", "none")
    with pytest.raises(UserError, match=f"benchmark B: {words}"):
        merge({"first": one, "second": two})
    with pytest.raises(UserError, match=f"benchmark B: {field} is"):
        check_regression(two, one, 1.0)


def test_other_numbers_of_items_and_dtypes_are_refused(one, two) -> None:
    fewer, narrow = copy.deepcopy(two), copy.deepcopy(two)
    for figures in row_of(fewer, "B").scores.values():
        figures.items = 50
    with pytest.raises(UserError, match="benchmark B: items is 200 in first and 50 in second"):
        merge({"first": one, "second": fewer})
    narrow.dtype = "bfloat16"
    with pytest.raises(UserError, match=r"dtype is float32 in first and bfloat16 in second.* with one --compute-dtype"):
        merge({"first": one, "second": narrow})
    two.limit = 50
    with pytest.raises(UserError, match="--limit is 50 in this evaluation and none in the baseline"):
        check_regression(two, one, 1.0)


def shift(record: EvaluationRecord, label: str, **points: float) -> EvaluationRecord:
    """A copy in which ``label`` scores so many points more."""
    changed = copy.deepcopy(record)
    for name, change in points.items():
        row_of(changed, name).scores[label].value += change
    return changed


def test_a_fall_is_reported_with_where_it_came_from(one) -> None:
    before = one.average.scores["model"].value
    worse = shift(one, "model", A=-2.2, B=-1.1, C=0.3)
    (line,) = check_regression(worse, one, 0.5)
    assert f"average fell by 1 points ({before:.1f} to {before - 1:.1f})" in line and "A (-2.2), B (-1.1)" in line
    assert check_regression(worse, one, 1.0) == []  # 1.0000000000000 by rounding is no more than 1
    assert check_regression(one, worse, 0.0) == check_regression(one, one, 0.0) == []
    (line,) = check_regression(shift(one, "model", A=-1.503), one, 0.5)
    assert "fell by 0.501 points" in line
    # A base that fell does not count.
    assert check_regression(shift(one, "base", A=-20), one, 0.5) == []


def test_a_missing_benchmark_fails(one) -> None:
    lacking = copy.deepcopy(one)
    del row_of(lacking, "B").scores["model"], lacking.benchmarks[0]
    assert check_regression(lacking, one, 5.0) == ["model: no score on A, B, which the baseline has"]
    assert check_regression(one, lacking, 5.0) == []


def test_models_find_their_counterparts(one) -> None:
    several = make_record({**BASE, "left": ("l", 0.9), "right": ("r", 0.8)})
    worse = shift(shift(several, "right", A=-9), "left", B=-0.3)
    assert [line.split(":")[0] for line in check_regression(worse, several, 0.5)] == ["right"]
    with pytest.raises(UserError, match="the baseline has no model model, only left, right"):
        check_regression(one, several, 0.5)


def test_what_cannot_be_checked_is_refused(one) -> None:
    with pytest.raises(UserError, match="must be a number of points of 0 or more"):
        check_regression(one, one, float("nan"))
    with pytest.raises(UserError, match="no benchmark in common"):
        check_regression(make_record({"model": ("m", 1.0)}, "A"), make_record({"model": ("m", 1.0)}, "B"), 1.0)
