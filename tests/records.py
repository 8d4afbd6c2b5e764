"""Records of evaluations with made scores."""

import json
import random
from pathlib import Path
from typing import Any

from moh_llm.claims import verdict, warnings  # noqa: F401 (tests take them from here)
from moh_llm.evaluation.config import EvaluationConfig
from moh_llm.evaluation.record import build_record
from moh_llm.evaluation.report import render
from moh_llm.evaluation.runner import ModelScores, Score
from moh_llm.evaluation.suite import Benchmark, Suite
from moh_llm.records.evaluation import EvaluationRecord, Row
from moh_llm.records.identity import Identity

ITEMS = 200
RIGHT = {"A": 0.7, "B": 0.5, "C": 0.6}
# What guessing scores: the base of B is at chance.
CHANCE = {"A": 0.25, "B": 0.5, "C": 0.0}


Models = dict[str, tuple[str | Identity, float]]
Scores = dict[str, dict[str, list[float]]]


def read(folder: Path) -> dict[str, Any]:
    """The content of a report's ``report.json``."""
    return json.loads((folder / "report.json").read_text(encoding="utf-8"))


def page_of(record: EvaluationRecord) -> str:
    """A report in Markdown."""
    return render("report.md", record)


def row_of(record: EvaluationRecord, name: str) -> Row:
    """The row of a benchmark."""
    return next(row for row in record.benchmarks if row.name == name)


def make_record(models: Models, names: str = "ABC", suite: str = "three") -> EvaluationRecord:
    """A report of ``names``; ``models``: label to weights and the part of its right answers that it keeps."""
    published = {"A": {"paper": 71.0}, "B": {"paper": 52.0}, "C": {}}
    benchmarks = [
        Benchmark(
            *(n, 0, "acc", n, n, n, "test", ITEMS),
            revision="0" * 40,
            stock=f"{n}.yaml",
            published=published[n],
            chance=CHANCE[n],
        )
        for n in names
    ]
    return record_of(Suite(suite, f"Suite {suite}", benchmarks, columns=["paper"]), models)


def record_of(
    suite: Suite, models: Models, failed: tuple[str, ...] = (), data_dir: Path | None = None
) -> EvaluationRecord:
    """A report of any suite, with benchmarks that no model has a score on. Data is said to have the name as digest."""
    names = [benchmark.name for benchmark in suite.benchmarks]
    chances = {b.name: 0.25 if b.chance == "choices" else b.chance for b in suite.benchmarks}
    results = {}
    for label, (known, keep) in models.items():
        identity = known if isinstance(known, Identity) else Identity(known, known, None)
        scores = {}
        for name in (name for name in names if name not in failed):
            draw, lose = random.Random(name), random.Random(label + name)
            values = [float(draw.random() < RIGHT.get(name, 0.5) and lose.random() < keep) for _ in range(ITEMS)]
            scores[name] = Score([values], {name: (sum(values) / ITEMS, ITEMS)}, 2.0, False)
        results[label] = ModelScores(
            *(f"in/{identity.weights}", identity, "float32", "cpu", 64, scores),
            data={name: f"digest of {name}" for name in names},
            hardware="a fast card",
            chances={name: None if chance is None else [[chance] * ITEMS] for name, chance in chances.items()},
        )
    options = EvaluationConfig(list(models), data_dir=data_dir)
    return build_record(suite, results, options, f"moh-llm evaluate {' '.join(models)}")


def make_report(
    scores: Scores, full: int = 100, limit: int | None = None, chances: dict[str, float] | None = None
) -> EvaluationRecord:
    """A report from the item scores of each model on each benchmark; what guessing scores is 0 if not given."""
    names = list(dict.fromkeys(name for found in scores.values() for name in found))
    chances = dict.fromkeys(names, 0.0) if chances is None else chances
    benchmarks = [
        Benchmark(n, 0, "acc", n, n, n, "test", full, stock=f"{n}.yaml", chance=chances.get(n)) for n in names
    ]
    results = {}
    for label, found in scores.items():
        made = {
            n: Score([values], {n: (sum(values) / len(values), len(values))}, 1, False) for n, values in found.items()
        }
        results[label] = ModelScores(f"folder/{label}", Identity(label, label, None), "float32", "cpu", 64, made)
        results[label].chances = {n: [[chances[n]] * len(found[n])] if n in chances else None for n in found}
    return build_record(Suite("two", "Two benchmarks", benchmarks), results, EvaluationConfig(["model"], limit=limit))
