"""The record of an evaluation, ready for JSON. Figures are in percent."""

import datetime
import shutil
from pathlib import Path
from typing import Any

from moh_llm.evaluation import statistics
from moh_llm.evaluation.margin import average_margin, margin_kept, plain_mean, recovery
from moh_llm.evaluation.models import describe_model, other_base
from moh_llm.evaluation.result_cache import ResultCache, file_name, installed_versions
from moh_llm.evaluation.runner import ModelScores
from moh_llm.evaluation.scoring import SEEDS, Score
from moh_llm.evaluation.suite import Benchmark, Suite

Record = dict[str, Any]


def build_report(
    suite: Suite,
    scores: dict[str, ModelScores],
    limit: int | None,
    batch_size: int | str,
    data_dir: Path | None,
    command: str,
    processes: int = 1,
    share_prefixes: bool = False,
) -> Record:
    """Put what `score` returned, labelled as `label_models` does, into one JSON-ready record.

    ``limit``, ``batch_size``, ``data_dir``, ``processes`` and ``share_prefixes`` are those of the run, ``command``
    the line that repeats it.
    """
    rows = [_row(benchmark, scores, from_hub=suite.data_folder(data_dir) is None) for benchmark in suite.benchmarks]
    source = "Hugging Face Hub" if data_dir is None else str(data_dir)
    bases = {label: "base" if "base" in scores and label != "base" else None for label in scores}
    return {
        "suite": {"name": suite.name, "title": suite.title, "columns": list(suite.columns)},
        "models": {label: _about(result) | _base(result, bases[label], scores) for label, result in scores.items()},
        "benchmarks": rows,
        "average": average_record(rows, bases, suite.columns),
        "errors": [
            {"model": label, "benchmark": name, "error": error}
            for label, result in scores.items()
            for name, error in result.errors.items()
        ],
        "limit": limit,
        "partial_data": [row["name"] for row in rows if limit is None and _is_partial(row, list(scores))],
        "data": "the suite's own" if suite.data else source,
        "dtype": _dtype(scores),
        "batch_size": batch_size,
        "share_prefixes": share_prefixes,
        "processes": processes,
        "seeds": dict(SEEDS),
        "versions": installed_versions(),
        "command": command,
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def add_samples(folder: Path, report: Record, cache: ResultCache) -> None:
    """Copy the logs of all scored items into ``folder`` and name each in ``report``.

    Raises UserError when the disk refuses (through `new_folder`).
    """
    for row in report["benchmarks"]:
        for label in report["models"]:
            if label in row:
                place = Path("samples") / file_name(label) / f"{file_name(row['name'])}.jsonl"
                (folder / place).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(cache.samples_file(label, row["name"]), folder / place)
                row[label]["samples"] = str(place)


def _row(benchmark: Benchmark, scores: dict[str, ModelScores], from_hub: bool) -> Record:
    """One benchmark: the figures of each model that has a score, and their paired difference."""
    found = {
        label: result.scores[benchmark.name] for label, result in scores.items() if benchmark.name in result.scores
    }
    chances = next((result.chances.get(benchmark.name) for result in scores.values()), None)
    digest = next((result.data[benchmark.name] for result in scores.values() if benchmark.name in result.data), None)
    row: Record = {
        "name": benchmark.name,
        "shots": benchmark.shots,
        "metric": benchmark.metric if benchmark.filter == "none" else f"{benchmark.metric} ({benchmark.filter})",
        "dataset": benchmark.dataset,
        "dataset_config": _config(benchmark),
        "revision": benchmark.revision if from_hub else None,
        # The Hub's is a digest of `datasets`' fingerprints, other ones in other versions of it: the commit tells more.
        "data_sha256": None if from_hub else digest,
        "eval_split": benchmark.eval_split,
        "fewshot_split": benchmark.fewshot_split,
        "items_in_full": benchmark.items,
        "chance_rule": benchmark.chance,
        "chance": None if chances is None else round(100 * statistics.mean(chances), 6),
        "note": benchmark.note,
        "published": dict(benchmark.published),
    }
    for label, result in found.items():
        row[label] = _figures(result)
        if chances is not None:
            row[label]["margin"] = _value_and_error(statistics.difference(result.strata, chances))
        if label != "base" and "base" in found:
            row[label]["delta"] = _value_and_error(statistics.difference(result.strata, found["base"].strata))
            row[label] |= recovery(row[label], row["base"])
            row[label]["margin_kept"] = margin_kept(row, label, "base")
    return _with_single_delta(row)


def _config(benchmark: Benchmark) -> str | None:
    """The dataset's config; None where several are read as one benchmark."""
    configs = {part.config for part in benchmark.expand()}
    return configs.pop() if len(configs) == 1 else None


def _with_single_delta(row: Record) -> Record:
    """``row`` with the difference of a single model beside it, too, where records of one model have it."""
    keys = ("delta", "recovery", "recovery_interval", "margin_kept")
    return row | {key: row["model"][key] for key in keys if key in row.get("model", {})}


def _figures(result: Score) -> Record:
    return {
        **_value_and_error(result.strata),
        "items": result.items,
        "seconds": round(result.seconds, 2),
        "items_per_second": _rate(result.items, result.seconds),
        "batch_size": result.batch_size,
        "truncated": result.truncated,
        "tasks": {task: {"value": 100 * value, "items": items} for task, (value, items) in result.tasks.items()},
    }


def _value_and_error(strata: statistics.Strata) -> Record:
    error = statistics.standard_error(strata)
    return {"value": 100 * statistics.mean(strata), "stderr": None if error is None else 100 * error}


def average_record(rows: list[Record], bases: dict[str, str | None], columns: list[str]) -> Record:
    """Plain mean over the benchmarks that every model has a score on, with its difference where it has a base.

    ``bases``: for each model's label that of its base, or None. ``columns``: the published ones, whose averages are
    over the same benchmarks; None for one that lacks a figure on any of them.
    """
    complete = [
        row
        for row in rows
        if all(label in row and (base is None or "delta" in row[label]) for label, base in bases.items())
    ]
    published = {column: _published_mean(complete, column) for column in columns}
    average: Record = {"over": len(complete), "of": len(rows), "published": published}
    if complete:
        average |= {label: plain_mean([row[label] for row in complete]) for label in bases}
        for label, base in bases.items():
            if base is not None:
                average[label]["delta"] = plain_mean([row[label]["delta"] for row in complete])
                average[label] |= recovery(average[label], average[base])
                average[label]["margin_kept"] = average_margin(complete, label, base)
    return _with_single_delta(average)


def _published_mean(rows: list[Record], column: str) -> float | None:
    figures = [row["published"][column] for row in rows if column in row["published"]]
    return statistics.plain_mean(figures) if figures and len(figures) == len(rows) else None


def _rate(items: int, seconds: float) -> float | None:
    """Items per second, to four digits."""
    return float(f"{items / seconds:.4g}") if seconds > 0 else None


def _dtype(scores: dict[str, ModelScores]) -> str:
    """What all models were run in."""
    return " and ".join(dict.fromkeys(result.dtype for result in scores.values()))


def _is_partial(row: Record, labels: list[str]) -> bool:
    return any(row[label]["items"] < row["items_in_full"] for label in labels if label in row)


def _base(result: ModelScores, label: str | None, scores: dict[str, ModelScores]) -> Record:
    """The base's column, and which other checkpoint the model was converted from, by its record."""
    other = label and other_base(result.model, scores[label].model, scores[label].identity.revision)
    return {"compared_with": label} | ({"other_base": other} if other else {})


def _about(result: ModelScores) -> Record:
    """What is known of a model and of how it was run; speed is over all benchmarks that were scored."""
    items = sum(score.items for score in result.scores.values())
    seconds = sum(score.seconds for score in result.scores.values())
    return {
        **describe_model(result.model),
        "weights_sha256": result.identity.weights,
        "revision": result.identity.revision,
        "dtype": result.dtype,
        "stored_dtype": result.stored_dtype,
        "device": result.device,
        "hardware": " / ".join(dict.fromkeys(name for name in result.hardware.values() if name)),
        "context": result.context,
        "seconds": round(seconds, 2),
        "items": items,
        "items_per_second": _rate(items, seconds),
    }
