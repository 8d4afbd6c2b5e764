"""The HTML page and its charts hold the record's figures, need no network, and escape values."""

import html
import json
import random
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from records import make_record, verdict

from moh_llm.evaluation import report_charts
from moh_llm.evaluation.charts import Axis, Chart, heat_map, interval_chart, line_chart
from moh_llm.evaluation.report import render_html, render_markdown
from moh_llm.evaluation.report_charts import drawn_points, training_charts
from moh_llm.evaluation.runs import group_runs, read_runs
from moh_llm.records.evaluation import EvaluationRecord

Record = dict[str, Any]


@pytest.fixture(autouse=True)
def pictures() -> None:
    """Charts are rendered here, unless a test takes `unrendered`."""


@pytest.fixture
def evaluation(analysis: Record) -> EvaluationRecord:
    record = make_record({"base": ("dense", 1.0), "one": ("first", 0.9), "two": ("second", 0.8)})
    record.analysis = {"one": analysis, "two": {"error": "out of <memory>"}}
    return record


def page_of(record: EvaluationRecord | None, runs: Any = (), command: str = "") -> str:
    return render_html(record, group_runs(read_runs(runs)), command, record.content() if record else {})


def text_of(page: str) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", page)).split())


@pytest.mark.usefixtures("unrendered")
def test_page_states_the_figures_of_the_record(evaluation: EvaluationRecord) -> None:
    page = page_of(evaluation, command="moh-llm report a")
    text = text_of(page)
    for label in ("one", "two"):
        assert verdict(evaluation, label) in text
    for row in evaluation.benchmarks:
        for label, figures in row.scores.items():
            assert f"{figures.value:.1f} ± {figures.stderr:.1f}" in text
            if label != "base":
                delta = figures.delta
                assert f"{delta.value:+.1f} ± {delta.stderr:.1f} {figures.recovery.share:.1f} " in text
    assert evaluation.command in text and "moh-llm report a" in text
    assert "NOT ANALYSED: what the heads of two did (out of <memory>)." in text
    (link,) = re.findall(r'download="report.json" href="[^,]+,([^"]+)"', page)
    assert json.loads(unquote(html.unescape(link))) == json.loads(json.dumps(evaluation.content()))
    kinds = re.findall(r'title="head \d+: (on|off|shared)"', page)  # of each token
    on = evaluation.analysis["one"]["token_heads"]["on"][0]
    assert len(kinds) == sum(map(len, on)) and kinds.count("off") == sum(not head for token in on for head in token)


@pytest.mark.slow
def test_page_needs_nothing_else_and_escapes_values(
    evaluation: EvaluationRecord, make_run: Callable[..., Path]
) -> None:
    record = evaluation.content()
    record["benchmarks"][0]["name"] = "<script>alert(1)</script>"
    record["errors"] = [{"model": "one", "benchmark": "B", "error": "<img src=x>"}]
    page = page_of(EvaluationRecord.parse(record, ""), [make_run("run")])
    assert "<script" not in page and "<img" not in page and "@import" not in page
    assert "<td>&lt;</td>" in page  # a token of the sentence
    outside = {place for place in re.findall(r'(?:href|src)="([^"]+)"', page) if not place.startswith(("#", "data:"))}
    assert not outside
    identities = re.findall(r'\bid="([^"]+)"', page)
    assert len(identities) == len(set(identities))
    assert {place[1:] for place in re.findall(r'href="(#[^"]+)"', page)} <= set(identities)
    assert {place for place in re.findall(r"url\(#([^)]+)\)", page)} <= set(identities)
    assert "#0a0" not in page  # colours are the theme's
    assert len(page) < 1_000_000


@pytest.mark.usefixtures("unrendered")
def test_charts_show_the_scores_and_the_analysis(evaluation: EvaluationRecord, analysis: Record) -> None:
    assert list(evaluation.analyses) == ["one"]  # the other analysis failed
    made = [*report_charts.score_charts(evaluation), *report_charts.cost_charts(evaluation.analyses, evaluation.models)]
    charts = {chart.name: chart for chart in [*made, *report_charts.router_charts(1, analysis)]}
    assert charts["deltas"].head == ["", "one", "one: from", "one: to", "two", "two: from", "two: to"]
    for cells, row in zip(charts["deltas"].body, evaluation.benchmarks, strict=True):
        deltas = [row.scores[label].delta for label in ("one", "two")]
        assert cells[1:] == [number for delta in deltas for number in (delta.value, *delta.interval)]
    assert [row[1:] for row in charts["m1-load"].body] == analysis["head_load"]["load"]
    assert {row[0]: row[1:] for row in charts["m1-texts"].body} == analysis["head_load_by_text"]["load"]
    for row in charts["m1-scores-texts"].body:  # this router does not score shared heads
        scores = analysis["routing_scores_by_text"]["texts"][row[0]]
        assert row[1:] == [scores[kind]["quantiles"][at] for kind in ("routed", "selected") for at in (2, 1, 3)]
    ranks = zip(analysis["feature_rank"]["shared"], analysis["feature_rank"]["routed"], strict=True)
    assert [row[1:] for row in charts["m1-rank"].body] == [[r["energy"] / r["width"] for r in pair] for pair in ranks]
    ratios = [[cost["length"], cost["moh"] / cost["dense"]] for cost in analysis["flops"]]
    assert charts["flops-ratio"].body == ratios
    layers = analysis["routing_scores"]["layers"]
    routed = charts["m1-scores"].head.index("routed")
    assert [row[routed] for row in charts["m1-scores"].body] == [layer["routed"]["quantiles"][2] for layer in layers]
    counts = [sum(column) for column in zip(*(layer["routed"]["histogram"] for layer in layers), strict=True)]
    shares = [row[charts["m1-histogram"].head.index("routed")] for row in charts["m1-histogram"].body]
    assert shares == pytest.approx([count / sum(counts) for count in counts])


@pytest.mark.usefixtures("unrendered")
def test_page_states_what_the_markdown_states(make_run: Callable[..., Path], log_lines: Any) -> None:
    lines = log_lines(4, 3, 0.3)
    lines[2] |= {"dropped": "the loss is not finite", "loss": None}
    receipt = {"wiki": {"weight": 0.25, "tokens": 1024, "share": 0.26, "epochs": 0.5, "repeated_tokens": 0}}
    one = make_run("one", seed=3, lines=lines, tail='{"step": 5, "lo', record={"status": "running"})
    runs = [one, make_run("two", record={"data_read": receipt}, recipe={"lora": {"rank": 4}})]
    page = page_of(None, runs)
    markdown = render_markdown(None, group_runs(read_runs(runs)))
    cells = [cell for line in markdown.splitlines() if line[:2] == "| " for cell in line.split(" | ")]
    assert len(cells) > 100
    text = text_of(page)
    for cell in cells:
        assert html.unescape(cell).strip("|- :").replace("\\", "") in text
    for part in ("1 (2: the loss is not finite)", "line was cut short", "seed 3", "wiki 25.00%"):
        assert part in text
    assert 'class="warning"' not in page


def charts_of(*runs: Path) -> dict[str, Chart]:
    return {chart.name: chart for chart in training_charts(group_runs(read_runs(runs)))}


@pytest.mark.parametrize("count", [200, 201])
def test_long_curves_are_running_medians(count: int) -> None:
    draw = random.Random(count)
    curve = [(step * 32, draw.random()) for step in range(1, count + 1)]
    assert drawn_points([], smooth=True) == []
    for smooth in (True, False):
        found = drawn_points(curve, smooth)
        assert found[0][0] == 32 and found[-1][0] == count * 32 and len(found) < 402
        half = max(11, count // 20) // 2 if smooth and count > 200 else 0
        for tokens, value in found:
            at = tokens // 32 - 1
            assert value == statistics.median(number for _, number in curve[max(0, at - half) : at + half + 1])


@pytest.mark.usefixtures("unrendered")
def test_curves_are_the_logs_numbers(make_run: Callable[..., Path], log_lines: Any) -> None:
    lines = log_lines(6, 3, 0.3)
    lines[4] |= {"dropped": "the loss is not finite", "loss": None}
    found = charts_of(make_run("run", lines=lines))
    kept = [line for line in lines[1:] if line["step"] != 4]
    assert found["log-kl"].body == [[line["tokens"], line["kl"]] for line in kept]
    assert (found["log-kl"].title, found["log-balance_loss"].title) == ("KL to the base", "Load-balance loss")
    assert "held-out-perplexity" not in found


@pytest.mark.usefixtures("unrendered")
def test_a_group_has_its_mean(make_run: Callable[..., Path]) -> None:
    scales = (0.3, 0.32, 0.37)
    found = charts_of(*(make_run(f"run-s{seed}", seed=seed, scale=scale) for seed, scale in enumerate(scales)))
    chart = found["held-out-kl"]
    assert chart.head == ["training tokens", "run, seed 0", "run, seed 1", "run, seed 2", "run, mean"]
    means = [statistics.mean(scales) / (step + 2) for step in (0, 3, 6)]
    assert [row[-1] for row in chart.body] == pytest.approx(means)


@pytest.mark.usefixtures("unrendered")
def test_router_charts_show_the_last_health(make_run: Callable[..., Path], log_lines: Any, routing: Any) -> None:
    lines = log_lines(6, 3, 0.3)
    lines[3]["routing"] = routing([[0.1, 0.2], [0.3], []], None)
    lines[6]["routing"] = routing([[0.0, 1.0], [0.4], []], [0.5, 0.2, 0.0])
    found = charts_of(make_run("run", lines=lines))
    assert found["load-0"].body == [["0", 0.0, 1.0], ["1", 0.4], ["2"]]
    assert "Dead heads, which no token selects: 1." in found["load-0"].note
    assert found["routers-changed"].body == [[0, 0.5], [1, 0.2]]
    assert found["routers-entropy"].body == [[0, 0.9], [1, pytest.approx(0.8)]]


def test_charts_give_their_data_and_no_fixed_colour() -> None:
    charts = [
        line_chart("a", "A & <b>", {"x": [(1, 2.0), (4, 3.0)], "y": [(4, 1.0)]}, Axis("n", log=2), Axis("v")),
        interval_chart("b", "B", ["p", "q", "r"], {"x": [(1.0, 0.5, 1.75), None, (2.0, None, None)]}, "points"),
        heat_map("c", "C", {0: [0.5, 1.0], 1: [0.25]}, ("head", "layer"), "share"),
    ]
    assert charts[0].body == [[1, 2.0, None], [4, 3.0, 1.0]]
    assert charts[1].head == ["", "x", "x: from", "x: to"]
    assert charts[1].body == [["p", 1.0, 0.5, 1.75], ["q", None, None, None], ["r", 2.0, None, None]]
    assert charts[2].body == [["0", 0.5, 1.0], ["1", 0.25]]
    for chart in charts:
        assert chart.svg.startswith("<svg") and chart.svg.rstrip().endswith("</svg>")
        assert "var(--ink)" in chart.svg and "#0a0" not in chart.svg and "<b>" not in chart.svg
    # The same chart twice is the same text, so that pages can be compared.
    again = heat_map("c", "C", {0: [0.5, 1.0], 1: [0.25]}, ("head", "layer"), "share")
    assert again.svg == charts[2].svg
