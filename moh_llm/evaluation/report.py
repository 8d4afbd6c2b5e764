"""The pages of an evaluation and of a training run, `report.html` and `report.md`.

Both are made from a template of `templates/`, which takes its tables from `tables` and `runs`. The HTML page has the
charts below.
"""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moh_llm.claims import verdict, warnings
from moh_llm.evaluation import runs, tables
from moh_llm.evaluation.charts import Axis, Chart, HeatMap, Interval, IntervalChart, LineChart, Points
from moh_llm.evaluation.rendering import html_templates, markdown_templates
from moh_llm.evaluation.runs import TrainingRun
from moh_llm.files import write_json, write_text
from moh_llm.intervals import within
from moh_llm.records.conversion import REFERENCES
from moh_llm.records.evaluation import EvaluationRecord, Value

# A curve with more points is drawn as its running median, at about _DRAWN points.
_RAW, _DRAWN = 200, 400


def write_report(folder: Path, evaluation: EvaluationRecord | None, training: Sequence[TrainingRun] = ()) -> None:
    """Write ``report.html`` and ``report.md``, in place of earlier ones, of an evaluation and the training behind it.

    Beside them goes ``report.json``, the evaluation's record; without an evaluation the pages are of one training run.
    """
    if evaluation:
        write_json(folder / "report.json", evaluation.content())
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
        tables=tables,
        runs=runs,
        references=REFERENCES,
        score_charts=score_charts,
        cost_charts=cost_charts,
        load_chart=load_chart,
        run_charts=run_charts,
    )
    return page.rstrip() + "\n"


# ---- charts


def score_charts(record: EvaluationRecord) -> list[Chart]:
    """Differences to the base, and scores, of each benchmark with 95 % intervals."""
    rows, labels = record.benchmarks, list(record.models)
    names = [row.name for row in rows]
    scores = {label: [_interval(row.scores.get(label)) for row in rows] for label in labels}
    deltas = {
        label: [_interval(row.scores[label].delta if label in row.scores else None, -100) for row in rows]
        for label, about in record.models.items()
        if about.compared
    }
    note = "With 95 % intervals, from the differences on the same items. Left of the line: worse than the base."
    charts = [
        IntervalChart("deltas", "Difference to the base", note, names, deltas, "points (percent)", labels, zero=True),
        IntervalChart("scores", "Scores", "With 95 % intervals.", names, scores, "percent", labels),
    ]
    return [chart for chart in charts if any(any(values) for values in chart.series.values())]


def _interval(found: Value | None, lowest: float = 0) -> Interval | None:
    """A score or a difference with its 95 % interval, cut to the values between ``lowest`` and 100 %."""
    if found is None:
        return None
    return (found.value, *(within(found.interval, lowest, 100) if found.interval else (None, None)))


def cost_charts(analyses: Mapping[str, dict[str, Any]], labels: Sequence[str]) -> list[Chart]:
    """Theoretical FLOPs and measured seconds of a forward pass by length, as ratios to the dense base (Tab. 7)."""
    notes = {
        "flops": ("Theoretical FLOPs", "FLOPs that could be skipped of heads that are off are not counted."),
        "seconds": ("Measured time", "The base is the same weights through its own attention, on the same device."),
    }
    charts: list[Chart] = []
    for key, (what, note) in notes.items():
        title, length = f"{what} of a forward pass, ratio to the base's", Axis("tokens", log=2)
        ratios = {name: [(c["length"], c["moh"] / c["dense"]) for c in found[key]] for name, found in analyses.items()}
        if any(ratios.values()):
            charts.append(LineChart(f"{key}-ratio", title, note, ratios, length, Axis("ratio"), 1, labels))
    return charts


def load_chart(number: int, found: Mapping[str, Any]) -> Chart:
    """The head load of the ``number``-th analysed model, in the form of the paper's Fig. 3."""
    load, first = found["head_load"], found["all_heads_until"]
    note = f"Over {load['tokens']:,} tokens of the benchmarks' prompts. Shared heads are always on."
    if first:
        note += f" A document's first {first:,} tokens have all heads on, and are counted."
    title, unit = "Head load in each layer", "share of tokens that have the head on"
    return HeatMap(f"load-{number}", title, note, load["load"], ("head", "layer"), unit)


def run_charts(run: TrainingRun) -> list[Chart]:
    """Scores on held-out text, losses and heads of the steps, and the routers' load at the last score."""
    name = REFERENCES[run.reference]
    its = "the base's" if run.reference == "base" else f"that of {name}"
    # Title, unit, and the curves by name with their numbers in the log; charts without a point are left out.
    curves: list[tuple[str, str, dict[str, str]]] = [
        ("Held-out perplexity", f"ratio to {its}", {"ratio": "validation.ratio"}),
        (f"Held-out KL to {name}", "nats per token", {"KL": "validation.kl"}),
        ("Loss that is minimised", "loss", {"loss": "loss"}),
        (f"KL to {name}", "nats per token", {"KL": "kl"}),
        ("Cross-entropy", "nats per token", {"cross-entropy": "cross_entropy"}),
        ("Heads per token, mean over layers", "heads", {"on": "heads_read"}),
        ("Keys read", "share; dotted: plan", {"training text": "keys_read", "held-out text": "validation.keys_read"}),
        ("Multiplier of the keys read", "weight in the loss", {"multiplier": "keys_multiplier"}),
        ("Gradient before clipping", "l2 norm", {"norm": "gradient_norm"}),
    ]
    if not run.points("validation.ratio"):
        curves[0] = ("Held-out perplexity", "perplexity", {"perplexity": "validation.perplexity"})
    marks = {"ratio": 1, "training text": run.record.keys_asked}  # values of curves to compare with
    charts: list[Chart] = []
    for number, (title, unit, keys) in enumerate(curves):
        series = {label: run.points(key) for label, key in keys.items()}
        if not any(series.values()):
            continue
        long = any(len(points) > _RAW for points in series.values())
        note = "Running median over 5 % of the steps; the log has every step." if long else ""
        values = [value for points in series.values() for _, value in points]
        scale = 10 if min(values) > 0 and max(values) > 10 * min(values) else None
        drawn = {label: smoothed(points) for label, points in series.items() if points}
        x, y, reference = Axis("training tokens"), Axis(unit, scale), marks.get(next(iter(keys)))
        charts.append(LineChart(f"curve-{number}", title, note, drawn, x, y, reference))
    health = next((line.routing for line in reversed(run.lines) if line.routing), None)
    if health and any(health.load):
        note = f"At the last score. Dead heads, which no token selects: {sum(health.dead_heads)}."
        axes, unit = ("routed head of the layer", "layer"), "share of held-out tokens that select the head"
        charts.append(HeatMap("run-load", "Load of the routed heads", note, health.load, axes, unit))
    return charts


def smoothed(curve: Points) -> Points:
    """The points of a curve that are drawn: of a long one about 400, each the median of 5 % of the steps around it."""
    count = len(curve)
    half = max(11, count // 20) // 2 if count > _RAW else 0
    places = [*range(0, count - 1, max(1, count // _DRAWN)), *([count - 1] if count else [])]
    return [
        (curve[at][0], statistics.median(value for _, value in curve[max(0, at - half) : at + half + 1]))
        for at in places
    ]
