"""The HTML page holds the record's figures, asks nothing of the network, and escapes what it is given."""

import csv
import html
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from records import make_record

from moh_llm.evaluation.verdict import verdict
from moh_llm.reporting.groups import group_runs
from moh_llm.reporting.runs import read_runs
from moh_llm.reporting.web.charts import Axis, heat_map, interval_chart, line_chart
from moh_llm.reporting.web.page import to_html

Record = dict[str, Any]


@pytest.fixture
def evaluation(analysis: Record) -> Record:
    record = make_record({"base": ("dense", 1.0), "one": ("first", 0.9), "two": ("second", 0.8)})
    return record | {"analysis": {"one": analysis, "two": {"error": "out of <memory>"}}}


def text_of(page: str) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", page)).split())


def table_of(link: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(unquote(link.split(",", 1)[1]))))


def test_the_page_says_what_the_record_says(evaluation: Record) -> None:
    page = to_html(evaluation, command="moh-llm report a")
    text = text_of(page)
    for label in ("one", "two"):
        assert verdict(evaluation, label) in text
    for row in evaluation["benchmarks"]:
        for label in evaluation["models"]:
            assert f"{row[label]['value']:.1f} ± {row[label]['stderr']:.1f}" in text
        for label in ("one", "two"):
            assert f"{row[label]['delta']['value']:+.1f} ± {row[label]['delta']['stderr']:.1f}" in text
            assert f"{row[label]['recovery']:.1f} %" in text
    assert evaluation["command"] in text and "moh-llm report a" in text
    assert "NOT ANALYSED: what the heads of two did (out of <memory>)." in text
    link = re.search(r'download="report.json" href="([^"]+)"', page)
    assert link and json.loads(unquote(html.unescape(link[1]).split(",", 1)[1])) == json.loads(json.dumps(evaluation))


def test_the_page_needs_nothing_else(evaluation: Record, make_run: Callable[..., Path]) -> None:
    page = to_html(evaluation, group_runs(read_runs([make_run("run")])))
    assert "<script" not in page and "@import" not in page
    outside = {place for place in re.findall(r'(?:href|src)="([^"]+)"', page) if not place.startswith(("#", "data:"))}
    assert not outside
    identities = re.findall(r'\bid="([^"]+)"', page)
    assert len(identities) == len(set(identities))
    assert {place[1:] for place in re.findall(r'href="(#[^"]+)"', page)} <= set(identities)
    assert {place for place in re.findall(r"url\(#([^)]+)\)", page)} <= set(identities)
    assert "#0a0" not in page  # colours are the theme's
    assert len(page) < 1_000_000


def test_names_and_errors_are_escaped(evaluation: Record) -> None:
    evaluation["benchmarks"][0]["name"] = "<script>alert(1)</script>"
    evaluation["errors"] = [{"model": "one", "benchmark": "B", "error": "<img src=x>"}]
    page = to_html(evaluation)
    assert "<script" not in page and "<img" not in page
    assert "<td>&lt;</td>" in page  # a token of the sentence


def test_limits_and_failures_are_loud(evaluation: Record) -> None:
    assert 'class="warning"' not in to_html(make_record({"base": ("dense", 1.0), "one": ("first", 0.9)}))
    evaluation |= {"limit": 20, "partial_data": ["A"]}
    evaluation["errors"] = [{"model": "one", "benchmark": "B", "error": "no\nmemory"}]
    page = to_html(evaluation)
    assert page.count('class="warning"') == 4  # with the failed analysis
    text = text_of(page)
    assert "--limit 20 scored at most 20 item(s)" in text and "only part of the items of A" in text
    assert "FAILED: B on one (no memory)." in text


def test_router_charts_hold_the_analysis(evaluation: Record, analysis: Record) -> None:
    page = to_html(evaluation)
    links = dict(re.findall(r'download="([^"]+)\.csv" href="([^"]+)"', page))
    tables = {name: table_of(html.unescape(link)) for name, link in links.items()}
    assert [[float(c) for c in row[1:]] for row in tables["m1-load"][1:]] == analysis["head_load"]["load"]
    by_text = {row[0]: [float(c) for c in row[1:]] for row in tables["m1-texts"][1:]}
    assert by_text == analysis["head_load_by_text"]["load"]
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


def test_training_is_shown_with_its_receipt(make_run: Callable[..., Path]) -> None:
    read = {"wiki": {"weight": 0.25, "tokens": 1024, "share": 0.26, "epochs": 0.5, "repeated_tokens": 0}}
    runs = [make_run("a", record={"data_read": read}), make_run("b", scale=0.4, recipe={"lora": {"rank": 4}})]
    page = to_html(None, group_runs(read_runs(runs)))
    text = text_of(page)
    assert "2 training runs" in text and "wiki 0.2500 1,024 0.2600 0.5000 0" in text and "LoRA of rank 4" in text
    (link,) = re.findall(r'download="held-out-ratio\.csv" href="([^"]+)"', page)
    head, *rows = table_of(html.unescape(link))
    assert head == ["training tokens", "a", "b"] and [int(row[0]) for row in rows] == [0, 96, 192]
    assert [float(row[1]) for row in rows] == pytest.approx([1.3, 1 + 0.3 / 4, 1 + 0.3 / 7])


def test_charts_give_their_data_and_no_fixed_colour() -> None:
    charts = [
        line_chart("a", "A & <b>", {"x": [(1, 2.0), (4, 3.0)], "y": [(4, 1.0)]}, Axis("n", log=2), Axis("v")),
        interval_chart("b", "B", ["p", "q"], {"x": [(1.0, 0.5), None]}, "points", zero=True),
        heat_map("c", "C", ["0", "1"], ["0", "1"], [[0.5, 1.0], [0.25]], ("head", "layer"), "share"),
    ]
    assert charts[0].body == [[1, 2.0, None], [4, 3.0, 1.0]]
    assert charts[1].body == [["p", 1.0, 0.5], ["q", None, None]]
    assert charts[2].body == [["0", 0.5, 1.0], ["1", 0.25]]
    for chart in charts:
        assert chart.svg.startswith("<svg") and chart.svg.rstrip().endswith("</svg>")
        assert "var(--ink)" in chart.svg and "#0a0" not in chart.svg and "<b>" not in chart.svg
    # The same chart twice is the same text, so that pages can be compared.
    again = heat_map("c", "C", ["0", "1"], ["0", "1"], [[0.5, 1.0], [0.25]], ("head", "layer"), "share")
    assert again.svg == charts[2].svg
