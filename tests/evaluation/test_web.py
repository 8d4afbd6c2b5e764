"""The HTML page holds the record's figures, asks nothing of the network, and escapes what it is given."""

import csv
import html
import io
import json
import random
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from matplotlib.figure import Figure
from records import make_record, verdict

from moh_llm.evaluation import charts as charts_module
from moh_llm.evaluation import run_charts as training_module
from moh_llm.evaluation.charts import Axis, heat_map, interval_chart, line_chart
from moh_llm.evaluation.document import Chart
from moh_llm.evaluation.groups import group_runs
from moh_llm.evaluation.markdown import render_markdown
from moh_llm.evaluation.page import render_html
from moh_llm.evaluation.report import build_document
from moh_llm.evaluation.run_charts import running_median, training_charts
from moh_llm.evaluation.runs import read_runs
from moh_llm.records.evaluation import EvaluationRecord

Record = dict[str, Any]


@pytest.fixture(autouse=True)
def pictures() -> None:
    """Charts are rendered here, unless a test takes `unrendered`."""


@pytest.fixture
def evaluation(analysis: Record) -> Record:
    record = make_record({"base": ("dense", 1.0), "one": ("first", 0.9), "two": ("second", 0.8)}).content()
    return record | {"analysis": {"one": analysis, "two": {"error": "out of <memory>"}}}


def to_html(record: Record, groups: Any = (), command: str = "") -> str:
    evaluation = EvaluationRecord.of(record, "") if record else None
    return render_html(build_document(evaluation, groups, command), record)


def text_of(page: str) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", page)).split())


def table_of(link: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(unquote(link.split(",", 1)[1]))))


@pytest.mark.usefixtures("unrendered")
def test_the_page_says_what_the_record_says(evaluation: Record) -> None:
    page = to_html(evaluation, command="moh-llm report a")
    text = text_of(page)
    for label in ("one", "two"):
        assert verdict(EvaluationRecord.of(evaluation, ""), label) in text
    for row in evaluation["benchmarks"]:
        for label, figures in row["scores"].items():
            assert f"{figures['value']:.1f} ± {figures['stderr']:.1f}" in text
            if label != "base":
                delta, share = figures["delta"], figures["recovery"]["share"]
                assert f"{delta['value']:+.1f} ± {delta['stderr']:.1f} {share:.1f} " in text
    links = dict(re.findall(r'download="([^"]+)\.csv" href="([^"]+)"', page))
    head, *rows = table_of(html.unescape(links["deltas"]))
    assert head == ["", "one", "one: from", "one: to", "two", "two: from", "two: to"]
    for cells, row in zip(rows, evaluation["benchmarks"], strict=True):
        limits = []
        for label in ("one", "two"):
            delta = row["scores"][label]["delta"]
            limits += [delta["value"], *delta["interval"]]
        assert [float(cell) for cell in cells[1:]] == limits
    assert evaluation["command"] in text and "moh-llm report a" in text
    assert "NOT ANALYSED: what the heads of two did (out of <memory>)." in text
    link = re.search(r'download="report.json" href="([^"]+)"', page)
    assert link and json.loads(unquote(html.unescape(link[1]).split(",", 1)[1])) == json.loads(json.dumps(evaluation))


@pytest.mark.slow
def test_the_page_needs_nothing_else_and_escapes_what_it_is_given(
    evaluation: Record, make_run: Callable[..., Path]
) -> None:
    evaluation["benchmarks"][0]["name"] = "<script>alert(1)</script>"
    evaluation["errors"] = [{"model": "one", "benchmark": "B", "error": "<img src=x>"}]
    page = to_html(evaluation, group_runs(read_runs([make_run("run")])))
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
def test_limits_and_failures_are_loud(evaluation: Record) -> None:
    assert 'class="warning"' not in to_html(make_record({"base": ("dense", 1.0), "one": ("first", 0.9)}).content())
    evaluation |= {"limit": 20, "partial_data": ["A"]}
    evaluation["errors"] = [{"model": "one", "benchmark": "B", "error": "no\nmemory"}]
    page = to_html(evaluation)
    assert page.count('class="warning"') == 4  # with the failed analysis
    text = text_of(page)
    assert "--limit 20 scored at most 20 item(s)" in text and "only part of the items of A" in text
    assert "FAILED: B on one (no memory)." in text


@pytest.mark.usefixtures("unrendered")
def test_router_charts_hold_the_analysis(evaluation: Record, analysis: Record) -> None:
    page = to_html(evaluation)
    links = dict(re.findall(r'download="([^"]+)\.csv" href="([^"]+)"', page))
    tables = {name: table_of(html.unescape(link)) for name, link in links.items()}
    assert [[float(c) for c in row[1:]] for row in tables["m1-load"][1:]] == analysis["head_load"]["load"]
    by_text = {row[0]: [float(c) for c in row[1:]] for row in tables["m1-texts"][1:]}
    assert by_text == analysis["head_load_by_text"]["load"]
    for text, scores in analysis["routing_scores_by_text"]["texts"].items():
        (row,) = [row for row in tables["m1-scores-texts"] if row[0] == text]
        wanted = [scores[kind]["quantiles"][place] for kind in ("routed", "selected") for place in (2, 1, 3)]
        assert [float(cell) for cell in row[1:]] == wanted  # this router does not score shared heads
    ranks = {row[0]: row[1:] for row in tables["m1-rank"][1:]}
    for layer, (shared, routed) in enumerate(
        zip(analysis["feature_rank"]["shared"], analysis["feature_rank"]["routed"], strict=True)
    ):
        wanted = [shared["energy"] / shared["width"], routed["energy"] / routed["width"]]
        assert [float(cell) for cell in ranks[str(layer)]] == wanted
    assert {int(float(row[0])): float(row[1]) for row in tables["flops-ratio"][1:]} == {
        cost["length"]: cost["moh"] / cost["dense"] for cost in analysis["flops"]
    }
    layers = analysis["routing_scores"]["layers"]
    routed = [layer["routed"]["quantiles"][2] for layer in layers]
    head = tables["m1-scores"][0]
    assert [float(row[head.index("routed")]) for row in tables["m1-scores"][1:]] == routed
    counts = [sum(column) for column in zip(*(layer["routed"]["histogram"] for layer in layers), strict=True)]
    shares = [float(row[tables["m1-histogram"][0].index("routed")]) for row in tables["m1-histogram"][1:]]
    assert shares == pytest.approx([count / sum(counts) for count in counts])
    kinds = re.findall(r'title="head \d+: (on|off|shared)"', page)
    on = analysis["token_heads"]["on"][0]
    assert len(kinds) == sum(map(len, on))
    assert kinds.count("off") == sum(not head for token in on for head in token)
    assert "have all heads on" not in page
    analysis["all_heads_until"] = 1024
    assert "A document's first 1,024 tokens have all heads on, and are counted." in text_of(to_html(evaluation))


@pytest.mark.usefixtures("unrendered")
def test_training_is_shown_with_its_receipt(make_run: Callable[..., Path]) -> None:
    read = {"wiki": {"weight": 0.25, "tokens": 1024, "share": 0.26, "epochs": 0.5, "repeated_tokens": 0}}
    runs = [make_run("a", record={"data_read": read}), make_run("b", scale=0.4, recipe={"lora": {"rank": 4}})]
    page = to_html({}, group_runs(read_runs(runs)))
    text = text_of(page)
    assert "2 training runs" in text and "wiki 25.00% 26.00% 1,024 0.500 0" in text and "LoRA of rank 4" in text
    (link,) = re.findall(r'download="held-out-ratio\.csv" href="([^"]+)"', page)
    head, *rows = table_of(html.unescape(link))
    assert head == ["training tokens", "a", "b"] and [int(row[0]) for row in rows] == [0, 96, 192]
    assert [float(row[1]) for row in rows] == pytest.approx([1.3, 1 + 0.3 / 4, 1 + 0.3 / 7])


def charts_of(*runs: Path) -> dict[str, Chart]:
    return {chart.name: chart for chart in training_charts(group_runs(read_runs(runs)))}


@pytest.mark.slow
@pytest.mark.usefixtures("unrendered")
def test_smoothed_curves_say_so_and_exact_ones_are_not_smoothed(make_run: Callable[..., Path]) -> None:
    def run(name: str, steps: int) -> Path:
        rates = {step: 1e-6 * min(step, 50) for step in range(1, steps + 1)}  # a warm-up of 50 steps
        lines = [{"step": step, "loss": 1 / step, "learning_rate": rate} for step, rate in rates.items()]
        return make_run(name, lines=lines, recipe={"max_steps": steps})

    long, shorter, short = run("long", 10_000), run("shorter", 300), run("short", 5)
    found = charts_of(long)
    rate = found["log-learning_rate"]
    assert rate.note == "" and len(rate.body) < 500
    assert [row[1] for row in rate.body] == [1e-6 * min(row[0] // 32, 50) for row in rate.body]
    assert (rate.body[0][0], rate.body[-1][0]) == (32, 10_000 * 32)
    assert len([row for row in rate.body if row[1] < 5e-5]) >= 2
    loss = found["log-loss"]
    assert loss.note == "Running median of 501 steps; the log has every step."
    assert loss.body[-1][0] == 10_000 * 32
    about = "Running median of about 5 % of the run's steps"
    assert charts_of(long, shorter)["log-loss"].note == f"{about}; the log has every step."
    with_short = charts_of(long, short)["log-loss"]
    assert with_short.note == f"{about} where it has more than 200; the log has every step."
    assert [row[2] for row in with_short.body if row[2] is not None] == [1 / step for step in range(1, 6)]
    assert charts_of(short)["log-loss"].note == ""


@pytest.mark.parametrize("window", [1, 3, 11, 99])
def test_the_running_median_is_one(window: int) -> None:
    draw_one = random.Random(window)
    values = [draw_one.choice([draw_one.random(), 0.5]) for _ in range(60)]
    half = window // 2
    assert running_median(values, window) == [
        statistics.median(values[max(0, index - half) : index + half + 1]) for index in range(60)
    ]


@pytest.fixture
def drawn(unrendered: None, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """What curves were drawn with, by the names of their charts: the y axis and the bands."""
    found: dict[str, dict[str, Any]] = {}
    line = training_module.line_chart

    def note(name: str, title: str, series: Any, x: Axis, y: Axis, *rest: Any, **more: Any) -> Chart:
        found[name] = more | {"y": y}
        return line(name, title, series, x, y, *rest, **more)

    monkeypatch.setattr(training_module, "line_chart", note)
    return found


def test_curves_are_the_logs_numbers(make_run: Callable[..., Path], log_lines: Any, drawn: dict[str, Any]) -> None:
    lines = log_lines(6, 3, 0.3)
    lines[4] |= {"dropped": "the loss is not finite", "loss": None}
    lines[3]["validation"]["kl"] = lines[0]["validation"]["kl"] / 11
    found = charts_of(make_run("run", lines=lines))
    kept = [line for line in lines[1:] if line["step"] != 4]
    assert found["log-kl"].body == [[line["tokens"], line["kl"]] for line in kept]
    assert (found["log-kl"].title, found["log-balance_loss"].title) == ("KL to the base", "Load-balance loss")
    assert (
        drawn["held-out-kl"]["y"].log == 10 and drawn["held-out-ratio"]["y"].log is None
    )  # a wide range, a narrow one


def test_a_group_has_its_mean_and_a_band(make_run: Callable[..., Path], drawn: dict[str, Any]) -> None:
    scales = (0.3, 0.32, 0.37)
    found = charts_of(*(make_run(f"run-s{seed}", seed=seed, scale=scale) for seed, scale in enumerate(scales)))
    chart = found["held-out-kl"]
    assert chart.head == ["training tokens", "run, seed 0", "run, seed 1", "run, seed 2", "run, mean"]
    means = [statistics.mean(scales) / (step + 2) for step in (0, 3, 6)]
    assert [row[-1] for row in chart.body] == pytest.approx(means)
    (band,) = drawn["held-out-kl"]["bands"].values()
    std = statistics.stdev(scales)
    assert band[0] == (0, pytest.approx(means[0] - std / 2), pytest.approx(means[0] + std / 2))


@pytest.mark.usefixtures("unrendered")
def test_router_health_is_the_last_one(make_run: Callable[..., Path], log_lines: Any, routing: Any) -> None:
    lines = log_lines(6, 3, 0.3)
    lines[3]["routing"] = routing([[0.1, 0.2], [0.3], []], None)
    lines[6]["routing"] = routing([[0.0, 1.0], [0.4], []], [0.5, 0.2, 0.0])
    found = charts_of(make_run("run", lines=lines))
    assert found["load-0"].body == [["0", 0.0, 1.0], ["1", 0.4], ["2"]]
    assert "Dead heads, which no token selects: 1." in found["load-0"].note
    assert found["routers-changed"].body == [[0, 0.5], [1, 0.2]]
    assert found["routers-entropy"].body == [[0, 0.9], [1, pytest.approx(0.8)]]


@pytest.mark.usefixtures("unrendered")
def test_a_run_without_a_base_has_its_held_out_curve(make_run: Callable[..., Path]) -> None:
    lines = [
        {"step": step, "validation": {"tokens": 512, "documents": 12, "perplexity": 30.0 - step}} for step in (0, 3, 6)
    ]
    alone, beside = make_run("alone", lines=lines), make_run("beside")
    found = charts_of(beside, alone)
    assert [row[2] for row in found["held-out-perplexity"].body] == [30.0, 27.0, 24.0]
    # A chart names every run, so that a run has one colour on the page.
    assert found["held-out-ratio"].head == found["held-out-perplexity"].head == ["training tokens", "beside", "alone"]
    assert "held-out-perplexity" not in charts_of(beside)


@pytest.mark.usefixtures("unrendered")
def test_the_page_says_of_a_run_what_the_markdown_says(make_run: Callable[..., Path], log_lines: Any) -> None:
    lines = log_lines(4, 3, 0.3)
    lines[2] |= {"dropped": "the loss is not finite", "loss": None}
    one = make_run("one", seed=3, lines=lines, tail='{"step": 5, "lo', record={"status": "running"})
    runs = read_runs([one, make_run("two")])
    page = to_html({}, group_runs(runs))
    text, document = text_of(page), build_document(None, group_runs(runs))
    cells = [cell for line in render_markdown(document).splitlines() if line[:2] == "| " for cell in line.split(" | ")]
    assert len(cells) > 100
    for cell in cells:
        assert html.unescape(cell).strip("|- :").replace("`", "").replace("\\", "") in text
    for part in ("running: not finished", "1 (2: the loss is not finite)", "line was cut short", "seed 3"):
        assert part in text
    assert 'class="warning"' not in page
    other = read_runs([one, make_run("other", record={"data": {"another": {"tokens": 9}}})])
    page = to_html({}, group_runs(other))
    assert page.count('class="warning"') == 1
    assert "not scored on the same held-out text" in text_of(page[: page.index("<figure")])


def test_more_series_than_colours_can_be_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []
    make = charts_module._svg
    monkeypatch.setattr(charts_module, "_svg", lambda figure, *names: drawn.append(figure) or make(figure, *names))
    interval_chart("b", "B", ["p"], {str(number): [(1.0, 0.5, 2.0)] for number in range(20)}, "points")
    marks = [container.lines[0] for container in drawn[0].axes[0].containers]
    looks = {(line.get_marker(), line.get_color(), line.get_markerfacecolor()) for line in marks}
    assert len(marks) == len(looks) == 20
    (bar,) = drawn[0].axes[0].containers[0].lines[2][0].get_segments()
    assert bar[:, 0].tolist() == [0.5, 2.0]


def test_charts_give_their_data_and_no_fixed_colour() -> None:
    charts = [
        line_chart("a", "A & <b>", {"x": [(1, 2.0), (4, 3.0)], "y": [(4, 1.0)]}, Axis("n", log=2), Axis("v")),
        interval_chart("b", "B", ["p", "q", "r"], {"x": [(1.0, 0.5, 1.75), None, (2.0, None, None)]}, "points"),
        heat_map("c", "C", ["0", "1"], ["0", "1"], [[0.5, 1.0], [0.25]], ("head", "layer"), "share"),
    ]
    assert charts[0].body == [[1, 2.0, None], [4, 3.0, 1.0]]
    assert charts[1].head == ["", "x", "x: from", "x: to"]
    assert charts[1].body == [["p", 1.0, 0.5, 1.75], ["q", None, None, None], ["r", 2.0, None, None]]
    assert charts[2].body == [["0", 0.5, 1.0], ["1", 0.25]]
    for chart in charts:
        assert chart.svg.startswith("<svg") and chart.svg.rstrip().endswith("</svg>")
        assert "var(--ink)" in chart.svg and "#0a0" not in chart.svg and "<b>" not in chart.svg
    # The same chart twice is the same text, so that pages can be compared.
    again = heat_map("c", "C", ["0", "1"], ["0", "1"], [[0.5, 1.0], [0.25]], ("head", "layer"), "share")
    assert again.svg == charts[2].svg
