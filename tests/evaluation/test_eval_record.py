"""The record says what it was made of, is read as it was written, and averages over the benchmarks of every model."""

import json
from pathlib import Path

import pytest
from records import make_record, page_of, record_of

from moh_llm.errors import UserError
from moh_llm.evaluation.suite import load_suite
from moh_llm.records.evaluation import read_evaluation

MODELS = {"base": ("dense", 1.0), "model": ("moh", 0.9)}


def test_what_was_written_is_read(tmp_path: Path) -> None:
    record = make_record(MODELS)
    record.write(tmp_path / "report.json")
    assert read_evaluation(tmp_path) == record


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


def test_published_averages_of_the_whole_suite() -> None:
    record = record_of(load_suite("paper"), MODELS)
    published = record.average.published
    assert round(published["LLaMA3-8B"], 1) == 61.6 and round(published["MoH-LLaMA3-8B"], 1) == 64.0
    assert published["LLaMA3-8B stage 1"] is None  # C-Eval is not given
    (line,) = (line for line in page_of(record).splitlines() if line.startswith("| **average**"))
    assert {"61.6", "64.0", "-"} < {cell.strip() for cell in line.split("|")}


def test_published_averages_leave_out_what_failed() -> None:
    record = record_of(load_suite("paper"), MODELS, failed=("C-Eval",))
    assert record.average.over == 13
    common = [row for row in record.benchmarks if row.name != "C-Eval"]
    for column, value in record.average.published.items():
        assert value == pytest.approx(sum(row.published[column] for row in common) / 13)
    every = tuple(row.name for row in record.benchmarks)
    assert set(record_of(load_suite("paper"), MODELS, every).average.published.values()) == {None}


def test_local_data_is_named_by_its_digest(tmp_path: Path) -> None:
    for suite, folder in (("paper", tmp_path), ("smoke", None)):
        rows = record_of(load_suite(suite), MODELS, data_dir=folder).benchmarks
        assert [row.data_sha256 for row in rows] == [f"digest of {row.name}" for row in rows]
        assert {row.revision for row in rows} == {None}
    for row in record_of(load_suite("paper"), MODELS).benchmarks:
        assert row.data_sha256 is None
