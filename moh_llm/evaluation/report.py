"""The report of evaluations and training runs: `report.html` and `report.md`, and `report.json` with all figures.

`report_content` states each figure once, as a sentence or a table; the two templates in `templates/` lay it out, and
the HTML page has charts, too.
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
from moh_llm.evaluation import run_tables, tables
from moh_llm.evaluation.rendering import html_templates, markdown_templates
from moh_llm.evaluation.report_charts import cost_charts, router_charts, score_charts, training_charts
from moh_llm.evaluation.runs import (
    Group,
    Record,
    TrainingRun,
    compare_groups,
    differences,
    group_runs,
    same_held_out_text,
)
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
    of_runs = training_record(groups, command) if runs else None
    if evaluation and of_runs:
        evaluation.training = of_runs
    record = evaluation.content() if evaluation else of_runs
    content = report_content(evaluation, groups, command)
    write_text(folder / "report.md", render_markdown(content))
    write_json(folder / "report.json", record)
    write_text(folder / "report.html", render_html(content, report_charts(evaluation, groups), record))


def render_markdown(content: Record) -> str:
    """The page in Markdown."""
    return markdown_templates("moh_llm.evaluation").get_template("report.md").render(content).rstrip() + "\n"


def render_html(content: Record, charts: Record, record: Any) -> str:
    """The page as one HTML file without scripts and requests, with ``record`` to download."""
    link = "data:application/json;charset=utf-8," + quote(json.dumps(record, separators=(",", ":")))
    return html_templates().get_template("report.html").render(content, charts=charts, json_link=link)


def report_content(evaluation: EvaluationRecord | None, groups: Sequence[Group] = (), command: str = "") -> Record:
    """The values of both templates: title, warnings and verdicts, the parts `evaluation` and `training`, the command.

    A part is None if the report has none. Models whose analysis failed are left out of `evaluation.models_analysed`.
    """
    runs = [run for group in groups for run in group.runs]
    title = f"Training run {runs[0].name}" if len(runs) == 1 else f"{len(runs)} training runs"
    labels = (evaluation.compared_models or list(evaluation.models)) if evaluation else []
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return {
        "title": evaluation.suite.title if evaluation else title,
        "warnings": warnings(evaluation) if evaluation else [],
        "verdicts": [verdict(evaluation, label) for label in labels],
        "evaluation": _evaluation_content(evaluation) if evaluation else None,
        "training": _training_content(groups, runs) if runs else None,
        "about": f"Made by moh_llm {__version__} with matplotlib {version('matplotlib')}, {now}.",
        "command": "" if evaluation and command == evaluation.command else command,
    }


def _evaluation_content(evaluation: EvaluationRecord) -> Record:
    analyses = _analyses(evaluation)
    long_context = {
        label: tables.long_context_tables(about.by_position, about.retrieval)
        for label, about in evaluation.models.items()
    }
    return {
        "scores": tables.score_table(evaluation),
        "note": tables.score_note(evaluation),
        "inferred": tables.inferred_metrics(evaluation),
        "long_context": {label: shown for label, shown in long_context.items() if shown},
        "heads": tables.head_table(analyses),
        "models_analysed": {
            label: {
                "similarity": tables.similarity_table(found["similarity"]),
                "layer": found["token_heads"]["layers"][-1],
                "tokens": tables.token_table(found),
            }
            for label, found in analyses.items()
        },
        "models": tables.model_table(evaluation),
        "settings": tables.settings_table(evaluation),
        "command": evaluation.command,
    }


def _training_content(groups: Sequence[Group], runs: Sequence[TrainingRun]) -> Record:
    content: Record = {
        "groups": None,
        "runs": [
            {
                "name": run.name,
                "facts": run_tables.run_table(run),
                "held_out": run_tables.held_out_table(run),
                "note": run_tables.held_out_note(run),
                "receipt": run_tables.receipt(run),
            }
            for run in runs
        ],
    }
    if len(runs) > 1:
        comparison = run_tables.comparison_table(groups)
        columns = "The columns after the seeds are the options that differ, without those that change no curve."
        about = columns if differences(groups) else "The groups have the same recipe, model, text and seed."
        other_text = "The runs were not scored on the same held-out text: compare only ratios, and with care."
        none = "No two runs have a score at the same number of tokens."
        content |= {
            "groups": run_tables.group_table(groups),
            "about_groups": about if len(groups) > 1 else "",
            "other_text": "" if same_held_out_text(groups) else other_text,
            "comparison": comparison,
            "comparison_note": run_tables.comparison_note(groups) if comparison else none,
        }
    return content


def report_charts(evaluation: EvaluationRecord | None, groups: Sequence[Group] = ()) -> Record:
    """The charts of the HTML page by section; those of routers by model."""
    analyses = _analyses(evaluation) if evaluation else {}
    return {
        "scores": score_charts(evaluation) if evaluation else [],
        "training": training_charts(groups) if groups else [],
        "costs": cost_charts(analyses, list(evaluation.models)) if evaluation else [],
        "routers": {label: router_charts(number, found) for number, (label, found) in enumerate(analyses.items(), 1)},
    }


def training_record(groups: Sequence[Group], command: str) -> Record:
    """The figures of training runs and their groups; `run.json` of each run has its recipe."""
    return {
        "runs": [run.figures() for group in groups for run in group.runs],
        "groups": {group.name: [run.name for run in group.runs] for group in groups},
        "differences": differences(groups),
        "comparison": compare_groups(groups),
        "command": command,
    }


def _analyses(evaluation: EvaluationRecord) -> dict[str, Record]:
    """The head analyses that did not fail, by label."""
    return {label: found for label, found in evaluation.analysis.items() if "error" not in found}
