"""`moh-llm report` of evaluations: with the runs behind their models, and against a baseline."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from records import make_record, read, report

from moh_llm.evaluation.report import write_report
from moh_llm.records.evaluation import EvaluationRecord

MakeRun = Callable[..., Path]


def evaluated(
    folder: Path, models: dict[str, tuple[str, float]], made_by: dict[str, Path] | None = None, **changes: Any
) -> Path:
    """A folder as evaluate leaves it; ``made_by``: per model the folder of its training run."""
    folder.mkdir()
    record = make_record({"base": ("dense", 1.0)} | models).content() | changes
    for label, run in (made_by or {}).items():
        (run / "model").mkdir()
        record["models"][label]["model"] = str(run / "model")
    (folder / "report.json").write_text(json.dumps(record))
    return folder


def test_evaluations_and_runs_on_one_page(make_run: MakeRun, tmp_path: Path) -> None:
    first = evaluated(tmp_path / "first", {"model": ("one", 0.9)})
    second = evaluated(tmp_path / "second", {"model": ("two", 0.8)})
    assert report(first, make_run("run"), second, "--output", tmp_path / "out") == 0
    found = read(tmp_path / "out")
    assert list(found["models"]) == ["base", "first", "second"]
    assert [run["name"] for run in found["training"]["runs"]] == ["run"]
    page = (tmp_path / "out" / "report.html").read_text()
    assert "second keeps" in page and 'id="held-out-ratio"' in page


def test_figures_at_long_context_are_shown(tmp_path: Path) -> None:
    """Of the models whose conversion has them."""
    folder = evaluated(tmp_path / "scores", {"model": ("one", 0.9)})
    record = json.loads((folder / "report.json").read_text())
    record["models"]["model"] |= {
        "by_position": [{"start": 2048, "tokens": 6144, "perplexity_ratio": 1.25, "kl": 0.0125}],
        "retrieval": [{"task": "copying", "asked": 120, "base": 96, "converted": 48}],
    }
    (folder / "report.json").write_text(json.dumps(record))
    assert report(folder) == 0
    found = (folder / "report" / "report.md").read_text().split("## Long context")[1].split("\n## ")[0]
    assert "| from 2048 | 6,144 | 1.2500 | 0.0125 |" in found and "| copying | 120 | 96 | 48 |" in found
    assert found.count("###") == 1


def test_runs_behind_models_come_along_unless_they_are_damaged(make_run: MakeRun, tmp_path: Path, capsys) -> None:
    good, bad = make_run("good"), make_run("bad", lines=[])
    models = {"one": ("first", 0.9), "two": ("second", 0.8)}
    folder = evaluated(tmp_path / "scores", models, {"one": bad, "two": good})
    assert report(folder) == 0
    assert [found["name"] for found in read(folder / "report")["training"]["runs"]] == ["good"]
    error = capsys.readouterr().err
    assert f"the report leaves out the curves of {bad}: {bad / 'log.jsonl'} holds no step yet" in error
    assert error.count("\n") == 1
    # Its folder is still not replaced, and who names it is told.
    assert report(folder, "--output", bad, "--overwrite") == 2
    assert "would replace" in capsys.readouterr().err
    assert report(folder, bad, "--output", tmp_path / "out") == 2
    assert "holds no step yet" in capsys.readouterr().err


def test_a_report_names_no_logs_of_items_that_it_lacks(tmp_path: Path) -> None:
    folder = evaluated(tmp_path / "scores", {"model": ("one", 0.9)})
    record = read(folder)
    record["benchmarks"][0]["scores"]["model"]["samples"] = "samples/model/A.jsonl"
    (folder / "report.json").write_text(json.dumps(record))
    (folder / "samples" / "model").mkdir(parents=True)
    (folder / "samples" / "model" / "A.jsonl").write_text("")
    assert report(folder) == 0
    assert read(folder / "report")["benchmarks"][0]["scores"]["model"]["samples"] is None
    # As evaluate does, whose folder has the logs.
    write_report(folder, [], "moh-llm evaluate", EvaluationRecord.parse(record, ""))
    assert read(folder)["benchmarks"][0]["scores"]["model"]["samples"] == "samples/model/A.jsonl"


def test_a_build_fails_where_a_model_fell_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = evaluated(tmp_path / "before", {"model": ("one", 0.9)})
    after = evaluated(tmp_path / "after", {"model": ("one", 0.8)})
    check = [after, "--output", tmp_path / "out", "--overwrite", "--baseline", before]
    assert report(*check) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("WORSE")]
    assert "average fell by" in line and "more than --max-drop 0.5" in line
    assert (tmp_path / "out" / "report.html").is_file()
    assert report(*check, "--max-drop", "50") == 0
    assert report(before, "--output", tmp_path / "out", "--overwrite", "--baseline", after, "--max-drop", "0") == 0


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["RUN", "--baseline", "EVAL"], "no evaluation among RUN to compare with it"),
        (["EVAL", "LIMITED", "--output", "out"], "--limit is none in EVAL and 5 in LIMITED"),
        (["EVAL", "EVAL", "--output", "out"], "is named twice"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys, words: list[str], line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run("RUN")
    evaluated(Path("EVAL"), {"model": ("one", 0.9)})
    evaluated(Path("LIMITED"), {"model": ("one", 0.9)}, limit=5)
    assert report(*words) == 2
    assert line in capsys.readouterr().err
    assert not Path("out").exists() and not Path("EVAL/report").exists()
