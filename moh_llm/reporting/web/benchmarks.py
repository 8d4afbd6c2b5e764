"""The benchmarks of an evaluation as charts. Needs matplotlib."""

from typing import Any

from moh_llm.evaluation.verdict import base_of
from moh_llm.reporting.document import Chart
from moh_llm.reporting.web.charts import Interval, interval_chart

Record = dict[str, Any]


def score_charts(report: Record) -> list[Chart]:
    """Differences to the base, and scores, of each benchmark with 95 % intervals."""
    rows = report["benchmarks"]
    names = [row["name"] for row in rows]
    deltas = {
        label: [_interval(row.get(label, {}).get("delta")) for row in rows]
        for label in report["models"]
        if base_of(report, label)
    }
    scores = {label: [_interval(row.get(label)) for row in rows] for label in report["models"]}
    charts = []
    if any(any(values) for values in deltas.values()):
        note = "With 95 % intervals, from the differences on the same items. Left of the line: worse than the base."
        charts.append(
            interval_chart(
                "deltas",
                "Difference to the base",
                names,
                deltas,
                "points (percent)",
                note,
                zero=True,
                order=list(scores),
            )
        )
    if any(any(values) for values in scores.values()):
        charts.append(interval_chart("scores", "Scores", names, scores, "percent", "With 95 % intervals."))
    return charts


def _interval(figures: Record | None) -> Interval | None:
    """A score with its 95 % interval."""
    if not figures:
        return None
    value, error = figures["value"], figures["stderr"]
    return (value, None, None) if error is None else (value, value - 1.96 * error, value + 1.96 * error)
