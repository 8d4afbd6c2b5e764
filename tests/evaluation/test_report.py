"""The pages of training runs and evaluations: their figures, what they leave out, and their charts."""

import html
import random
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cards import read_log, write_log, write_run
from records import make_record, verdict

from moh_llm.cli import main
from moh_llm.evaluation import report
from moh_llm.evaluation.charts import Axis, Chart, HeatMap, IntervalChart, LineChart
from moh_llm.evaluation.report import render, write_report
from moh_llm.evaluation.runs import read_run, read_runs_behind
from moh_llm.records.evaluation import EvaluationRecord

Record = dict[str, Any]


@pytest.fixture(autouse=True)
def pictures() -> None:
    """Charts are rendered here, unless a test takes `unrendered`."""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", "out/moh")


@pytest.fixture
def evaluation(analysis: Record) -> EvaluationRecord:
    record = make_record({"base": ("dense", 1.0), "one": ("first", 0.9), "two": ("second", 0.8)})
    record.analysis = {"one": analysis, "two": {"error": "out of <memory>"}}
    return record


def page_of(run: Path) -> str:
    """The page of a run in Markdown, as the command writes it."""
    assert main(["report", str(run)]) == 0
    return (run / "report.md").read_text()


def text_of(page: str) -> str:
    """The text of an HTML page, without its head."""
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", page.split("<body>")[1])).split())


@pytest.mark.usefixtures("unrendered")
def test_a_run_gets_its_pages_in_its_folder(run: Path) -> None:
    page = page_of(run)
    ratio, kl = "1.1000 (1.0812 to 1.1234)", "0.0500 (0.0410 to 0.0620)"
    for row in (
        "| steps | 6 of 6, each 2 sequences of 16 tokens |",
        "| loss | first 0.3 (step 1), last 0.05 (step 6), lowest 0.05 (step 6) |",
        "| seconds of training | 5.2 |",
        "| tokens per second (median) | 103.5 |",
        "| 96 | 40 | 27.000 | 20.000 | 1.3500 (1.0812 to 1.1234) | 0.125 (0.0410 to 0.0620) | 90.00 |",
        f"| 192 (saved model) | 40 | 22.000 | 20.000 | {ratio} | {kl} | 90.00 |",
        "| books | 100.00% | 100.00% | 192 | 0.500 | 0 |",
    ):
        assert row in page
    # The HTML page states the same.
    text = text_of((run / "report.html").read_text())
    cells = [cell for line in page.splitlines() if line[:2] == "| " for cell in line.split(" | ")]
    assert len(cells) > 70
    for cell in cells:
        assert html.unescape(cell).strip("|- :").replace("\\", "") in text


@pytest.mark.usefixtures("unrendered")
def test_a_running_run_with_half_a_line(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", "out/moh", steps=4, record={"status": "running", "data_read": None})
    lines = read_log(run)
    lines[-1]["tokens_of_source"] = {"books": 96, "wiki": 32}
    write_log(run, lines, tail='{"step": 5, "lo')
    page = page_of(run)
    for part in ("| steps | 4 of 6, ", "running: not finished", "cut short", "| books | - | 75.00% | 96 | - | - |"):
        assert part in page
    # Its pages are replaced while training goes on.
    write_run(run, "out/moh", steps=5)
    assert "| steps | 5 of 6, " in page_of(run)


@pytest.mark.usefixtures("unrendered")
def test_dropped_steps_do_not_count(run: Path) -> None:
    lines = read_log(run)
    lines[2] |= {"dropped": "the loss is not finite", "loss": None}
    lines[6] |= {"dropped": "the loss jumped", "loss": 0.001}
    write_log(run, lines)
    page = page_of(run)
    assert "| 2 (2: the loss is not finite; 6: the loss jumped) |" in page and "last 0.06 (step 5), lowest 0.06" in page
    assert [tokens for tokens, _ in read_run(run).points("loss")] == [32, 96, 128, 160]


@pytest.mark.usefixtures("unrendered")
def test_router_health(run: Path) -> None:
    lines = read_log(run)
    one = {"load": [[0.5, 0.5, 1.0], [], [0.0, 1.0]], "dead_heads": [0, 0, 1]}
    other = one | {"load": [[0.0, 1.0, 0.0], [], [0.0, 1.0]], "dead_heads": [2, 0, 1]}
    lines[0]["routing"], lines[3]["routing"] = one, other
    write_log(run, lines)
    page = page_of(run)
    for row in ("| 1 of 5 |", "| 3 of 5 |", "| - |"):
        assert row in page
    (load,) = [chart for chart in report.run_charts(read_run(run)) if chart.name == "run-load"]
    assert load.rows == other["load"] and "which no token selects: 3." in load.note


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("run.json", None, "run holds no run.json; name a folder that moh-llm train made"),
        ("run.json", '{"plan": 1}', "run.json lacks status"),
        ("log.jsonl", None, "wait for the run's first step"),
        ("log.jsonl", '{"step": 0}\n{"step": \n{"step": 2}\n', "log.jsonl: line 2 cannot be read as JSON"),
    ],
)
def test_what_is_no_run_is_refused(run: Path, capsys, name: str, content: str | None, message: str) -> None:
    (run / name).unlink()
    if content is not None:
        (run / name).write_text(content)
    assert main(["report", str(run)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not [*run.glob("report*")]


def test_matplotlib_is_asked_for_by_name(run: Path) -> None:
    without = "import sys; sys.modules['matplotlib'] = None; from moh_llm.cli import main; sys.exit(main(sys.argv[1:]))"
    found = subprocess.run([sys.executable, "-c", without, "report", str(run)], capture_output=True, text=True)
    assert found.returncode == 2 and 'pip install "moh-llm[report]"' in found.stderr
    assert not [*run.glob("report*")]


@pytest.mark.usefixtures("unrendered")
def test_the_page_of_an_evaluation_states_its_figures(evaluation: EvaluationRecord) -> None:
    text = text_of(render("report.html", evaluation))
    for label in ("one", "two"):
        assert verdict(evaluation, label) in text
    for row in evaluation.benchmarks:
        for label, figures in row.scores.items():
            assert f"{figures.value:.1f} ± {figures.stderr:.1f}" in text
            if label != "base":
                delta = figures.delta
                assert f"{delta.value:+.1f} ± {delta.stderr:.1f} {figures.recovery.share:.1f} " in text
    assert evaluation.command in text
    assert "NOT ANALYSED: what the heads of two did (out of <memory>)." in text
    on = statistics.mean(map(sum, evaluation.analysis["one"]["head_load"]["load"]))
    assert f"| {on:.4g} | {on / 4:.1%} |" in render("report.md", evaluation)


@pytest.mark.usefixtures("unrendered")
def test_runs_behind_models_come_along_unless_they_are_damaged(
    run: Path, evaluation: EvaluationRecord, tmp_path: Path
) -> None:
    bad = write_run(tmp_path / "bad", "out/moh")
    (bad / "log.jsonl").write_text("")
    said: list[str] = []
    trained = read_runs_behind(
        [str(bad / "model"), str(run / "model"), str(tmp_path / "moh"), "org/model"], said.append
    )
    assert [found.folder for found in trained] == [run]
    (line,) = said
    assert f"leaves out the training run in {bad}: {bad / 'log.jsonl'} holds no step yet" in line
    (tmp_path / "report").mkdir()
    write_report(tmp_path / "report", evaluation, trained)
    page = (tmp_path / "report" / "report.md").read_text()
    assert f"| folder | {run} |" in page.replace("\\", "")
    assert "| 192 (saved model) |" in page


def test_pages_need_nothing_else_and_escape_values(evaluation: EvaluationRecord, run: Path) -> None:
    record = evaluation.content()
    record["benchmarks"][0]["name"] = "<script>alert(1)</script>"
    record["errors"] = [{"model": "one", "benchmark": "B", "error": "<img src=x>"}]
    evaluation, trained = EvaluationRecord.parse(record, ""), read_run(run)
    for page in (render("report.html", evaluation, [trained]), render("report.html", None, [trained])):
        assert "<script" not in page and "<img" not in page and "@import" not in page
        assert not {place for place in re.findall(r'(?:href|src)="([^"]+)"', page) if not place.startswith("#")}
        identities = re.findall(r'\bid="([^"]+)"', page)
        assert len(identities) == len(set(identities))
        assert {place[1:] for place in re.findall(r'href="(#[^"]+)"', page)} <= set(identities)
        assert set(re.findall(r"url\(#([^)]+)\)", page)) <= set(identities)
        assert "var(--ink)" in page and "#0a0" not in page  # colours are the theme's
        assert page.count("<svg") == page.count('role="img" aria-label="') > 3
        assert len(page) < 1_000_000


def test_charts_of_an_evaluation_hold_its_figures(evaluation: EvaluationRecord, analysis: Record) -> None:
    deltas, scores = report.score_charts(evaluation)
    for number, row in enumerate(evaluation.benchmarks):
        for label in ("one", "two"):
            delta = row.scores[label].delta
            assert deltas.series[label][number] == (delta.value, *delta.interval)
        assert scores.series["base"][number][0] == row.scores["base"].value
    flops, seconds = report.cost_charts(evaluation.analyses, evaluation.models)
    assert list(flops.series) == ["one"]  # the other analysis failed
    for chart, key in ((flops, "flops"), (seconds, "seconds")):
        assert chart.series["one"] == [(cost["length"], cost["moh"] / cost["dense"]) for cost in analysis[key]]
    assert report.load_chart(1, analysis).rows == analysis["head_load"]["load"]


def test_curves_are_the_logs_numbers(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", "out/moh", record={"keys_asked": 0.33})
    lines = read_log(run)
    for line in lines[1:]:
        line |= {"keys_read": 0.3 + line["step"] / 100, "keys_multiplier": 0.5 * line["step"]}
    lines[3]["validation"]["keys_read"] = 0.35
    lines[4] |= {"dropped": "the loss is not finite", "loss": None}
    write_log(run, lines)
    charts = {chart.title: chart for chart in report.run_charts(read_run(run))}
    found = {title: chart.series for title, chart in charts.items()}
    kept = [line for line in lines[1:] if line["step"] != 4]
    assert found["KL to the base"] == {"KL": [(line["tokens"], line["kl"]) for line in kept]}
    assert found["Held-out perplexity"] == {"ratio": [(0, 1.5), (96, 1.35), (192, 1.2)]}
    assert list(found["Heads per token, mean over layers"]) == ["on"]
    assert "Cross-entropy" not in found
    read = [(line["tokens"], line["keys_read"]) for line in kept]
    assert found["Keys read"] == {"training text": read, "held-out text": [(96, 0.35)]}
    assert charts["Keys read"].reference == 0.33 and charts["Held-out perplexity"].reference == 1
    assert found["Multiplier of the keys read"]["multiplier"][-1] == (192, 3.0)


@pytest.mark.parametrize("count", [200, 201])
def test_long_curves_are_running_medians(count: int) -> None:
    draw = random.Random(count)
    curve = [(step * 32, draw.random()) for step in range(1, count + 1)]
    found = report.smoothed(curve)
    assert found[0][0] == 32 and found[-1][0] == count * 32 and len(found) < 402
    half = max(11, count // 20) // 2 if count > 200 else 0
    for tokens, value in found:
        at = tokens // 32 - 1
        assert value == statistics.median(number for _, number in curve[max(0, at - half) : at + half + 1])


def test_charts_draw_gaps_and_odd_names() -> None:
    series = {"x": [(1, 2.0), (4, 3.0)], "_y$": [(4, 1.0)], "none": []}
    intervals = {"x": [(1.0, 0.5, 1.75), None, (2.0, None, None)]}
    made: list[Chart] = [
        LineChart("a", "A & <b>", "", series, Axis("n", log=2), Axis("v"), 1.0),
        IntervalChart("b", "B", "", ["p", "q", "r"], intervals, "points", ["base", "x"], zero=True),
        HeatMap("c", "C", "", [[0.5, 1.0], [], [0.25]], ("head", "layer"), "share"),
    ]
    for chart in made:
        assert chart.svg.startswith("<svg") and chart.svg.rstrip().endswith("</svg>")
        assert "var(--ink)" in chart.svg and "#0a0" not in chart.svg and "<b>" not in chart.svg
    # The same chart twice is the same text, so that pages can be compared.
    assert made[2].svg == made[2].svg
