"""The pictures of a report: losses, held-out scores, settings of the steps, and router health. Needs matplotlib."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from moh_llm.reporting import style
from moh_llm.reporting.groups import Group, reference_words, spread
from moh_llm.reporting.health import draw_layers, draw_load
from moh_llm.reporting.runs import TrainingRun

# Per key of the log a panel's title and what its y axis says.
SETTINGS = {
    "learning_rate": ("Learning rate", "learning rate"),
    "router_learning_rate": ("Learning rate of the routers", "learning rate"),
    "gradient_norm": ("Gradient before clipping", "l2 norm"),
    "active_heads": ("Active heads, mean over layers", "heads per layer"),
    "timing.tokens_per_second": ("Speed", "tokens per second"),
}
# These follow from the recipe, so they have no noise, and the runs' curves lie on one another.
EXACT = ("learning_rate", "router_learning_rate", "active_heads")
_REFERENCE = {"color": "#555555", "linewidth": 1, "linestyle": ":", "zorder": 1}


@dataclass(frozen=True)
class Picture:
    """A file of the report and what it shows."""

    file: str
    title: str


def loss_titles(groups: Sequence[Group]) -> dict[str, tuple[str, str]]:
    """Likewise of the loss and its terms, which name what the runs are compared with."""
    name, its = reference_words(groups)
    return {
        "loss": ("Loss that is minimised", "loss"),
        "kl": (f"KL to {name}", "nats per token"),
        "cross_entropy": ("Cross-entropy", "nats per token"),
        "balance_loss": ("Load-balance loss", "per block"),
        "layer_distance": (f"Layers' squared distance to {its}", "relative to their size"),
    }


def score_titles(groups: Sequence[Group]) -> dict[str, tuple[str, str]]:
    """Likewise of the scores on held-out text."""
    name, its = reference_words(groups)
    return {
        "ratio": ("Held-out perplexity", f"ratio to {its}"),
        "kl": (f"Held-out KL to {name}", "nats per token"),
        "perplexity": ("Held-out perplexity", "perplexity"),
    }


def draw(folder: Path, groups: Sequence[Group]) -> list[Picture]:
    """Write into ``folder`` every picture that the logs have data for."""
    drawings: list[tuple[Picture, Callable[[Path, Sequence[Group]], bool]]] = [
        (Picture("held_out.png", "Held-out text"), draw_scores),
        (Picture("loss.png", "Loss and its terms"), draw_losses),
        (Picture("steps.png", "Learning rates, gradient norm, active heads, speed"), draw_settings),
        (
            Picture(
                "routing_load.png",
                "Share of held-out tokens that select each routed head, at the last score (grey: no such head)",
            ),
            draw_load,
        ),
        (Picture("routing_layers.png", "Routers by layer, at the last score"), draw_layers),
    ]
    with style.in_our_style():
        return [picture for picture, drawing in drawings if drawing(folder / picture.file, groups)]


def draw_losses(path: Path, groups: Sequence[Group]) -> bool:
    """Draw each term of the loss against tokens; False where the logs have no step yet."""
    return _draw_curves(path, groups, loss_titles(groups), mark_dropped=True)


def draw_settings(path: Path, groups: Sequence[Group]) -> bool:
    """Draw what belongs to the steps but is no loss; False where the logs have no step yet."""
    return _draw_curves(path, groups, SETTINGS, mark_dropped=False)


def draw_scores(path: Path, groups: Sequence[Group]) -> bool:
    """Draw the scores on held-out text; False where there are none.

    A group of several runs gets its mean and a band of one standard deviation, over the token
    counts at which all of its runs were scored.
    """
    runs = [run for group in groups for run in group.runs]
    if not any(run.scores for run in runs):
        return False
    # Perplexity alone says less than its ratio; it is for runs that have nothing else.
    shown = [key for key in ("ratio", "kl") if any(score[key] is not None for run in runs for score in run.scores)]
    if any(score["ratio"] is None for run in runs for score in run.scores):
        shown.append("perplexity")
    titles = score_titles(groups)
    figure, every = style.panels(len(shown), height=3.4)
    for axes, key in zip(every, shown, strict=True):
        values: list[float] = []
        for index, group in enumerate(groups):
            look = style.line_style(index) | {"marker": style.marker(index), "markersize": 4}
            for run in group.runs:
                points = [(score["tokens"], score[key]) for score in run.scores if score[key] is not None]
                alone = {"linewidth": 1.6} if len(group.runs) == 1 else {"linewidth": 0.8, "alpha": 0.4, "marker": ""}
                axes.plot(*_columns(points), **(look | alone))
                values += [value for _, value in points]
            if len(group.runs) > 1:
                _draw_mean(axes, group, key, look)
        if key == "ratio":
            axes.axhline(1, **_REFERENCE)
        style.value_axis(axes, *titles[key], values)
        style.tokens_axis(axes)
    handles = [_handle(groups, index, marker=True) for index in range(len(groups))]
    if "ratio" in shown:
        handles.append(Line2D([], [], label=reference_words(groups)[0].removeprefix("the "), **_REFERENCE))
    style.legend_below(figure, handles)
    style.save(figure, path)
    return True


def _draw_mean(axes: Axes, group: Group, key: str, look: dict[str, str]) -> None:
    scores = [{score["tokens"]: score[key] for score in run.scores} for run in group.runs]
    common = sorted(set.intersection(*map(set, scores)))
    found = [(tokens, spread(of_run[tokens] for of_run in scores)) for tokens in common]
    rows = [(tokens, s["mean"], s["mean"] - s["std"], s["mean"] + s["std"]) for tokens, s in found if s]
    tokens, means, low, high = _columns(rows, 4)
    axes.plot(tokens, means, linewidth=1.8, **look)
    axes.fill_between(tokens, low, high, color=look["color"], alpha=0.18, linewidth=0)


def _draw_curves(path: Path, groups: Sequence[Group], names: dict[str, tuple[str, str]], mark_dropped: bool) -> bool:
    runs = [(index, run) for index, group in enumerate(groups) for run in group.runs]
    shown = [key for key in names if any(run.points(key)[0] for _, run in runs)]
    if not shown:
        return False
    figure, every = style.panels(len(shown))
    smoothed = dropped = False
    for axes, key in zip(every, shown, strict=True):
        values: list[float] = []
        for index, run in runs:
            tokens, points = run.points(key)
            values += points
            if key in EXACT:
                width = min(6.0, 1.2 + 1.2 * (len(groups) - 1 - index))  # later ones leave a rim of earlier ones
                axes.plot(tokens, points, linewidth=width, **style.line_style(index))
            else:
                smoothed |= _draw_curve(axes, tokens, points, style.line_style(index), len(runs))
        style.value_axis(axes, *names[key], values)
        style.tokens_axis(axes)
        if mark_dropped:
            dropped |= _mark_dropped(axes, [(index, run) for index, run in runs if run.points(key)[0]])
    handles = [_handle(groups, index) for index in range(len(groups))]
    if smoothed:
        handles.append(Line2D([], [], color="#777777", linewidth=0.6, alpha=0.6, label="each step"))
        handles.append(Line2D([], [], color="#777777", linewidth=1.6, label="running median"))
    if dropped:
        handles.append(Line2D([], [], color="#777777", linestyle="", marker="x", label="dropped step"))
    style.legend_below(figure, handles)
    style.save(figure, path)
    return True


def _draw_curve(axes: Axes, tokens: Sequence[int], points: Sequence[float], look: dict[str, str], curves: int) -> bool:
    """One run's curve; True where it is long enough for a running median."""
    window = style.median_window(len(points))
    if window > 1:
        axes.plot(tokens, points, linewidth=0.5, alpha=0.35 if curves < 4 else 0.15, **look)
        axes.plot(tokens, style.running_median(points, window), linewidth=1.5, **look)
        return True
    # A curve of one point is a point.
    axes.plot(tokens, points, linewidth=1.1, marker="o" if len(points) == 1 else "", markersize=4, **look)
    return False


def _mark_dropped(axes: Axes, runs: Sequence[tuple[int, TrainingRun]]) -> bool:
    """Crosses on the panel's upper edge: a dropped step's loss would flatten the curve, and may not be a number."""
    found = False
    for index, run in runs:
        tokens = [step["tokens"] for step in run.dropped]
        if not tokens:
            continue
        found = True
        axes.plot(
            tokens,
            [1.0] * len(tokens),
            linestyle="",
            marker="x",
            markersize=6,
            color=style.line_style(index)["color"],
            transform=axes.get_xaxis_transform(),
            clip_on=False,
        )
    return found


def _handle(groups: Sequence[Group], index: int, marker: bool = False) -> Line2D:
    """The legend's entry of a group."""
    count = len(groups[index].runs)
    name = style.label(groups[index].name) + (f" ({count} seeds)" if count > 1 else "")
    shape = style.marker(index) if marker else ""
    return Line2D([], [], label=name, marker=shape, markersize=4, **style.line_style(index))


def _columns(rows: Sequence[tuple[float, ...]], count: int = 2) -> list[list[float]]:
    """The columns of a table, empty ones where it has no row."""
    return [[row[column] for row in rows] for column in range(count)]
