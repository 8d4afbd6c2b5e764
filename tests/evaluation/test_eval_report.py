"""The record says what it was made of, and its averages stand side by side only over the same benchmarks."""

from pathlib import Path

import pytest
from records import make_record, page_of, record_of

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


def test_published_averages_lack_the_failed_benchmarks() -> None:
    record = record_of(load_suite("paper"), MODELS, failed=("C-Eval",))
    rows = [row for row in record.benchmarks if row.name != "C-Eval"]
    assert record.average.over == len(rows) == 13
    for column in record.suite.columns:
        figures = [row.published[column] for row in rows]
        assert record.average.published[column] == pytest.approx(sum(figures) / 13)
    failed = tuple(row.name for row in record.benchmarks)
    assert set(record_of(load_suite("paper"), MODELS, failed).average.published.values()) == {None}


def test_published_averages_are_over_the_common_benchmarks() -> None:
    """The paper's two tables have 13 benchmarks in common, and C-Eval and ARC-Easy each in one."""
    merged = merge({name: record_of(load_suite(name), MODELS) for name in ("paper", "paper_stage1")})
    average = merged.average
    assert (average.over, average.total) == (13, 15)
    common = [row for row in merged.benchmarks if row.name not in ("C-Eval", "ARC-Easy")]
    assert len(average.published) == 3
    for column, value in average.published.items():
        assert value == pytest.approx(sum(row.published[column] for row in common) / 13)


def test_local_data_is_named_by_its_digest(tmp_path: Path) -> None:
    for suite, folder in (("paper", tmp_path), ("smoke", None)):
        rows = record_of(load_suite(suite), MODELS, data_dir=folder).benchmarks
        assert [row.data_sha256 for row in rows] == [f"digest of {row.name}" for row in rows]
        assert {row.revision for row in rows} == {None}
    for row in record_of(load_suite("paper"), MODELS).benchmarks:
        assert row.data_sha256 is None


def test_hardware_is_in_the_model_line() -> None:
    record = make_record(MODELS)
    assert record.models["model"].hardware == "a fast card"
    assert "| from | in/dense | in/moh |" in page_of(record)
    assert "| hardware | a fast card | a fast card |" in page_of(record)


def test_a_run_on_two_machines_names_both(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval")
    from moh_llm.evaluation import runner
    from moh_llm.evaluation.record import build_record
    from moh_llm.evaluation.result_cache import ResultCache

    suite, cache = load_suite("smoke"), ResultCache(tmp_path / "kept")

    def hardware(card: str) -> str:
        monkeypatch.setattr(runner, "name_device", lambda device: f"{card} {device}")
        scores = runner.score(
            {"model": str(tiny_llama)}, suite, limit=1, device="cpu", cache=cache, say=lambda line: None
        )
        report = build_record(suite, scores, 1, 8, None, "")
        assert all(len(row.data_sha256) == 64 for row in report.benchmarks)
        assert len({row.data_sha256 for row in report.benchmarks}) == 3
        return report.models["model"].hardware

    assert hardware("old") == "old cpu"
    (cache.folder / "model" / "Stories.json").unlink()
    assert hardware("new") == "old cpu / new cpu"
