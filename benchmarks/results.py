"""Tables and pictures of docs/results from their records, and a small part of the figures measured again.

    make results PAGE=speed          # writes a page's table and picture, and prints the commands that measured it
    make results                     # writes those of all pages
    make results-check BASE=DIR ...  # measures what all records have to check, and compares

The picture is SVG, and PNG, which git ignores. `docs/results/data/PAGE.json` is a page's record. `path` names the page
where it is not docs/results/PAGE.md. `blocks` takes the place of `table` where a page has several: tables, and `lines`
of text. In these and in `picture`, {SECTION/TABLE/ROW/COLUMN} stands for a cell of `sections`, {PAGE:SECTION/...} for
one of another record. `check` has runs with these keys:

- needs: variables that the commands read. BASE is the SmolLM2-135M of the quick start, STORIES stories260K, CORPORA a
  folder per source (data_mixtures/paper_local.yaml), BENCHMARKS data of benchmarks (evaluate --data-dir), VISION what
  `benchmarks/vision_data.py` writes. Without them the run is named and left out.
- commands: run in the repository's root, one after the other; $WORK is an empty folder.
- figures: `pattern`, a regular expression, finds the figure in what they print, as its one group. It must be `value`,
  or the first number of `cell`, within `tolerance`. `slice` says of which documents a `value` is.
"""

import argparse
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from moh_llm.errors import UserError
from moh_llm.evaluation import charts
from moh_llm.files import write_text
from moh_llm.reading import read_json

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
PAGES = sorted(path.stem for path in (RESULTS / "data").glob("*.json"))
BEGIN, END = "<!-- table: make results -->", "<!-- end of table -->"
STYLE = ROOT / "moh_llm" / "evaluation" / "templates" / "style.css"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", nargs="?", choices=PAGES, help="of docs/results (default: all)")
    parser.add_argument("--check", action="store_true", help="measure again what the records' checks name")
    args = parser.parse_args()
    pages = [args.page] if args.page else PAGES
    if args.check:
        faults = check([one for page in pages for one in checks(page)], os.environ)
        print("\n".join(faults), file=sys.stderr)
        return int(bool(faults))
    for page in pages:
        path = path_of(page)
        write_text(path, rewritten(page, path.read_text()))
        if "picture" in record(page):
            write_text(RESULTS / "data" / f"{page}.svg", picture(page))
            (RESULTS / "data" / f"{page}.png").write_bytes(chart(page).png)
    for section in record(args.page)["sections"].values() if args.page else ():
        if section.get("commands"):
            where = ", ".join(section[name] for name in ("machine", "date") if name in section)
            print(f"# {section['title']}{where and f': {where}'}", *section["commands"], "", sep="\n")
    return 0


@cache
def record(page: str) -> dict[str, Any]:
    return read_json(RESULTS / "data" / f"{page}.json")


def path_of(page: str) -> Path:
    """The file that shows the record."""
    return ROOT / record(page).get("path", f"docs/results/{page}.md")


def shown(page: str, text: str) -> str:
    """A text of a record with the figures that it refers to."""

    def figure(found: re.Match[str]) -> str:
        table, row, column = found["at"].split("/", 2)
        of = record(found["page"] or page)["sections"][found["section"]]["tables"][int(table)]
        return of["rows"][int(row)][of["columns"].index(column)]

    return re.sub(r"\{(?:(?P<page>\w+):)?(?P<section>\w+)/(?P<at>\d+/\d+/[^{}]+)\}", figure, text)


def rewritten(page: str, text: str) -> str:
    """The page with its tables, and its other blocks, as the record has them."""
    blocks = iter([block(page, one) for one in record(page).get("blocks", [record(page).get("table")])])
    pattern = re.compile(f"{re.escape(BEGIN)}\n.*?{re.escape(END)}", re.DOTALL)
    try:
        written = pattern.sub(lambda _: f"{BEGIN}\n{next(blocks)}{END}", text)
    except StopIteration:
        raise SystemExit(f"{path_of(page)} has more places for tables than its record has tables") from None
    if next(blocks, None) is not None:
        raise SystemExit(f"{path_of(page)} has no place for a table: write {BEGIN} and {END} there")
    return written


def block(page: str, one: Mapping[str, Any]) -> str:
    """A table, or lines of text, in Markdown."""
    rows = [one["columns"], ["---"] * len(one["columns"]), *one["rows"]] if "rows" in one else []
    lines = [f"| {' | '.join(row)} |" for row in rows] or one["lines"]
    return "".join(f"{shown(page, line)}\n" for line in lines)


def numbers(page: str, text: str) -> list[float]:
    """The figure of a cell, and the ends of its interval if it has one."""
    return [float(found.replace(",", "")) for found in re.findall(r"[-+]?\d[\d,]*(?:\.\d+)?", shown(page, text))]


def digest(page: str) -> str:
    """Identifies the figures of a picture, whichever matplotlib draws them."""
    figures = shown(page, json.dumps(record(page)["picture"], ensure_ascii=False))
    return hashlib.sha256(figures.encode()).hexdigest()[:16]


def chart(page: str) -> charts.Chart:
    """The record's picture."""
    of = record(page)["picture"]
    if "x" in of:
        series = {
            name: [tuple(numbers(page, at)[0] for at in point) for point in points]
            for name, points in of["series"].items()
        }
        axes = charts.Axis(of["x"], of.get("log_x")), charts.Axis(of["y"], of.get("log_y"))
        return charts.LineChart(page, of["title"], "", series, *axes, of.get("reference"))
    rows = {name: [at and (*numbers(page, at), None, None)[:3] for at in cells] for name, cells in of["series"].items()}
    return charts.IntervalChart(page, of["title"], "", of["names"], rows, of["unit"], list(rows))


def picture(page: str) -> str:
    """The record's picture as an SVG file."""
    drawn = str(chart(page).svg)
    for name, colour in re.findall(r"(--[\w-]+): (#\w+)", STYLE.read_text().partition("@media")[0]):
        drawn = drawn.replace(f"var({name})", colour)
    opening = '<svg xmlns="http://www.w3.org/2000/svg" width="720" style="background: white"'
    return drawn.replace("<svg", f'{opening} data-figures="{digest(page)}"', 1)


def checks(page: str) -> list[dict[str, Any]]:
    """The record's runs, each with its page, and the figures that refer to a cell with its value."""
    runs = [{"page": page} | run for run in record(page).get("check", [])]
    for run in runs:
        run["figures"] = [
            one | ({"value": numbers(page, one["cell"])[0]} if "cell" in one else {}) for one in run["figures"]
        ]
    return runs


def check(runs: list[dict[str, Any]], variables: Mapping[str, str]) -> list[str]:
    """Carry out what can be; returns a line for each figure that differs, and each run that fails."""
    faults = []
    for number, run in enumerate(runs, start=1):
        page = run["page"]
        if missing := [name for name in run["needs"] if not variables.get(name)]:
            print(f"[{number}/{len(runs)}] {page}: not checked, {', '.join(missing)} not given", flush=True)
            continue
        print(f"[{number}/{len(runs)}] {page} ...", flush=True)
        try:
            printed = carry_out(run["commands"], variables)
        except UserError as error:
            faults.append(f"error: {page}: {error}")
            continue
        for figure in run["figures"]:
            found = re.search(figure["pattern"], printed)
            if not found:
                faults.append(f"error: {page}, {figure['figure']}: not in what the commands print")
                continue
            value, wanted, tolerance = float(found[1]), figure["value"], figure["tolerance"]
            of = f" ({figure['slice']})" if "slice" in figure else ""
            line = f"{page}, {figure['figure']}{of}: {value:g}, {wanted:g} +- {tolerance:g} in the record"
            if abs(value - wanted) > tolerance * (1 + 1e-9):
                faults.append(f"differs: {line}")
            else:
                print(f"  {line}", flush=True)
    return faults


def carry_out(commands: list[str], variables: Mapping[str, str]) -> str:
    """What the commands print. Raises UserError with the end of the errors of one that fails."""
    printed = []
    with tempfile.TemporaryDirectory() as work:
        values = {**variables, "WORK": work}
        for command in commands:
            words = [re.sub(r"\$(\w+)", lambda name: values[name[1]], word) for word in shlex.split(command)]
            words = [sys.executable if word == "python" else word for word in words]
            done = subprocess.run(words, cwd=ROOT, env={**os.environ, **values}, capture_output=True, text=True)
            if done.returncode:
                last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
                raise UserError(f"{command} ended with status {done.returncode}: {''.join(last)}")
            printed.append(done.stdout)
    return "\n".join(printed)


if __name__ == "__main__":
    sys.exit(main())
