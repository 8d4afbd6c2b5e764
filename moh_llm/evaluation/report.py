"""The report of an evaluation: a plain record (JSON) and a page to read (Markdown). Figures are in percent."""

import datetime
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from moh_llm import __version__
from moh_llm.evaluation import statistics
from moh_llm.evaluation.markdown import to_markdown
from moh_llm.evaluation.models import describe_model
from moh_llm.evaluation.runner import SEEDS, ModelScores, Score
from moh_llm.evaluation.suite import Benchmark, Suite
from moh_llm.files import write_json, write_text

Record = dict[str, Any]


def build_report(
    suite: Suite,
    scores: dict[str, ModelScores],
    limit: int | None,
    batch_size: int | str,
    data_dir: Path | None,
    command: str,
) -> Record:
    """Put what `score` returned, labelled "model" and optionally "base", into one JSON-ready record.

    ``limit``, ``batch_size`` and ``data_dir`` are those of the run, ``command`` the line that repeats it.
    """
    rows = [_row(benchmark, scores) for benchmark in suite.benchmarks]
    source = "Hugging Face Hub" if data_dir is None else str(data_dir)
    return {
        "suite": {"name": suite.name, "title": suite.title, "columns": list(suite.columns)},
        "models": {label: _about(result) for label, result in scores.items()},
        "benchmarks": rows,
        "average": _average(suite, rows, list(scores)),
        "errors": [
            {"model": label, "benchmark": name, "error": error}
            for label, result in scores.items()
            for name, error in result.errors.items()
        ],
        "limit": limit,
        "partial_data": [row["name"] for row in rows if limit is None and _is_partial(row)],
        "data": "the suite's own" if suite.data else source,
        "batch_size": batch_size,
        "seeds": dict(SEEDS),
        "versions": _versions(),
        "command": command,
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def write_report(folder: Path, report: Record) -> None:
    """Write ``report.json`` and ``report.md`` into ``folder``."""
    write_json(folder / "report.json", report)
    write_text(folder / "report.md", to_markdown(report))


def _row(benchmark: Benchmark, scores: dict[str, ModelScores]) -> Record:
    """One benchmark: the figures of each model that has a score, and their paired difference."""
    found = {
        label: result.scores[benchmark.name] for label, result in scores.items() if benchmark.name in result.scores
    }
    row: Record = {
        "name": benchmark.name,
        "shots": benchmark.shots,
        "metric": benchmark.metric if benchmark.filter == "none" else f"{benchmark.metric} ({benchmark.filter})",
        "dataset": benchmark.dataset,
        "items_in_full": benchmark.items,
        "note": benchmark.note,
        "published": dict(benchmark.published),
    }
    for label, result in found.items():
        row[label] = _figures(result)
    if "base" in found and "model" in found:
        change = statistics.difference(found["model"].strata, found["base"].strata)
        row["delta"] = _value_and_error(change)
        row["recovery"] = _recovery(row["model"]["value"], row["base"]["value"])
    return row


def _figures(result: Score) -> Record:
    return {
        **_value_and_error(result.strata),
        "items": sum(len(values) for values in result.strata),
        "seconds": round(result.seconds, 2),
        "truncated": result.truncated,
        "tasks": {task: {"value": 100 * value, "items": items} for task, (value, items) in result.tasks.items()},
    }


def _value_and_error(strata: statistics.Strata) -> Record:
    error = statistics.standard_error(strata)
    return {"value": 100 * statistics.mean(strata), "stderr": None if error is None else 100 * error}


def _average(suite: Suite, rows: list[Record], labels: list[str]) -> Record:
    """Plain mean over the benchmarks that every model has a score on; the paper's columns over all of theirs."""
    complete = [row for row in rows if all(label in row for label in labels)]
    average: Record = {
        "over": len(complete),
        "of": len(rows),
        "published": {column: suite.published_average(column) for column in suite.columns},
    }
    for key in (*labels, "delta") if complete else ():
        if key in complete[0]:
            average[key] = {
                "value": statistics.plain_mean([row[key]["value"] for row in complete]),
                "stderr": statistics.plain_mean_error([row[key]["stderr"] for row in complete]),
            }
    if "delta" in average:
        average["recovery"] = _recovery(average["model"]["value"], average["base"]["value"])
    return average


def _recovery(model: float, base: float) -> float | None:
    """Model / base in percent, or None where the base scored nothing."""
    return 100 * model / base if base > 0 else None


def _is_partial(row: Record) -> bool:
    return any(row[label]["items"] < row["items_in_full"] for label in ("base", "model") if label in row)


def _about(result: ModelScores) -> Record:
    run = {"dtype": result.dtype, "device": result.device, "context": result.context}
    return {**describe_model(result.model), **run}


def _versions() -> dict[str, str]:
    names = {"torch": "torch", "transformers": "transformers", "lm_eval": "lm-eval", "datasets": "datasets"}
    return {
        "moh_llm": __version__,
        **{name: metadata.version(package) for name, package in names.items()},
        "python": platform.python_version(),
    }
