"""The record says what it was made of, and its averages stand side by side only over the same benchmarks."""

from pathlib import Path

import pytest
from records import page_of, record_of

from moh_llm.evaluation.compare import merge
from moh_llm.evaluation.suite import load_suite

MODELS = {"base": ("dense", 1.0), "model": ("moh", 0.9)}


def test_published_averages_of_the_whole_suite() -> None:
    record = record_of(load_suite("paper"), MODELS)
    published = record.average.published
    assert round(published["LLaMA3-8B"], 1) == 61.6 and round(published["MoH-LLaMA3-8B"], 1) == 64.0
    assert published["LLaMA3-8B stage 1"] is None  # C-Eval is not given
    (line,) = (line for line in page_of(record).splitlines() if line.startswith("| **average**"))
    assert {"61.6", "64.0", "-"} < {cell.strip() for cell in line.split("|")}


def test_published_averages_are_over_the_common_benchmarks() -> None:
    """Without those that failed; the paper's two tables have 13 in common, and C-Eval and ARC-Easy each in one."""
    failed = record_of(load_suite("paper"), MODELS, failed=("C-Eval",))
    merged = merge({name: record_of(load_suite(name), MODELS) for name in ("paper", "paper_stage1")})
    for record in (failed, merged):
        assert record.average.over == 13
        common = [row for row in record.benchmarks if row.name not in ("C-Eval", "ARC-Easy")]
        for column, value in record.average.published.items():
            assert value == pytest.approx(sum(row.published[column] for row in common) / 13)
    every = tuple(row.name for row in failed.benchmarks)
    assert set(record_of(load_suite("paper"), MODELS, every).average.published.values()) == {None}


def test_local_data_is_named_by_its_digest(tmp_path: Path) -> None:
    for suite, folder in (("paper", tmp_path), ("smoke", None)):
        rows = record_of(load_suite(suite), MODELS, data_dir=folder).benchmarks
        assert [row.data_sha256 for row in rows] == [f"digest of {row.name}" for row in rows]
        assert {row.revision for row in rows} == {None}
    for row in record_of(load_suite("paper"), MODELS).benchmarks:
        assert row.data_sha256 is None
