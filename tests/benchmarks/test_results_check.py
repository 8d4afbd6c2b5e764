"""The check of measured tables: what it finds, what it leaves out, and that figures of no slice are on their pages."""

import sys
from pathlib import Path

from moh_llm.reading import read_yaml

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import results_check

FOLDER = results_check.CHECKS.parent


def one(value: float, pattern: str = r"KL ([\d.]+)", command: str = "print('KL', 0.125)", **more: object) -> list[dict]:
    figure = {"page": "a.md", "figure": "KL", "pattern": pattern, "value": value, "tolerance": 0.005}
    return [{"needs": [], "commands": [f'python -c "{command}"'], "figures": [figure | more]}]


def test_a_figure_that_differs_is_one_line(capsys):
    assert results_check.check(one(0.13), {}) == []
    assert "a.md, KL: 0.125, 0.13 +- 0.005 in the table" in capsys.readouterr().out
    (fault,) = results_check.check(one(0.131, slice="two documents"), {})
    assert fault == "differs: a.md, KL (two documents): 0.125, 0.131 +- 0.005 in the table"


def test_what_is_not_given_is_left_out(capsys):
    (run,) = one(9)
    run["needs"] = ["BASE", "CORPORA"]
    assert results_check.check([run], {"CORPORA": "there"}) == []
    assert "a.md: not checked, BASE not given" in capsys.readouterr().out


def test_a_command_that_fails_or_says_nothing_is_a_line_among_others():
    runs = one(9) + one(1, command="raise ValueError('no')") + one(1, pattern="ratio (.)") + one(8)
    first, failed, silent, last = results_check.check(runs, {})
    assert first.startswith("differs: a.md") and last.startswith("differs: a.md")
    assert failed.startswith("error: a.md: python -c") and failed.endswith("status 1: ValueError: no")
    assert silent.startswith("error: a.md, KL: not in what the commands print")


def test_figures_are_those_of_the_pages_and_every_page_has_one():
    pages = {path.name: path.read_text() for path in FOLDER.glob("*.md")}
    checked = set()
    for run in read_yaml(results_check.CHECKS):
        assert run["commands"] and run["figures"]
        for figure in run["figures"]:
            checked.add(figure["page"])
            assert (FOLDER / figure["page"]).is_file()
            assert "slice" in figure or f"{figure['value']:.3f}" in pages[figure["page"]], figure
            assert 0 < figure["tolerance"] < figure["value"]
    assert checked == {*pages, "../recovery.md", "../../README.md"}
