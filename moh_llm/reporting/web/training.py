"""Training runs as charts and rows: the curves of their logs, and the receipt of the text they read."""

from collections.abc import Sequence
from dataclasses import dataclass

from moh_llm.reporting.figures import LOSSES, SETTINGS
from moh_llm.reporting.groups import Group
from moh_llm.reporting.runs import Record, TrainingRun, number, summarise
from moh_llm.reporting.style import RAW_POINTS, running_median
from moh_llm.reporting.web.charts import Axis, Chart, Points, line_chart

_TOKENS = Axis("training tokens")
_SCORES = {
    "ratio": ("Held-out perplexity", "ratio to the base's", 1.0),
    "kl": ("Held-out KL to the base", "nats per token", None),
    "perplexity": ("Held-out perplexity", "perplexity", None),
}
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
    facts = [
        ("model", found["model"]),
        ("objective", found["objective"]["kind"]),
        ("tuned", "all weights" if found["lora"] is None else f"LoRA of rank {found['lora']['rank']}"),
        ("steps", f"{found['steps']:,} of {found['max_steps']:,}"),
        ("tokens", f"{found['tokens']:,}"),
        ("device", f"{found['device']}, {found['processes']} process(es)"),
        ("time of training", f"{found['seconds'] / 3600:.2f} h"),
    ]
    if scores and scores[-1]["ratio"] is not None:
        facts.append(("held-out perplexity / base's", f"{scores[-1]['ratio']:.4f}"))
    if scores and scores[-1]["kl"] is not None:
        facts.append(("held-out KL to the base", f"{scores[-1]['kl']:.4f} nats per token"))
    return RunRows(run.name, facts, _receipt(run))


def training_charts(groups: Sequence[Group]) -> list[Chart]:
    """Scores on held-out text, losses, and settings of the steps."""
    charts = []
    for key, (title, unit, reference) in _SCORES.items():
        series = {
            name: [(score["tokens"], score[key]) for score in run.scores if score[key] is not None]
            for name, run in _runs(groups)
        }
        if key == "perplexity" and any(score["ratio"] is not None for _, run in _runs(groups) for score in run.scores):
            continue  # the ratio says more
        charts += _chart(f"held-out-{key}", title, series, unit, reference=reference)
    for names in (LOSSES, SETTINGS):
        for key, (title, unit) in names.items():
            series = {name: _thinned(*run.points(key)) for name, run in _runs(groups)}
            charts += _chart(f"log-{key.replace('.', '-')}", title, series, unit)
    return charts


def _runs(groups: Sequence[Group]) -> list[tuple[str, TrainingRun]]:
    return [
        (group.name if len(group.runs) == 1 else f"{group.name}, seed {run.seed}", run)
        for group in groups
        for run in group.runs
    ]


def _chart(name: str, title: str, series: dict[str, Points], unit: str, reference: float | None = None) -> list[Chart]:
    known = {key: points for key, points in series.items() if points}
    values = [value for points in known.values() for _, value in points]
    if not values:
        return []
    log = 10 if min(values) > 0 and max(values) > 10 * min(values) else None
    return [line_chart(name, title, known, _TOKENS, Axis(unit, log), reference=reference)]


def _thinned(tokens: list[int], values: list[float]) -> Points:
    """A curve with few enough points; a long one is smoothed, so that none that is drawn stands for its neighbours."""
    if len(values) > RAW_POINTS:
        values = running_median(values, max(11, len(values) // 20 | 1))
    step = max(1, len(values) // _DRAWN)
    return list(zip(tokens, values, strict=True))[::step]


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
