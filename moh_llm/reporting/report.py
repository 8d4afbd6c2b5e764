"""The report of evaluations and training runs: one HTML file, and the same in Markdown and JSON.

Needs matplotlib.
"""

import datetime
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from moh_llm import __version__
from moh_llm.evaluation.markdown import to_markdown as evaluation_markdown
from moh_llm.files import write_json, write_text
from moh_llm.reporting.groups import Group, compare, differences, group_runs, reference_words, same_held_out_text
from moh_llm.reporting.page import to_markdown
from moh_llm.reporting.runs import Record, TrainingRun, summarise
from moh_llm.reporting.web.page import to_html


def write_report(folder: Path, runs: Sequence[TrainingRun], command: str, evaluation: Record | None = None) -> None:
    """Write ``report.html``, ``report.md`` and ``report.json`` into ``folder``.

    Args:
        folder: an empty one.
        runs: what `read_runs` returned; may be empty where there is an evaluation.
        command: the line that repeats the report.
        evaluation: a record made by `build_report` or `merge`. Then ``report.json`` holds it, with what
            there is of the runs under ``training``.
    """
    evaluation = evaluation and _with_samples_here(evaluation, folder)
    groups = group_runs(runs) if runs else []
    training = training_record(runs, groups, command) if runs else None
    pages = [evaluation_markdown(evaluation)] if evaluation else []
    pages += [to_markdown(training)] if training else []
    write_text(folder / "report.md", "\n".join(pages))
    record = evaluation | {"training": training} if evaluation else training
    write_json(folder / "report.json", record)
    write_text(folder / "report.html", to_html(record, groups, command))


def training_record(runs: Sequence[TrainingRun], groups: Sequence[Group], command: str) -> Record:
    """The record of some runs' figures, in their groups."""
    return {
        "runs": [summarise(run) for run in runs],
        "groups": [
            {"name": group.name, "runs": [run.name for run in group.runs], "seeds": [run.seed for run in group.runs]}
            for group in groups
        ],
        "differences": differences(groups),
        "reference": reference_words(groups)[0],
        "same_held_out_text": same_held_out_text(runs),
        "comparison": compare(groups),
        "versions": {"moh_llm": __version__, "matplotlib": version("matplotlib")},
        "command": command,
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def _with_samples_here(evaluation: Record, folder: Path) -> Record:
    """An evaluation that names only those logs of items that lie in ``folder``; one that is told again has none."""
    rows = []
    for row in evaluation["benchmarks"]:
        scored = {label: row[label] for label in evaluation["models"] if label in row}
        for label, figures in scored.items():
            if "samples" in figures and not (folder / figures["samples"]).is_file():
                scored[label] = {key: value for key, value in figures.items() if key != "samples"}
        rows.append(row | scored)
    return evaluation | {"benchmarks": rows}
