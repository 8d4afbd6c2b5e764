"""The pages of an evaluation and of a training run, `report.html` and `report.md`.

Both are made from a template of `templates/`, which takes its tables from `tables` and `runs` and, in HTML, its charts
from `charts`.
"""

from collections.abc import Sequence
from pathlib import Path

from moh_llm.claims import verdict, warnings
from moh_llm.evaluation import charts, runs, tables
from moh_llm.evaluation.rendering import html_templates, markdown_templates
from moh_llm.evaluation.runs import TrainingRun
from moh_llm.files import write_json, write_text
from moh_llm.records.evaluation import EvaluationRecord


def write_report(folder: Path, evaluation: EvaluationRecord, training: Sequence[TrainingRun] = ()) -> None:
    """Write ``report.html``, ``report.md`` and ``report.json``, the evaluation's record.

    Args:
        folder: an empty folder.
        evaluation: the evaluation.
        training: the training runs that made the models. The pages show them in short.
    """
    write_json(folder / "report.json", evaluation.content())
    write_pages(folder, evaluation, training)


def write_pages(folder: Path, evaluation: EvaluationRecord | None, training: Sequence[TrainingRun]) -> None:
    """Write ``report.html`` and ``report.md``, in place of earlier ones; without an evaluation, of one training run."""
    for name in ("report.md", "report.html"):
        write_text(folder / name, render(name, evaluation, training))


def render(name: str, evaluation: EvaluationRecord | None, training: Sequence[TrainingRun] = ()) -> str:
    """The page that the template ``name`` makes. The HTML page is one file without scripts and requests."""
    templates = html_templates() if name.endswith(".html") else markdown_templates("moh_llm.evaluation")
    labels = (evaluation.compared_models or list(evaluation.models)) if evaluation else []
    page = templates.get_template(name).render(
        title=evaluation.suite.title if evaluation else f"Training run {training[0].folder.resolve().name}",
        evaluation=evaluation,
        warnings=warnings(evaluation) if evaluation else [],
        verdicts=[verdict(evaluation, label) for label in labels],
        training=training,
        charts=charts,
        tables=tables,
        runs=runs,
    )
    return page.rstrip() + "\n"
