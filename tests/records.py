"""Records of evaluations with made scores."""

import random
from typing import Any

from moh_llm.evaluation.models import Identity
from moh_llm.evaluation.report import build_report
from moh_llm.evaluation.runner import ModelScores
from moh_llm.evaluation.scoring import Score
from moh_llm.evaluation.suite import Benchmark, Suite

Record = dict[str, Any]
ITEMS = 200
RIGHT = {"A": 0.7, "B": 0.5, "C": 0.6}


def make_record(models: dict[str, tuple[str, float]], names: str = "ABC", suite: str = "three") -> Record:
    """A report of ``names``; ``models``: label to weights and the part of its right answers that it keeps."""
    published = {"A": {"paper": 71.0}, "B": {"paper": 52.0}, "C": {}}
    benchmarks = [
        Benchmark(n, 0, "acc", n, n, n, "test", ITEMS, revision="0" * 40, stock=f"{n}.yaml", published=published[n])
        for n in names
    ]
    results = {}
    for label, (weights, keep) in models.items():
        scores = {}
        for name in names:
            draw, lose = random.Random(name), random.Random(weights + name)
            values = [float(draw.random() < RIGHT[name] and lose.random() < keep) for _ in range(ITEMS)]
            scores[name] = Score([values], {name: (sum(values) / ITEMS, ITEMS)}, 2.0, False, 8)
        results[label] = ModelScores(f"in/{weights}", Identity(weights, weights, None), "float32", "cpu", 64, scores)
    made = Suite(suite, f"Suite {suite}", benchmarks, columns=["paper"])
    return build_report(made, results, None, 8, None, f"moh-llm evaluate {' '.join(models)}")
