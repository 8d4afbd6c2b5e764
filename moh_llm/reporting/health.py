"""Pictures of router health, from the last scores on held-out text. Needs matplotlib."""

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from moh_llm.reporting import style
from moh_llm.reporting.groups import Group
from moh_llm.reporting.runs import Record, TrainingRun, routed

_LAYERWISE = {
    "entropy": ("Entropy of the mean routing", "relative to even routing"),
    "changed": ("Tokens with other heads than at the start", "share of tokens"),
}


def draw_load(path: Path, groups: Sequence[Group]) -> bool:
    """Draw a map of layers by routed heads for each run; False where no run has one."""
    found = [(run, health) for _, run, health in _healths(groups) if any(health["load"])]
    if not found:
        return False
    layers, columns = max(len(health["load"]) for _, health in found), 3
    figure, every = style.panels(len(found), columns, width=4.2, height=min(8.0, 1.8 + 0.11 * max(layers, 10)))
    for axes, (run, health) in zip(every, found, strict=True):
        image = _draw_map(axes, health["load"])
        axes.set_title(style.label(run.name, 36))
    figure.colorbar(image, ax=every[:columns], label="share of tokens that select the head")
    if any(0 in layer for _, health in found for layer in health["load"]):
        dead = Line2D([], [], color="#D55E00", linestyle="", marker="x", label="dead: no token selects it")
        style.legend_below(figure, [dead])
    style.save(figure, path)
    return True


def _draw_map(axes: Axes, load: Sequence[Sequence[float]]) -> AxesImage:
    """One run's map; layers with fewer routed heads leave grey what they lack."""
    width = max(map(len, load))
    rows = [[*layer, *[math.nan] * (width - len(layer))] for layer in load]
    image = axes.imshow(rows, cmap="viridis", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    dead = [(head, layer) for layer, shares in enumerate(load) for head, share in enumerate(shares) if share == 0]
    axes.plot([head for head, _ in dead], [layer for _, layer in dead], "x", color="#D55E00", markersize=5)
    axes.set(facecolor="#E5E5E5", xlabel="routed head of the layer", ylabel="layer")
    axes.grid(visible=False)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    return image


def draw_layers(path: Path, groups: Sequence[Group]) -> bool:
    """Draw entropy and changed share of each layer; False where no run has them."""
    found = _healths(groups)
    shown = [
        key for key in _LAYERWISE if any(value is not None for *_, health in found for value in routed(health, key))
    ]
    if not shown:
        return False
    figure, every = style.panels(len(shown), height=3.4)
    for axes, key in zip(every, shown, strict=True):
        for index, _, health in found:
            values = [math.nan if value is None else value for value in routed(health, key)]
            axes.plot(range(len(values)), values, linewidth=1, marker="o", markersize=3, **style.line_style(index))
        title, unit = _LAYERWISE[key]
        axes.set_title(title, loc="left")
        axes.set(xlabel="layer", ylabel=unit)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    shown_groups = sorted({index for index, _, _ in found})
    style.legend_below(
        figure, [Line2D([], [], label=style.label(groups[i].name), **style.line_style(i)) for i in shown_groups]
    )
    style.save(figure, path)
    return True


def _healths(groups: Sequence[Group]) -> list[tuple[int, TrainingRun, Record]]:
    """Index of its group, run and last router health of each run that has one."""
    return [(index, run, run.routing) for index, group in enumerate(groups) for run in group.runs if run.routing]
