"""Pages of results show what their records hold, and a measurement that differs from its record is found."""

import json
import os
import re
import shutil
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import results


def one(value: float, pattern: str = r"KL ([\d.]+)", command: str = "print('KL', 0.125)", **more: object) -> list[dict]:
    figure = {"figure": "KL", "pattern": pattern, "value": value, "tolerance": 0.005}
    return [{"page": "a", "needs": [], "commands": [f'python -c "{command}"'], "figures": [figure | more]}]


def test_a_figure_that_differs_is_one_line(capsys):
    assert results.check(one(0.13), {}) == []
    assert "a, KL: 0.125, 0.13 +- 0.005 in the record" in capsys.readouterr().out
    (fault,) = results.check(one(0.131, slice="two documents"), {})
    assert fault == "differs: a, KL (two documents): 0.125, 0.131 +- 0.005 in the record"


def test_what_is_not_given_is_left_out(capsys):
    (run,) = one(9)
    run["needs"] = ["BASE", "CORPORA"]
    assert results.check([run], {"CORPORA": "there"}) == []
    assert "a: not checked, BASE not given" in capsys.readouterr().out


def test_a_command_that_fails_or_says_nothing_is_a_line_among_others():
    runs = one(9) + one(1, command="raise ValueError('no')") + one(1, pattern="ratio (.)") + one(8)
    first, failed, silent, last = results.check(runs, {})
    assert first.startswith("differs: a") and last.startswith("differs: a")
    assert failed.startswith("error: a: python -c") and failed.endswith("status 1: ValueError: no")
    assert silent.startswith("error: a, KL: not in what the commands print")


@pytest.mark.parametrize("page", results.PAGES)
def test_a_page_is_its_record(page):
    record, path = results.record(page), results.path_of(page)
    text = path.read_text()
    assert results.rewritten(page, text) == text, f"the tables are stale: make results PAGE={page}"
    if "picture" in record:
        file = results.RESULTS / "data" / f"{page}.svg"
        drawn = ElementTree.parse(file).getroot()
        assert drawn.get("data-figures") == results.digest(page), f"the picture is stale: make results PAGE={page}"
        assert f"]({os.path.relpath(file, path.parent)})" in text and "…" not in file.read_text()
    assert all(len(one.get("rows", [])) <= 10 for one in record.get("blocks", [record.get("table")]))
    # A page that sums up takes its figures from the others.
    pages = [page] if record["sections"] else results.PAGES
    records = [results.shown(of, json.dumps(results.record(of), ensure_ascii=False)) for of in pages]
    known = set(re.findall(r"\d+\.\d+", " ".join(records)))
    assert "path" in record or set(re.findall(r"\d+\.\d+", text)) <= known, "a figure of the page is in no record"


def test_readme_has_figures_in_its_blocks_alone():
    """What the record writes is checked above; a figure between these blocks would go stale unseen."""
    text = results.path_of("front").read_text()
    block = f"{re.escape(results.BEGIN)}.*?{re.escape(results.END)}"
    assert len(re.findall(block, text, re.DOTALL)) == len(results.record("front")["blocks"]) == 4
    prose = re.sub(rf"{block}|```.*?```|`[^`]*`|\]\([^)]*\)", "", text, flags=re.DOTALL)
    prose = re.sub(r"(Python|LLaMA 1 to|Qwen|Licence: Apache-) ?[\d.]+", "", prose)
    assert re.findall(r"\d+\.\d+|\d+ ?%(?! intervals)", prose) == []


def test_every_page_has_a_record_and_every_check_can_find_its_figure():
    pages = {path.stem: path.read_text() for path in results.RESULTS.glob("*.md")}
    assert pages.keys() == {page for page in results.PAGES if "path" not in results.record(page)}
    lines = [text.count("\n") for text in pages.values()]
    assert max(lines) <= 55 and sum(lines) <= 500
    found = [run for page in results.PAGES for run in results.checks(page)]
    assert len(found) >= 12
    for run in found:
        assert run["commands"] and run["figures"]
        for figure in run["figures"]:
            assert re.compile(figure["pattern"]).groups == 1 and 0 < figure["tolerance"] < figure["value"]
            assert ("cell" in figure) != ("slice" in figure)


def test_a_changed_figure_makes_page_and_picture_stale(monkeypatch):
    text, drawn = (results.RESULTS / "rivals.md").read_text(), results.digest("rivals")
    changed = json.loads(json.dumps(results.record("rivals")).replace("83.3 (", "83.4 ("))
    monkeypatch.setattr(results, "record", lambda page: changed)
    assert results.digest("rivals") != drawn
    assert results.rewritten("rivals", text) == text.replace("83.3 (", "83.4 (")


def test_a_picture_stands_alone():
    for page in ("retrieval", "speed"):
        drawn = results.picture(page)
        assert ElementTree.fromstring(drawn).tag.endswith("svg") and "var(" not in drawn and "#0072b2" in drawn


def test_the_command_writes_a_page_and_its_picture_as_svg_and_png(tmp_path, monkeypatch, capsys):
    copied = shutil.copytree(results.RESULTS, tmp_path / "docs" / "results", ignore=shutil.ignore_patterns("*.svg"))
    monkeypatch.setattr(results, "RESULTS", copied)
    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["results.py", "rivals"])
    (copied / "rivals.md").write_text(f"{results.BEGIN}\n{results.END}\n")
    assert results.main() == 0
    assert "| heads | MoH, untrained |" in (copied / "rivals.md").read_text()
    assert results.digest("rivals") in (copied / "data" / "rivals.svg").read_text()
    assert (copied / "data" / "rivals.png").read_bytes().startswith(b"\x89PNG")
    assert "benchmarks/long_context.py" in capsys.readouterr().out
