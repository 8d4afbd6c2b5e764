"""The report of evaluations and training runs: `report.html` and `report.md`, and `report.json` with all figures.

The two templates in `templates/` lay out the pages. They take their tables from `tables` and `run_tables`, and the HTML
page its charts from `report_charts`.
"""

import datetime
import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import quote

from moh_llm import __version__
from moh_llm.claims.evaluation import verdict, warnings
from moh_llm.evaluation import report_charts, run_tables, tables
from moh_llm.evaluation.rendering import html_templates, markdown_templates
from moh_llm.evaluation.runs import Group, TrainingRun, compare_groups, differences, group_runs
from moh_llm.files import write_json, write_text
from moh_llm.records.evaluation import EvaluationRecord


def write_report(
    folder: Path, runs: Sequence[TrainingRun], command: str, evaluation: EvaluationRecord | None = None
) -> None:
    """Write ``report.html``, ``report.md`` and ``report.json`` into ``folder``.

    Args:
        folder: an empty folder.
        runs: training runs; may be empty if there is an evaluation.
        command: the line that repeats the report.
        evaluation: an evaluation, or several that `merge` put side by side. Then ``report.json`` is its record, with
            the figures of the runs under ``training``.
    """
    groups = group_runs(runs)
    of_runs = {
        "runs": [run.figures() for run in runs],
        "groups": {group.name: [run.name for run in group.runs] for group in groups},
        "differences": differences(groups),
        "comparison": compare_groups(groups),
        "command": command,
    }
    if evaluation and runs:
        evaluation.training = of_runs
    record = evaluation.content() if evaluation else of_runs
    write_text(folder / "report.md", render_markdown(evaluation, groups, command))
    write_json(folder / "report.json", record)
    write_text(folder / "report.html", render_html(evaluation, groups, command, record))


def render_markdown(evaluation: EvaluationRecord | None, groups: Sequence[Group] = (), command: str = "") -> str:
    """The page in Markdown, without charts."""
    template = markdown_templates("moh_llm.evaluation").get_template("report.md")
    return template.render(_values(evaluation, groups, command)).rstrip() + "\n"


def render_html(evaluation: EvaluationRecord | None, groups: Sequence[Group], command: str, record: Any) -> str:
    """The page as one HTML file, without scripts and requests, with ``record`` to download."""
    link = "data:application/json;charset=utf-8," + quote(json.dumps(record, separators=(",", ":")))
    template = html_templates().get_template("report.html")
    return template.render(_values(evaluation, groups, command), charts=report_charts, json_link=link)


def _values(evaluation: EvaluationRecord | None, groups: Sequence[Group], command: str) -> dict[str, Any]:
    runs = [run for group in groups for run in group.runs]
    title = f"Training run {runs[0].name}" if len(runs) == 1 else f"{len(runs)} training runs"
    labels = (evaluation.compared_models or list(evaluation.models)) if evaluation else []
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return {
        "title": evaluation.suite.title if evaluation else title,
        "warnings": warnings(evaluation) if evaluation else [],
        "verdicts": [verdict(evaluation, label) for label in labels],
        "evaluation": evaluation,
        "analyses": evaluation.analyses if evaluation else {},
        "groups": groups,
        "runs": runs,
        "command": "" if evaluation and command == evaluation.command else command,
        "about": f"Made by moh_llm {__version__} with matplotlib {version('matplotlib')}, {now}.",
        "tables": tables,
        "run_tables": run_tables,
    }
