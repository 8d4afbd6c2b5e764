"""The report of evaluations and training runs: one document, written as an HTML file and as Markdown, and its record.

Needs matplotlib.
"""

import datetime
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from moh_llm import __version__
from moh_llm.evaluation import run_tables, tables
from moh_llm.evaluation.document import Block, Charts, Commands, Document, Heading, Paragraph, Section, facts
from moh_llm.evaluation.groups import Group, compare, differences, group_runs, reference_words, same_held_out_text
from moh_llm.evaluation.markdown import render_markdown
from moh_llm.evaluation.page import render_html
from moh_llm.evaluation.router_charts import router_blocks
from moh_llm.evaluation.run_charts import training_charts
from moh_llm.evaluation.runs import Record, TrainingRun, summarise
from moh_llm.evaluation.score_charts import cost_charts, head_table, score_charts
from moh_llm.evaluation.tables import long_context_tables
from moh_llm.files import write_json, write_text
from moh_llm.records.evaluation import EvaluationRecord


def write_report(
    folder: Path, runs: Sequence[TrainingRun], command: str, evaluation: EvaluationRecord | None = None
) -> None:
    """Write ``report.html``, ``report.md`` and ``report.json`` into ``folder``.

    Args:
        folder: an empty one.
        runs: what `read_runs` returned; may be empty where there is an evaluation.
        command: the line that repeats the report.
        evaluation: a record made by `build_record` or `merge`. Then ``report.json`` holds it, with what
            there is of the runs under ``training``.
    """
    groups = group_runs(runs) if runs else []
    of_runs = training_record(runs, groups, command) if runs else None
    if evaluation and of_runs:
        evaluation.training = of_runs
    record = evaluation.content() if evaluation else of_runs
    document = build_document(evaluation, groups, command)
    write_text(folder / "report.md", render_markdown(document))
    write_json(folder / "report.json", record)
    write_text(folder / "report.html", render_html(document, record))


def build_document(evaluation: EvaluationRecord | None, groups: Sequence[Group] = (), command: str = "") -> Document:
    """The report of an evaluation, of training runs, or of both; see `write_report`."""
    runs = [run for group in groups for run in group.runs]
    title = f"Training run {runs[0].name}" if len(runs) == 1 else f"{len(runs)} training runs"
    lead: list[Block] = []
    sections: list[Section] = []
    if evaluation:
        title, lead = evaluation.suite.title, tables.lead(evaluation)
        blocks = [*tables.benchmark_blocks(evaluation), Charts(score_charts(evaluation))]
        sections += [Section("benchmarks", "Benchmarks", blocks), *_long_context_sections(evaluation)]
    if runs:
        sections += _training_sections(groups, runs)
    if evaluation:
        sections += _analysis_sections(evaluation)
        blocks = [tables.model_table(evaluation), facts(tables.settings(evaluation))]
        sections.append(Section("environment", "Environment", [*blocks, Commands(evaluation.command)]))
    if command and not (evaluation and command == evaluation.command):
        about = [f"{name} {number}" for name, number in _versions().items()]
        sections.append(
            Section("report", "This report", [Paragraph(f"{', '.join(about)}. {_now()}."), Commands(command)])
        )
    return Document(title, lead, sections)


def _long_context_sections(evaluation: EvaluationRecord) -> list[Section]:
    """Figures at long context that the models' conversions recorded, if they did."""
    blocks: list[Block] = []
    for label, model in evaluation.models.items():
        tables = long_context_tables(model.by_position, model.retrieval)
        blocks += [Heading(label), *tables] if tables else []
    about = Paragraph("From each model's conversion.json: the converted model against its base on held-out text.")
    return [Section("long-context", "Long context", [about, *blocks])] if blocks else []


def _training_sections(groups: Sequence[Group], runs: Sequence[TrainingRun]) -> list[Section]:
    blocks: list[Block] = run_tables.comparison(groups) if len(runs) > 1 else []
    blocks.append(Charts(training_charts(groups)))
    for run in runs:
        blocks += [Heading(run.name), *run_tables.run_blocks(run)]
    return [Section("training", "Training", blocks)]


def _analysis_sections(evaluation: EvaluationRecord) -> list[Section]:
    """Results of the head analyses, without those that failed."""
    known = {label: found for label, found in evaluation.analysis.items() if "error" not in found}
    if not known:
        return []
    blocks = [head_table(known), Charts(cost_charts(known, list(evaluation.models)))]
    return [Section("efficiency", "Efficiency", blocks)] + [
        Section(f"routers-{number}", f"Routers of {label}", router_blocks(number, found))
        for number, (label, found) in enumerate(known.items(), start=1)
    ]


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
        "versions": _versions(),
        "command": command,
        "created": _now(),
    }


def _versions() -> dict[str, str]:
    return {"moh_llm": __version__, "matplotlib": version("matplotlib")}


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
