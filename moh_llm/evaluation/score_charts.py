"""An evaluation as charts: scores, and what a model costs against its dense base (in the form of Tab. 7).

Needs matplotlib.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from moh_llm.claims.heads import mean_heads_on
from moh_llm.evaluation.charts import Axis, Interval, interval_chart, line_chart
from moh_llm.evaluation.document import Chart, Table
from moh_llm.intervals import within
from moh_llm.records.evaluation import EvaluationRecord, Value

Record = dict[str, Any]


def score_charts(report: EvaluationRecord) -> list[Chart]:
    """Differences to the base, and scores, of each benchmark with 95 % intervals."""
    rows = report.benchmarks
    names, labels = [row.name for row in rows], list(report.models)
    scores = {label: [_interval(row.scores.get(label)) for row in rows] for label in labels}
    deltas = {
        label: [_interval(row.scores[label].delta if label in row.scores else None, -100) for row in rows]
        for label, about in report.models.items()
        if about.compared
    }
    charts = []
    if any(any(values) for values in deltas.values()):
        note = "With 95 % intervals, from the differences on the same items. Left of the line: worse than the base."
        title, unit = "Difference to the base", "points (percent)"
        charts.append(interval_chart("deltas", title, names, deltas, unit, note, zero=True, order=labels))
    if any(any(values) for values in scores.values()):
        charts.append(interval_chart("scores", "Scores", names, scores, "percent", "With 95 % intervals."))
    return charts


def head_table(analyses: Mapping[str, Record]) -> Table:
    """Per model: heads per token that are asked for and that were read on the prompts, device and dtype of times."""
    rows = []
    for label, found in analyses.items():
        asked, heads, read = found["num_active"], found["heads"], mean_heads_on(found["head_load"]["load"])
        spread = str(asked[0]) if len(set(asked)) == 1 else f"{min(asked)} to {max(asked)}"
        share = sum(asked) / (heads * len(asked))
        start, tokens = found.get("all_heads_until", 0), f"{found['head_load']['tokens']:,}"
        spread = f"{spread} of {heads}{f' from token {start + 1:,} on' if start else ''}"
        figures = [spread, f"{share:.1%}", f"{read:.4g}", f"{read / heads:.1%}", tokens]
        rows.append([label, *figures, f"{found['device']}, {found['dtype']}"])
    head = [
        "model",
        "heads asked for per layer",
        "of all",
        "heads read on the prompts",
        "of all",
        "tokens read",
        "timed on",
    ]
    return Table(head, rows, text=7)


def cost_charts(analyses: Mapping[str, Record], order: Sequence[str]) -> list[Chart]:
    """Theoretical FLOPs and measured seconds of one forward pass, as ratios to the dense base and as they are.

    ``order``: the report's models, which have the same colours in all of its charts.
    """
    length = Axis("tokens", log=2)
    kinds = {
        "flops": (
            "Theoretical FLOPs of a forward pass",
            "FLOPs",
            "Of heads that are off what can be skipped is not counted.",
        ),
        "seconds": (
            "Measured time of a forward pass",
            "seconds",
            "Model and base, the same weights through its own attention, take turns on the same device. Where heads "
            "are all computed and then masked, a model is no faster than its base.",
        ),
    }
    charts = []
    for key, (title, unit, note) in kinds.items():
        ratios = {label: [(c["length"], c["moh"] / c["dense"]) for c in a[key]] for label, a in analyses.items()}
        values = {label: [(cost["length"], cost["moh"]) for cost in a[key]] for label, a in analyses.items()}
        dense = {label: [(cost["length"], cost["dense"]) for cost in a[key]] for label, a in analyses.items()}
        one = all(costs == next(iter(dense.values())) for costs in dense.values())
        values |= {"dense base" if one else f"{label}'s dense base": costs for label, costs in dense.items()}
        if any(ratios.values()):
            heading, ratio = f"{title}, ratio to the base's", Axis("ratio")
            charts += [
                line_chart(f"{key}-ratio", heading, ratios, length, ratio, note, reference=1, order=order),
                line_chart(key, title, values, length, Axis(unit, log=10), order=order),
            ]
    return charts


def _interval(found: Value | None, lowest: float = 0) -> Interval | None:
    """A score or a difference with what lies of its 95 % interval between `lowest` and 100 %."""
    if found is None:
        return None
    return (found.value, *(within(found.interval, lowest, 100) if found.interval else (None, None)))
