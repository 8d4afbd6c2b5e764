"""The benchmarks of an evaluation as rows of a table and as charts."""

from dataclasses import dataclass
from typing import Any

from moh_llm.evaluation.margin import spell_margin, spell_recovery
from moh_llm.reporting.web.charts import Chart, Interval, interval_chart

Record = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One line of the table, ready to print.

    Attributes:
        name, shots, metric, items: of the benchmark; shots to items are empty for the average.
        chance: score of guessing; empty where it is not known, and for the average.
        note: why the metric is inferred; empty where the paper states it.
        cells: score with standard error of each model and, beside it, difference to the base and the shares of the
            base's score and of its margin over chance.
        published: the paper's columns.
    """

    name: str
    shots: str
    metric: str
    items: str
    chance: str
    note: str
    cells: list[str]
    published: list[str]


def table_head(report: Record) -> tuple[list[str], list[str]]:
    """The columns of the models, and those of the paper."""
    columns = []
    for label in report["models"]:
        columns.append(label)
        if _has_delta(report, label):
            columns += ["Δ", "recovery", "of margin"]
    return columns, list(report["suite"]["columns"])


def table_rows(report: Record) -> list[Row]:
    """A row for each benchmark, and the average."""
    rows = []
    for row in report["benchmarks"]:
        items = next((f"{row[label]['items']:,}" for label in report["models"] if label in row), "-")
        chance = "" if row.get("chance") is None else f"{row['chance']:.1f}"
        facts = (str(row["shots"]), row["metric"], items, chance)
        rows.append(_row(report, row, row["name"], facts, row["note"] or ""))
    average = report["average"]
    whole = average["over"] == average["of"]
    name = "average" if whole else f"average of {average['over']} of {average['of']}"
    return [*rows, _row(report, average, name, ("", "", "", ""), "")]


def score_charts(report: Record) -> list[Chart]:
    """Differences to the base, and scores, of each benchmark with 95 % intervals."""
    rows = report["benchmarks"]
    names = [row["name"] for row in rows]
    deltas = {
        label: [_interval(row.get(label, {}).get("delta")) for row in rows]
        for label in report["models"]
        if _has_delta(report, label)
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


def _row(report: Record, row: Record, name: str, facts: tuple[str, str, str, str], note: str) -> Row:
    cells = []
    for label in report["models"]:
        figures = row.get(label) or {}
        cells.append(_figure(figures))
        if _has_delta(report, label):
            cells += [_figure(figures.get("delta") or {}, "+")]
            cells += [spell_recovery(figures, " %"), spell_margin(figures, " %")]
    published = [row["published"].get(column) for column in report["suite"]["columns"]]
    return Row(name, *facts, note, cells, ["-" if value is None else f"{value:.1f}" for value in published])


def _has_delta(report: Record, label: str) -> bool:
    return any("delta" in row.get(label, {}) for row in report["benchmarks"])


def _figure(figures: Record, sign: str = "") -> str:
    if figures.get("value") is None:
        return "-"
    error = figures.get("stderr")
    return f"{figures['value']:{sign}.1f}" + ("" if error is None else f" ± {error:.1f}")


def _interval(figures: Record | None) -> Interval | None:
    """A score with its 95 % interval."""
    if not figures:
        return None
    value, error = figures["value"], figures["stderr"]
    return (value, None, None) if error is None else (value, value - 1.96 * error, value + 1.96 * error)
