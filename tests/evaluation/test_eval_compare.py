"""Evaluations are put side by side only where their scores mean the same, and regressions are caught."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from records import make_record, page_of

from moh_llm.errors import UserError
from moh_llm.evaluation.compare import check_regression, merge, read_evaluation
from moh_llm.evaluation.verdict import verdict
from moh_llm.files import write_json

Record = dict[str, Any]

BASE = {"base": ("dense", 1.0)}


@pytest.fixture
def one() -> Record:
    return make_record({**BASE, "model": ("first", 0.9)})


@pytest.fixture
def two() -> Record:
    return make_record({**BASE, "model": ("second", 0.8)})


def row_of(record: Record, name: str) -> Record:
    return next(row for row in record["benchmarks"] if row["name"] == name)


def test_what_was_written_is_read(one: Record, tmp_path: Path) -> None:
    write_json(tmp_path / "report.json", one)
    assert read_evaluation(tmp_path) == one


def test_what_is_no_evaluation_is_refused(one: Record, tmp_path: Path) -> None:
    def refuses(match: str, folder: Path = tmp_path) -> None:
        with pytest.raises(UserError, match=match) as caught:
            read_evaluation(folder)
        assert "\n" not in str(caught.value)

    path = tmp_path / "report.json"
    refuses("does not exist; name a folder", tmp_path / "none")
    refuses("holds no report.json")
    path.write_text("{", encoding="utf-8")
    refuses("cannot be read as JSON")
    refuses("report.json is a file; name a folder", path)
    for other in ([], {}, {"models": {}, "benchmarks": []}, {"models": {"model": 1}, "benchmarks": [{}]}):
        path.write_text(json.dumps(other), encoding="utf-8")
        refuses("is not the report of an evaluation")
    path.write_text(json.dumps({"runs": [], "comparison": []}), encoding="utf-8")
    refuses("is of training runs")
    del one["processes"], one["models"]["base"]["weights_sha256"], one["benchmarks"][1]["eval_split"]
    path.write_text(json.dumps(one), encoding="utf-8")
    refuses("lacks processes, weights_sha256, eval_split, as an older moh-llm wrote it")


def test_a_common_base_appears_once(one: Record, two: Record) -> None:
    before = copy.deepcopy([one, two])
    assert merge({"first": one}) is one
    two["benchmarks"][0]["model"]["samples"] = "samples/model/A.jsonl"
    merged = merge({"first": one, "second": two})
    del two["benchmarks"][0]["model"]["samples"]
    assert [one, two] == before
    assert list(merged["models"]) == ["base", "first", "second"]
    assert [about["compared_with"] for about in merged["models"].values()] == [None, "base", "base"]
    for row, own in zip(merged["benchmarks"], two["benchmarks"], strict=True):
        assert row["second"] == own["model"] and row["base"] == own["base"]
        assert "model" not in row and "delta" not in row
    assert set(merged) == set(one)
    for label, record in {"first": one, "second": two}.items():
        assert merged["average"][label] == record["average"]["model"]
    assert merged["average"]["published"] == one["average"]["published"] == {"paper": None}
    assert merged["suite"] == one["suite"] and merged["command"] == one["command"]
    page = page_of(merged)
    assert "| base | first | delta | recovery % | of margin % | second | delta | recovery % | of margin % |" in page
    assert f"**{verdict(merged, 'second')}**" in page and "| compared with |" not in page


def test_different_bases_stay_apart(one: Record) -> None:
    two = make_record({"base": ("another", 0.95), "model": ("second", 0.8)})
    third = make_record({**BASE, "third": ("third", 0.7)})
    merged = merge({"first": one, "second": two, "more": third})
    assert list(merged["models"]) == ["base (first, more)", "first", "base (second)", "second", "third"]
    assert merged["models"]["second"]["compared_with"] == "base (second)"
    assert merged["models"]["third"]["compared_with"] == "base (first, more)"
    for label, record in {"first": one, "second": two}.items():
        assert merged["average"][label] == record["average"]["model"]
    assert "second keeps" in verdict(merged, "second") and "of base (second)'s average" in verdict(merged, "second")
    page = page_of(merged)
    assert (
        "base (second) | second | delta | recovery % | of margin % | third | delta | recovery % | of margin % |" in page
    )
    assert (
        "| compared with | - | base (first, more) | - | base (second) | base (first, more) |" in page
        and page.count(" keeps ") == 3
    )


def test_equal_weights_with_other_scores_are_two_bases(one: Record, two: Record) -> None:
    two["benchmarks"][2]["base"]["value"] += 1e-9
    assert "base" in merge({"first": one, "second": two})["models"]
    two["benchmarks"][2]["base"]["value"] += 0.5
    assert "base (second)" in merge({"first": one, "second": two})["models"]


def test_a_model_without_base_has_no_difference(one: Record) -> None:
    merged = merge({"first": make_record({"model": ("alone", 0.8)}), "second": one})
    assert list(merged["models"]) == ["base", "first", "second"]
    assert merged["models"]["first"]["compared_with"] is None and "delta" not in merged["average"]["first"]
    assert verdict(merged, "first").endswith("; no base was scored with it.")
    assert "| base | first | second | delta | recovery % |" in page_of(merged)


def test_labels_tell_the_models_apart() -> None:
    several = {**BASE, "left": ("l", 0.9), "right": ("r", 0.8)}
    records = {"run": make_record(several), "shots": make_record({**BASE, "model": ("m", 0.7)})}
    records |= {"left": make_record({**BASE, "model": ("n", 0.6)})}
    records |= {"again": make_record({**BASE, "right": ("o", 0.5), "lone": ("p", 0.4)})}
    merged = merge(records)
    expected = ["left (run)", "right (run)", "model (shots)", "model (left)", "right (again)", "lone"]
    assert list(merged["models"]) == ["base", *expected]
    assert all(label in row for row in merged["benchmarks"] for label in expected)
    assert [merged["models"][label]["weights_sha256"] for label in expected] == ["l", "r", "m", "n", "o", "p"]
    # What was merged can be merged again.
    again = merge({"all": merged, "new": make_record({**BASE, "model": ("q", 0.3)})})
    assert list(again["models"]) == ["base", *expected, "new"]


def test_rows_are_united_and_averages_are_over_the_common_ones(one: Record) -> None:
    two = make_record({**BASE, "model": ("second", 0.8)}, names="CB", suite="fewer")
    merged = merge({"second": two, "first": one})
    assert [row["name"] for row in merged["benchmarks"]] == ["C", "B", "A"]
    for label, record in {"first": one, "second": two}.items():
        values = [row_of(record, name)["model"]["value"] for name in "BC"]
        assert merged["average"][label]["value"] == pytest.approx(sum(values) / 2)
    assert merged["average"]["base"]["value"] == pytest.approx(two["average"]["base"]["value"])
    # The base is one column, with the figures of both.
    assert all("base" in row for row in merged["benchmarks"]) and "second" not in row_of(merged, "A")
    assert merged["suite"] == {"name": "fewer + three", "title": "Suite fewer + Suite three", "columns": ["paper"]}
    assert "on only 2 of 3 benchmarks, those that every model has, and" in verdict(merged, "first")
    assert verdict(merged, "first").endswith(" on 1 of them; base is at chance on B.")


def test_a_score_without_its_bases_is_in_no_average(one: Record, two: Record) -> None:
    """The second record's base failed on C: the first's stands in the column, but there is no paired difference."""
    row = row_of(two, "C")
    del row["base"], row["model"]["delta"], row["delta"]
    merged = merge({"first": one, "second": two})
    assert merged["average"]["over"] == 2 and "base" in row_of(merged, "C")
    assert "delta" in merged["average"]["second"]


def test_all_else_is_kept(one: Record, two: Record) -> None:
    one |= {"created": "2026-01-01T00:00:00+00:00", "command": "first command", "partial_data": ["B"]}
    two |= {"created": "2026-01-02T00:00:00+00:00", "command": "second command", "partial_data": ["C", "B"]}
    two["versions"] = {**two["versions"], "torch": "9.9"}
    two |= {"data": "folder", "processes": 4, "share_prefixes": True, "analysis": {"model": {"layers": 2}}}
    failed = {"benchmark": "A", "error": "out of luck"}
    one["errors"] = [{"model": "base", **failed}, {"model": "model", **failed}]
    two["errors"] = [{"model": "base", **failed}]
    merged = merge({"first": one, "second": two})
    assert merged["errors"] == [{"model": "base", **failed}, {"model": "first", **failed}]
    assert merged["partial_data"] == ["B", "C"] and merged["limit"] is None
    assert merged["data"] == "Hugging Face Hub (first) / folder (second)" and merged["batch_size"] == 8
    assert merged["versions"]["torch"] == f"{one['versions']['torch']} (first) / 9.9 (second)"
    assert merged["versions"]["python"] == one["versions"]["python"] and merged["seeds"] == one["seeds"]
    assert merged["command"] == "first command\nsecond command" and merged["created"] == two["created"]
    assert merged["processes"] == 4 and merged["analysis"] == {"second": {"layers": 2}}
    page = page_of(merged | {"analysis": {}})
    assert "first command\nsecond command" in page
    assert "| prefixes shared | False (first) / True (second) |" in page


def test_records_of_before_are_merged(one: Record, two: Record) -> None:
    expected = merge({"first": one, "second": two})
    del one["share_prefixes"]
    for about in one["models"].values():
        del about["compared_with"]
    for row in (*one["benchmarks"], one["average"]):
        del row["recovery_interval"], row["model"]["recovery_interval"]
    merged = merge({"first": one, "second": two})
    assert merged["average"] == expected["average"] and merged["models"] == expected["models"]
    page_of(merged)


@pytest.mark.parametrize(
    ("field", "value", "other"),
    [
        ("shots", 0, 5),
        ("metric", "acc", "acc_norm"),
        ("dataset", "B", "else"),
        ("dataset_config", "B", "else"),
        ("revision", "0" * 40, None),
        ("eval_split", "test", "validation"),
        ("fewshot_split", None, "train"),
    ],
)
def test_other_benchmarks_of_one_name_are_refused(
    one: Record, two: Record, field: str, value: object, other: object
) -> None:
    two["benchmarks"][1][field] = other
    words = f"{field} is {value} in first and {other} in second, so".replace("None", "none")
    with pytest.raises(UserError, match=f"benchmark B: {words} the scores cannot be compared"):
        merge({"first": one, "second": two})
    with pytest.raises(UserError, match=f"benchmark B: {field} is"):
        check_regression(two, one, 1.0)


def test_older_records_lack_the_datasets_config(one: Record, two: Record, tmp_path: Path) -> None:
    for row in two["benchmarks"]:
        del row["dataset_config"]
    write_json(tmp_path / "report.json", two)
    two = read_evaluation(tmp_path)
    assert [row.get("dataset_config") for row in merge({"first": one, "second": two})["benchmarks"]] == ["A", "B", "C"]
    assert check_regression(two, one, 100.0) == []


def test_other_numbers_of_items_are_refused(one: Record, two: Record) -> None:
    fewer = copy.deepcopy(two)
    for label in fewer["models"]:
        fewer["benchmarks"][1][label]["items"] = 50
    with pytest.raises(UserError, match="benchmark B: items is 200 in first and 50 in second"):
        merge({"first": one, "second": fewer})
    two["limit"] = 50
    with pytest.raises(UserError, match="benchmark A: limit is 50 in this evaluation and none in the baseline"):
        check_regression(two, one, 1.0)
    other = make_record(BASE | {"model": ("second", 0.8)}, names="C")
    one["benchmarks"], other["limit"] = one["benchmarks"][:2], 50
    with pytest.raises(UserError, match="--limit is none in first and 50 in second"):
        merge({"first": one, "second": other})


def shift(record: Record, label: str, **points: float) -> Record:
    """A copy in which ``label`` scores so many points more."""
    changed = copy.deepcopy(record)
    for name, change in points.items():
        for figures in (row_of(changed, name)[label], row_of(changed, name)[label]["margin"]):
            figures["value"] += change
    return changed


def test_a_fall_is_told_with_where_it_came_from(one: Record) -> None:
    before = one["average"]["model"]["value"]
    worse = shift(one, "model", A=-2.1, B=-1.2, C=0.3)
    # On B the baseline's model is at chance: 46.0 where guessing gives 50.
    old, new = (
        sum(row_of(record, name)["model"]["value"] - chance for name, chance in (("A", 25), ("C", 0))) / 2
        for record in (one, worse)
    )
    (line,) = check_regression(worse, one, 0.5)
    assert line == (
        f"model: average fell by 1.00 points ({before:.1f} to {before - 1:.1f}) over 3 benchmarks, "
        "more than --max-drop 0.5; most on A (-2.1), B (-1.2); "
        f"{100 * new / old:.1f} % of the margin over chance is left ({new:.1f} of {old:.1f} points over 2 benchmarks)"
    )
    assert check_regression(worse, one, 1.0) == []  # 1.0000000000000 by rounding is no more than 1
    assert check_regression(one, worse, 0.0) == check_regression(one, one, 0.0) == []
    (line,) = check_regression(shift(one, "model", A=-1.503), one, 0.5)
    assert "fell by 0.501 points" in line
    # A base that fell is no matter of the model.
    assert check_regression(shift(one, "base", A=-20), one, 0.5) == []


def test_a_missing_benchmark_fails(one: Record) -> None:
    lacking = copy.deepcopy(one)
    del row_of(lacking, "B")["model"], lacking["benchmarks"][0]
    assert check_regression(lacking, one, 5.0) == ["model: no score on A, B, which the baseline has"]
    assert check_regression(one, lacking, 5.0) == []
    (line,) = check_regression(shift(lacking, "model", C=-9), one, 5.0)
    assert line.startswith("model: no score on A, B, which the baseline has; average fell by 9.00 points")
    assert "over 1 benchmark, " in line
    del row_of(lacking, "C")["model"]
    assert check_regression(lacking, one, 5.0) == ["model: no score on A, B, C, which the baseline has"]


def test_models_find_their_counterparts(one: Record) -> None:
    several = make_record({**BASE, "left": ("l", 0.9), "right": ("r", 0.8)})
    worse = shift(shift(several, "right", A=-9), "left", B=-0.3)
    (line,) = check_regression(worse, several, 0.5)
    assert line.startswith("right: ")
    # The baseline's only model serves all.
    assert [line.split(":")[0] for line in check_regression(shift(several, "left", A=-90), one, 20.0)] == ["left"]
    with pytest.raises(UserError, match="the baseline has no model model, only left, right"):
        check_regression(one, several, 0.5)


def test_what_cannot_be_checked_is_refused(one: Record) -> None:
    for number in (float("nan"), -0.1, float("inf")):
        with pytest.raises(UserError, match="must be a number of points of 0 or more"):
            check_regression(one, one, number)
    with pytest.raises(UserError, match="no benchmark in common"):
        check_regression(make_record({"model": ("m", 1.0)}, "A"), make_record({"model": ("m", 1.0)}, "B"), 1.0)
