"""The charts of training runs: scores, the curves of their logs, and the health of their routers."""

import statistics
from collections.abc import Sequence
from typing import Any

from moh_llm.evaluation.charts import Axis, Chart, Points, heat_map, line_chart
from moh_llm.evaluation.runs import Group, TrainingRun, reference_words, spread

_TOKENS = Axis("training tokens")
# Curves that follow from the recipe have no noise to smooth.
EXACT = ("learning_rate", "router_learning_rate", "heads_asked")
# Up to so many points a curve is drawn as it is; a longer one as its running median, at about _DRAWN points.
RAW_POINTS, _DRAWN = 200, 400


def training_charts(groups: Sequence[Group]) -> list[Chart]:
    """Scores on held-out text, losses and settings of the steps, and router health at the last score."""
    return [*_score_charts(groups), *_log_charts(groups), *_router_charts(_named(groups))]


def _score_charts(groups: Sequence[Group]) -> list[Chart]:
    """Each run's scores, and for a group of several runs their mean with a band of one standard deviation."""
    (name, its), runs = reference_words(groups), _named(groups)
    titles = {
        "ratio": ("Held-out perplexity", f"ratio to {its}"),
        "kl": (f"Held-out KL to {name}", "nats per token"),
        "perplexity": ("Held-out perplexity", "perplexity"),
    }
    if all(line.validation.ratio is not None for run in runs.values() for line in run.scored):
        del titles["perplexity"]  # the ratio says more
    charts = []
    for key, (title, unit) in titles.items():
        series = {
            name: [(line.tokens, value) for line in run.scored if (value := getattr(line.validation, key)) is not None]
            for name, run in runs.items()
        }
        means = {f"{group.name}, mean": _means(group, key) for group in groups if len(group.runs) > 1}
        note = "Bands: one standard deviation around the mean of a group's runs." if means else ""
        series |= {name: [(tokens, mean) for tokens, mean, _ in rows] for name, rows in means.items()}
        bands = {name: [(tokens, mean - std, mean + std) for tokens, mean, std in rows] for name, rows in means.items()}
        reference = 1.0 if key == "ratio" else None
        charts += _chart(f"held-out-{key}", title, series, unit, note, bands=bands, reference=reference)
    return charts


def _log_charts(groups: Sequence[Group]) -> list[Chart]:
    """The loss, its terms and the settings of the steps, by number of the log."""
    name, its = reference_words(groups)
    titles = {
        "loss": ("Loss that is minimised", "loss"),
        "kl": (f"KL to {name}", "nats per token"),
        "cross_entropy": ("Cross-entropy", "nats per token"),
        "balance_loss": ("Load-balance loss", "per sequence"),
        "expert_balance_loss": ("Load-balance loss of experts, weighted", "per sequence"),
        "layer_distance": (f"Layers' squared distance to {its}", "relative to their size"),
        "learning_rate": ("Learning rate", "learning rate"),
        "router_learning_rate": ("Learning rate of routers and fallbacks", "learning rate"),
        "gradient_norm": ("Gradient before clipping", "l2 norm"),
        "heads_asked": ("Heads per token that the budgets ask for, mean over layers", "heads"),
        "heads_read": ("Heads per token that are on, mean over layers", "heads"),
        "timing.tokens_per_second": ("Speed", "tokens per second"),
    }
    charts = []
    for key, (title, unit) in titles.items():
        curves = {name: run.points(key) for name, run in _named(groups).items()}
        smooth = key not in EXACT
        series = {name: drawn_points(curve, smooth) for name, curve in curves.items()}
        long = smooth and any(len(curve) > RAW_POINTS for curve in curves.values())
        median = f"Running median over 5 % of the steps, for runs of more than {RAW_POINTS}; the log has every step."
        charts += _chart(f"log-{key.replace('.', '-')}", title, series, unit, median if long else "")
    return charts


def drawn_points(curve: Points, smooth: bool) -> Points:
    """The points of a curve that are drawn, the last among them: values, or medians of 5 % of the steps around each."""
    count = len(curve)
    half = max(11, count // 20) // 2 if smooth and count > RAW_POINTS else 0
    places = [*range(0, count - 1, max(1, count // _DRAWN)), *([count - 1] if count else [])]
    return [
        (curve[at][0], statistics.median(value for _, value in curve[max(0, at - half) : at + half + 1]))
        for at in places
    ]


def _means(group: Group, key: str) -> list[tuple[int, float, float]]:
    """Tokens, mean and standard deviation of a score, where all runs of a group have it."""
    scores = [{line.tokens: getattr(line.validation, key) for line in run.scored} for run in group.runs]
    found = [(tokens, spread(of_run[tokens] for of_run in scores)) for tokens in set.intersection(*map(set, scores))]
    return sorted((tokens, values["mean"], values["std"]) for tokens, values in found if values)


def _router_charts(runs: dict[str, TrainingRun]) -> list[Chart]:
    """Load, entropy and changed share of the routed heads by layer, from each run's last router health."""
    found = {name: run.routing for name, run in runs.items() if run.routing}
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
                    f"At the last score. Dead heads, which no token selects: {sum(health.dead_heads)}.",
                )
            )
    by_layer = {
        "entropy": ("Entropy of the mean routing", "relative to even routing"),
        "changed": ("Tokens with other heads than at the start", "share of tokens that choose"),
    }
    for key, (title, unit) in by_layer.items():
        series = {
            # None or meaningless for a layer in which no head is chosen.
            name: [
                (layer, value)
                for layer, value in enumerate(getattr(health, key) or [])
                if health.load[layer] and value is not None
            ]
            for name, health in found.items()
        }
        if any(series.values()):
            axes = Axis("layer"), Axis(unit)
            charts.append(line_chart(f"routers-{key}", title, series, *axes, "At the last score.", order=list(runs)))
    return charts


def _named(groups: Sequence[Group]) -> dict[str, TrainingRun]:
    """The runs by the names that charts give them: their group's, with the seed where it has several."""
    return {
        group.name if len(group.runs) == 1 else f"{group.name}, seed {run.recipe['seed']}": run
        for group in groups
        for run in group.runs
    }


def _chart(name: str, title: str, series: dict[str, Points], unit: str, note: str, **marks: Any) -> list[Chart]:
    """The chart, if any run has a point: with all runs, so that each has the same colour in every chart."""
    values = [value for points in series.values() for _, value in points]
    if not values:
        return []
    log = 10 if min(values) > 0 and max(values) > 10 * min(values) else None
    return [line_chart(name, title, series, _TOKENS, Axis(unit, log), note, **marks)]
