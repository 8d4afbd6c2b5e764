"""The charts of a report: scores, cost beside the dense base, routers and heads of a model, and training runs.

`moh_llm.analysis` defines each figure of routers and heads.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from moh_llm.evaluation.charts import Axis, Chart, Interval, Points, heat_map, interval_chart, line_chart
from moh_llm.evaluation.runs import Group, Record, TrainingRun, reference_words, spread
from moh_llm.intervals import within
from moh_llm.records.evaluation import EvaluationRecord, Value

_LAYER = Axis("layer")
_COSTS = {
    "flops": (
        "Theoretical FLOPs of a forward pass",
        "FLOPs",
        "FLOPs that could be skipped of heads that are off are not counted.",
    ),
    "seconds": (
        "Measured time of a forward pass",
        "seconds",
        "Model and base, the same weights through its own attention, take turns on the same device. Where all heads "
        "are computed and then masked, a model is no faster than its base.",
    ),
}
_TOKENS = Axis("training tokens")
# Curves that follow from the recipe have no noise to smooth.
EXACT = ("learning_rate", "router_learning_rate", "heads_asked")
# A curve with more points is drawn as its running median, at about _DRAWN points.
RAW_POINTS, _DRAWN = 200, 400


def score_charts(record: EvaluationRecord) -> list[Chart]:
    """Differences to the base, and scores, of each benchmark with 95 % intervals."""
    rows = record.benchmarks
    names, labels = [row.name for row in rows], list(record.models)
    scores = {label: [_interval(row.scores.get(label)) for row in rows] for label in labels}
    deltas = {
        label: [_interval(row.scores[label].delta if label in row.scores else None, -100) for row in rows]
        for label, about in record.models.items()
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


def cost_charts(analyses: Mapping[str, Record], order: Sequence[str]) -> list[Chart]:
    """Theoretical FLOPs and measured seconds of a forward pass, as ratios to the dense base and as they are (Tab. 7).

    ``order``: the labels of all models, which decide on colours.
    """
    length, charts = Axis("tokens", log=2), []
    for key, (title, unit, note) in _COSTS.items():
        if not any(found[key] for found in analyses.values()):
            continue
        ratios = {label: [(c["length"], c["moh"] / c["dense"]) for c in a[key]] for label, a in analyses.items()}
        values = {label: [(cost["length"], cost["moh"]) for cost in a[key]] for label, a in analyses.items()}
        dense = {label: [(cost["length"], cost["dense"]) for cost in a[key]] for label, a in analyses.items()}
        same = all(costs == next(iter(dense.values())) for costs in dense.values())
        values |= {"dense base" if same else f"{label}'s dense base": costs for label, costs in dense.items()}
        heading = f"{title}, ratio to the base's"
        charts += [
            line_chart(f"{key}-ratio", heading, ratios, length, Axis("ratio"), note, reference=1, order=order),
            line_chart(key, title, values, length, Axis(unit, log=10), order=order),
        ]
    return charts


def router_charts(number: int, found: Record) -> list[Chart]:
    """The charts of the ``number``-th model on a page, from the record of its analysis."""
    name = f"m{number}"
    charts = [_load(name, found), _load_by_text(name, found["head_load_by_text"])]
    charts += _scores(name, found["routing_scores"])
    charts.append(_scores_by_text(name, found["routing_scores"]["quantiles"], found["routing_scores_by_text"]))
    return [*charts, *_similarity(name, found["similarity"]), _rank(name, found["feature_rank"])]


def _load(name: str, found: Record) -> Chart:
    load = found["head_load"]["load"]
    first = found["all_heads_until"]
    all_on = f" A document's first {first:,} tokens have all heads on, and are counted." if first else ""
    return heat_map(
        f"{name}-load",
        "Head load in each layer",
        dict(enumerate(load)),
        ("head", "layer"),
        "share of tokens that have the head on",
        f"Activations / tokens over {found['head_load']['tokens']:,} tokens of the benchmarks' prompts (in the form "
        f"of the paper's Fig. 3). Shared heads are always on.{all_on}",
    )


def _load_by_text(name: str, found: Record) -> Chart:
    shared = ", ".join(map(str, found["shared_heads"])) or "none"
    return heat_map(
        f"{name}-texts",
        f"Head load of layer {found['layer']} on each benchmark",
        found["load"],
        ("head", ""),
        "share of tokens that have the head on",
        f"The last layer with routed heads (the paper's Fig. 3 and B). Shared heads: {shared}.",
    )


def _scores(name: str, found: Record) -> list[Chart]:
    middle, low, high = (found["quantiles"].index(share) for share in (0.5, 0.25, 0.75))
    medians, bands, histograms = {}, {}, {}
    for kind in ("shared", "routed", "selected"):
        layers = [(n, layer[kind]) for n, layer in enumerate(found["layers"]) if layer[kind]]
        if layers:
            medians[kind] = [(n, scores["quantiles"][middle]) for n, scores in layers]
            bands[kind] = [(n, scores["quantiles"][low], scores["quantiles"][high]) for n, scores in layers]
            counts = [sum(column) for column in zip(*(scores["histogram"] for _, scores in layers), strict=True)]
            histograms[kind] = [((n + 0.5) / len(counts), count / sum(counts)) for n, count in enumerate(counts)]
    note = (
        "Median and middle half of the scores g_i before quantisation: of all routed heads, of those that are on, and "
        "of shared heads where the router scores them."
    )
    title, shares = "Distribution of routing scores, all layers", Axis("share of scores")
    return [
        line_chart(f"{name}-scores", "Routing scores in each layer", medians, _LAYER, Axis("score"), note, bands=bands),
        line_chart(f"{name}-histogram", title, histograms, Axis("score"), shares),
    ]


def _scores_by_text(name: str, quantiles: list[float], found: Record) -> Chart:
    places, texts = [quantiles.index(share) for share in (0.5, 0.25, 0.75)], found["texts"]
    kinds = [kind for kind in ("shared", "routed", "selected") if any(scores[kind] for scores in texts.values())]
    series = {
        kind: [
            tuple(scores[kind]["quantiles"][place] for place in places) if scores[kind] else None
            for scores in texts.values()
        ]
        for kind in kinds
    }
    return interval_chart(
        f"{name}-scores-texts",
        f"Routing scores of layer {found['layer']} on each benchmark",
        list(texts),
        series,
        "score",
        "Median and middle half of the scores g_i before quantisation (the paper's Fig. C to E); the last layer with "
        "routed heads.",
    )


def _similarity(name: str, found: Record) -> list[Chart]:
    kinds = {
        "patterns": (
            "Similarity of attention patterns",
            "1 - 0.5 E|A - A'|_1 over pairs of heads of a layer (Tab. B); 1: all alike.",
        ),
        "outputs": (
            "Similarity of head outputs",
            "Mean cosine between two heads that a token has on (Tab. B); 1: all alike.",
        ),
    }
    charts = []
    for key, (title, note) in kinds.items():
        series = {
            shown: _by_layer(found[which][key]) for which, shown in (("moh", "MoH"), ("all_heads", "all heads on"))
        }
        if any(series.values()):
            charts.append(line_chart(f"{name}-{key}", title, series, _LAYER, Axis("similarity"), note))
    return charts


def _rank(name: str, found: Record) -> Chart:
    series = {
        f"{kind} heads": [(layer, r["energy"] / r["width"]) for layer, r in enumerate(found[kind]) if r["width"]]
        for kind in ("shared", "routed")
    }
    widest = max(rank["width"] for kind in ("shared", "routed") for rank in found[kind])
    bounded = " Too few tokens for such wide features: they bound the rank." if found["tokens"] < 4 * widest else ""
    return line_chart(
        f"{name}-rank",
        "Feature rank of shared and routed heads",
        {kind: points for kind, points in series.items() if points},
        _LAYER,
        Axis("rank / width"),
        f"Number of singular values that hold 99 % of the squared norm of a layer's head outputs, over their width; "
        f"{found['tokens']:,} tokens. A routed head that is off gives its fallback, or zeros.{bounded}",
    )


def _by_layer(values: Iterable[float | None]) -> Points:
    return [(layer, value) for layer, value in enumerate(values) if value is not None]


def _interval(found: Value | None, lowest: float = 0) -> Interval | None:
    """A score or a difference with its 95 % interval, cut to the values between ``lowest`` and 100 %."""
    if found is None:
        return None
    return (found.value, *(within(found.interval, lowest, 100) if found.interval else (None, None)))


def training_charts(groups: Sequence[Group]) -> list[Chart]:
    """Scores on held-out text, losses and settings of the steps, and router health at the last score."""
    return [*_held_out_charts(groups), *_log_charts(groups), *_health_charts(_named(groups))]


def _held_out_charts(groups: Sequence[Group]) -> list[Chart]:
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


def _health_charts(runs: dict[str, TrainingRun]) -> list[Chart]:
    """Load, entropy and changed share of the routed heads by layer, from each run's last router health."""
    found = {name: run.routing for name, run in runs.items() if run.routing}
    charts = []
    for place, (name, health) in enumerate(found.items()):
        if any(health.load):
            charts.append(
                heat_map(
                    f"load-{place}",
                    f"Load of the routed heads, {name}",
                    dict(enumerate(health.load)),
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
        series = {}
        for name, health in found.items():
            pairs = zip(getattr(health, key) or [], health.load, strict=False)
            series[name] = _by_layer(value if load else None for value, load in pairs)  # layers that choose heads
        if any(series.values()):
            note, order = "At the last score.", list(runs)
            charts.append(line_chart(f"routers-{key}", title, series, _LAYER, Axis(unit), note, order=order))
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
