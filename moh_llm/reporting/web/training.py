"""Training runs as charts and rows: the curves of their logs, and the receipt of the text they read."""

from collections.abc import Sequence
from dataclasses import dataclass

from moh_llm.records.lineage import in_words
from moh_llm.reporting.figures import EXACT, SETTINGS, loss_titles, score_titles
from moh_llm.reporting.groups import Group
from moh_llm.reporting.page import run_facts
from moh_llm.reporting.runs import Record, TrainingRun, number, summarise
from moh_llm.reporting.style import RAW_POINTS, median_window, running_median
from moh_llm.reporting.web.charts import Axis, Chart, Points, line_chart

_TOKENS = Axis("training tokens")
# Columns of the receipt after the source's name, and how they are printed.
_RECEIPT = (("weight", ".4f"), ("tokens", ",.0f"), ("share", ".4f"), ("epochs", ".4f"), ("repeated_tokens", ",.0f"))
# Points of a curve that a chart draws; the log has all of them.
_DRAWN = 400


@dataclass(frozen=True)
class RunRows:
    """One run in two tables.

    Attributes:
        name: the run.
        facts: pairs of what and how much.
        receipt: per source of text: name, weight in the recipe, tokens read, share of all, epochs, tokens read again.
    """

    name: str
    facts: list[tuple[str, str]]
    receipt: list[tuple[str, str, str, str, str, str]]


def run_rows(run: TrainingRun) -> RunRows:
    """The tables of one run."""
    found = summarise(run)
    scores = [*found["scores"], *([found["saved_model"]] if found["saved_model"] else [])]
    name, its = in_words([run.reference])
    facts = [*run_facts(found).items()]
    if scores and scores[-1]["ratio"] is not None:
        facts.append((f"held-out perplexity, ratio to {its}", f"{scores[-1]['ratio']:.4f}"))
    if scores and scores[-1]["kl"] is not None:
        facts.append((f"held-out KL to {name}", f"{scores[-1]['kl']:.4f} nats per token"))
    if scores and scores[-1].get("all_heads_kl") is not None:
        facts.append((f"the same with all heads on, KL to {name}", f"{scores[-1]['all_heads_kl']:.4f} nats per token"))
    return RunRows(run.name, facts, _receipt(run))


def training_charts(groups: Sequence[Group]) -> list[Chart]:
    """Scores on held-out text, losses, and settings of the steps."""
    charts = []
    for key, (title, unit) in score_titles(groups).items():
        series = {
            name: [(score["tokens"], score[key]) for score in run.scores if score[key] is not None]
            for name, run in _runs(groups)
        }
        if key == "perplexity" and all(score["ratio"] is not None for _, run in _runs(groups) for score in run.scores):
            continue  # the ratio says more
        charts += _chart(f"held-out-{key}", title, series, unit, reference=1.0 if key == "ratio" else None)
    for names in (loss_titles(groups), SETTINGS):
        for key, (title, unit) in names.items():
            curves = {name: run.points(key) for name, run in _runs(groups)}
            windows = {name: 1 if key in EXACT else median_window(len(curve[1])) for name, curve in curves.items()}
            series = {name: _thinned(*curve, windows[name]) for name, curve in curves.items()}
            note = _smoothing({windows[name] for name, points in series.items() if points})
            charts += _chart(f"log-{key.replace('.', '-')}", title, series, unit, note)
    return charts


def _runs(groups: Sequence[Group]) -> list[tuple[str, TrainingRun]]:
    return [
        (group.name if len(group.runs) == 1 else f"{group.name}, seed {run.seed}", run)
        for group in groups
        for run in group.runs
    ]


def _chart(
    name: str, title: str, series: dict[str, Points], unit: str, note: str = "", reference: float | None = None
) -> list[Chart]:
    """The chart, if any run has a point: with all runs, so that each has the same colour in every chart."""
    values = [value for points in series.values() for _, value in points]
    if not values:
        return []
    log = 10 if min(values) > 0 and max(values) > 10 * min(values) else None
    return [line_chart(name, title, series, _TOKENS, Axis(unit, log), note, reference=reference)]


def _thinned(tokens: list[int], values: list[float], window: int) -> Points:
    """The running median of a curve with few enough points, its ends among them."""
    points = list(zip(tokens, running_median(values, window), strict=True))
    return points[: -1 : max(1, len(points) // _DRAWN)] + points[-1:]


def _smoothing(windows: set[int]) -> str:
    """What a chart says of the running medians in it."""
    if max(windows, default=1) == 1:
        return ""
    steps = f"{windows.pop()} steps" if len(windows) == 1 else "about 5 % of the run's steps"
    where = f" where it has more than {RAW_POINTS}" if 1 in windows else ""
    return f"Running median of {steps}{where}; the log has every step."


def _receipt(run: TrainingRun) -> list[tuple[str, str, str, str, str, str]]:
    """Of a finished run as its record has it, of another what its last step had read."""
    read = run.record.get("data_read")
    if not isinstance(read, dict):
        tokens = run.lines[-1].get("tokens_of_source") or {}
        total = sum(tokens.values())
        read = {name: {"tokens": count, "share": count / total if total else None} for name, count in tokens.items()}
    return [_source(name, entry) for name, entry in read.items()]


def _source(name: str, entry: Record) -> tuple[str, str, str, str, str, str]:
    def shown(key: str, form: str) -> str:
        value = number(entry.get(key))
        return "-" if value is None else format(value, form)

    return (name, *(shown(*c) for c in _RECEIPT))
