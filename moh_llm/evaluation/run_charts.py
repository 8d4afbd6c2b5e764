"""Training runs as charts: the curves of their logs, and the health of their routers. Needs matplotlib."""

import bisect
from collections.abc import Sequence
from typing import Any

from moh_llm.evaluation.charts import Axis, Points, heat_map, line_chart
from moh_llm.evaluation.document import Chart
from moh_llm.evaluation.groups import Group, reference_words, spread
from moh_llm.evaluation.runs import TrainingRun, routed

_TOKENS = Axis("training tokens")
# Per key of the log a chart's title and what its y axis says.
SETTINGS = {
    "learning_rate": ("Learning rate", "learning rate"),
    "router_learning_rate": ("Learning rate of routers and fallbacks", "learning rate"),
    "gradient_norm": ("Gradient before clipping", "l2 norm"),
    "heads_asked": ("Heads per token that the budgets ask for, mean over layers", "heads"),
    "heads_read": ("Heads per token that are on, mean over layers", "heads"),
    "timing.tokens_per_second": ("Speed", "tokens per second"),
}
_LAYERWISE = {
    "entropy": ("Entropy of the mean routing", "relative to even routing"),
    "changed": ("Tokens with other heads than at the start", "share of tokens that choose"),
}
_LAST = "At the last score."
# These follow from the recipe, so they have no noise to smooth.
EXACT = ("learning_rate", "router_learning_rate", "heads_asked")
# A curve of up to so many points is drawn as it is; a longer one as its running median.
RAW_POINTS = 200
# Points of a curve that a chart draws; the log has all of them.
_DRAWN = 400


def training_charts(groups: Sequence[Group]) -> list[Chart]:
    """Scores on held-out text, losses, settings of the steps, and router health at the last score."""
    charts = []
    for key, (title, unit) in score_titles(groups).items():
        series = {
            name: [(score["tokens"], score[key]) for score in run.scores if score[key] is not None]
            for name, run in _runs(groups)
        }
        if key == "perplexity" and all(score["ratio"] is not None for _, run in _runs(groups) for score in run.scores):
            continue  # the ratio says more
        means = {f"{group.name}, mean": _means(group, key) for group in groups if len(group.runs) > 1}
        note = "Bands: one standard deviation around the mean of a group's runs." if means else ""
        series |= {name: [(tokens, mean) for tokens, mean, _ in rows] for name, rows in means.items()}
        bands = {name: [(tokens, mean - std, mean + std) for tokens, mean, std in rows] for name, rows in means.items()}
        reference = 1.0 if key == "ratio" else None
        charts += _chart(f"held-out-{key}", title, series, unit, note, bands=bands, reference=reference)
    for names in (loss_titles(groups), SETTINGS):
        for key, (title, unit) in names.items():
            curves = {name: run.points(key) for name, run in _runs(groups)}
            windows = {name: 1 if key in EXACT else median_window(len(curve[1])) for name, curve in curves.items()}
            series = {name: _thinned(*curve, windows[name]) for name, curve in curves.items()}
            note = _smoothing({windows[name] for name, points in series.items() if points})
            charts += _chart(f"log-{key.replace('.', '-')}", title, series, unit, note)
    return charts + _router_charts(groups)


def loss_titles(groups: Sequence[Group]) -> dict[str, tuple[str, str]]:
    """Per key of the log the title and unit of the loss and its terms, which name what the runs are compared with."""
    name, its = reference_words(groups)
    return {
        "loss": ("Loss that is minimised", "loss"),
        "kl": (f"KL to {name}", "nats per token"),
        "cross_entropy": ("Cross-entropy", "nats per token"),
        "balance_loss": ("Load-balance loss", "per sequence"),
        "expert_balance_loss": ("Load-balance loss of experts, weighted", "per sequence"),
        "layer_distance": (f"Layers' squared distance to {its}", "relative to their size"),
    }


def score_titles(groups: Sequence[Group]) -> dict[str, tuple[str, str]]:
    """The same for the scores on held-out text."""
    name, its = reference_words(groups)
    return {
        "ratio": ("Held-out perplexity", f"ratio to {its}"),
        "kl": (f"Held-out KL to {name}", "nats per token"),
        "perplexity": ("Held-out perplexity", "perplexity"),
    }


def median_window(count: int) -> int:
    """Window of the running median over ``count`` points: 5 % of them, or 1 where every point is drawn."""
    return max(11, count // 20 | 1) if count > RAW_POINTS else 1


def running_median(values: Sequence[float], window: int) -> list[float]:
    """The median of up to ``window`` (odd) values around each; at the ends of those that there are."""
    half = window // 2
    ordered = sorted(values[:half])
    medians = []
    for index in range(len(values)):
        if index + half < len(values):
            bisect.insort(ordered, values[index + half])
        if index > half:
            ordered.pop(bisect.bisect_left(ordered, values[index - half - 1]))
        middle = len(ordered) // 2
        odd = len(ordered) % 2
        medians.append(ordered[middle] if odd else (ordered[middle - 1] + ordered[middle]) / 2)
    return medians


def _means(group: Group, key: str) -> list[tuple[int, float, float]]:
    """Tokens, mean and standard deviation of a score, where all runs of a group have it."""
    scores = [{score["tokens"]: score[key] for score in run.scores} for run in group.runs]
    found = [(tokens, spread(of_run[tokens] for of_run in scores)) for tokens in set.intersection(*map(set, scores))]
    return sorted((tokens, values["mean"], values["std"]) for tokens, values in found if values)


def _router_charts(groups: Sequence[Group]) -> list[Chart]:
    """Load, entropy and changed share of the routed heads by layer, from each run's last router health."""
    found = {name: run.routing for name, run in _runs(groups) if run.routing}
    charts = []
    for place, (name, health) in enumerate(found.items()):
        if width := max(map(len, health.load)):
            charts.append(
                heat_map(
                    f"load-{place}",
                    f"Load of the routed heads, {name}",
                    [str(layer) for layer in range(len(health.load))],
                    [str(head) for head in range(width)],
                    health.load,
                    ("routed head of the layer", "layer"),
                    "share of held-out tokens that select the head",
                    f"{_LAST} Dead heads, which no token selects: {sum(health.dead_heads)}.",
                )
            )
    order = [name for name, _ in _runs(groups)]
    for key, (title, unit) in _LAYERWISE.items():
        series = {
            name: [(layer, value) for layer, value in enumerate(routed(health, key)) if value is not None]
            for name, health in found.items()
        }
        if any(series.values()):
            order = [name for name, _ in _runs(groups)]
            charts.append(
                line_chart(
                    f"routers-{key}", title, series, Axis("layer"), Axis(unit), "At the last score.", order=order
                )
            )
    return charts


def _runs(groups: Sequence[Group]) -> list[tuple[str, TrainingRun]]:
    return [
        (group.name if len(group.runs) == 1 else f"{group.name}, seed {run.seed}", run)
        for group in groups
        for run in group.runs
    ]


def _chart(name: str, title: str, series: dict[str, Points], unit: str, note: str = "", **marks: Any) -> list[Chart]:
    """The chart, if any run has a point: with all runs, so that each has the same colour in every chart."""
    values = [value for points in series.values() for _, value in points]
    if not values:
        return []
    log = 10 if min(values) > 0 and max(values) > 10 * min(values) else None
    return [line_chart(name, title, series, _TOKENS, Axis(unit, log), note, **marks)]


def _thinned(tokens: list[int], values: list[float], window: int) -> Points:
    """The running median of a curve with few enough points, its ends among them."""
    points = list(zip(tokens, running_median(values, window), strict=True))
    return points[: -1 : max(1, len(points) // _DRAWN)] + points[-1:]


def _smoothing(windows: set[int]) -> str:
    """A chart's note about its running medians."""
    if max(windows, default=1) == 1:
        return ""
    steps = f"{windows.pop()} steps" if len(windows) == 1 else "about 5 % of the run's steps"
    where = f" where it has more than {RAW_POINTS}" if 1 in windows else ""
    return f"Running median of {steps}{where}; the log has every step."
