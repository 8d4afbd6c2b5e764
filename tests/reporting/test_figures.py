"""What the pictures show, read from the figures before they are written."""

import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from moh_llm.reporting import style
from moh_llm.reporting.figures import draw
from moh_llm.reporting.groups import group_runs
from moh_llm.reporting.runs import read_runs

MakeRun = Callable[..., Path]
LogLines = Callable[[int, int, float], list[dict[str, Any]]]


@pytest.fixture
def figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Figure]]:
    """Draw some runs' pictures and return the figures by file name."""

    def make(*runs: Path) -> dict[str, Figure]:
        found: dict[str, Figure] = {}
        monkeypatch.setattr(style, "save", lambda figure, path: found.update({path.name: figure}))
        draw(tmp_path, group_runs(read_runs(runs)))
        return found

    return make


def panel(figure: Figure, title: str) -> Axes:
    (axes,) = [axes for axes in figure.axes if title in (axes.get_title(), axes.get_title(loc="left"))]
    return axes


def points(axes: Axes, line: int = 0) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in axes.lines[line].get_xydata()]


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_curves_are_the_logs_numbers(make_run: MakeRun, log_lines: LogLines, figures) -> None:
    lines = log_lines(6, 3, 0.3)
    lines[4] |= {"dropped": "the loss is not finite", "loss": None}
    loss = figures(make_run("run", lines=lines))["loss.png"]
    kept = [line for line in lines[1:] if line["step"] != 4]
    assert points(panel(loss, "KL to the base")) == [(line["tokens"], pytest.approx(line["kl"])) for line in kept]
    assert [axes.get_title(loc="left") for axes in loss.axes] == [
        "Loss that is minimised",
        "KL to the base",
        "Cross-entropy",
        "Load-balance loss",
    ]
    # The dropped step is a cross on the upper edge.
    assert points(panel(loss, "Loss that is minimised"), 1) == [(4 * 32, 1.0)]
    assert legend(loss) == ["run", "dropped step"]
    for axes in loss.axes:
        assert axes.get_xlabel() == "training tokens" and axes.get_ylabel()


def test_a_wide_range_is_logarithmic(make_run: MakeRun, log_lines: LogLines, figures) -> None:
    lines = log_lines(6, 3, 0.3)
    lines[3]["validation"]["kl"] = lines[0]["validation"]["kl"] / 11
    wide = figures(make_run("wide", lines=lines))["held_out.png"]
    assert panel(wide, "Held-out KL to the base").get_yscale() == "log"
    assert panel(wide, "Held-out perplexity").get_yscale() == "linear"
    narrow = figures(make_run("narrow", scale=0.3))["held_out.png"]
    assert panel(narrow, "Held-out KL to the base").get_yscale() == "linear"


def test_a_group_has_its_mean_and_a_band(make_run: MakeRun, figures) -> None:
    scales = (0.3, 0.32, 0.37)
    runs = [make_run(f"run-s{seed}", seed=seed, scale=scale) for seed, scale in enumerate(scales)]
    figure = figures(*runs, make_run("short", scale=0.1, steps=3, recipe={"max_steps": 9}))["held_out.png"]
    axes = panel(figure, "Held-out KL to the base")
    # Three seeds, their mean, and the other run.
    means = [statistics.mean(scales) / (step + 2) for step in (0, 3, 6)]
    assert points(axes, 3) == [(step * 32, pytest.approx(mean)) for step, mean in zip((0, 3, 6), means, strict=True)]
    assert points(axes, 4) == [(0, pytest.approx(0.05)), (96, pytest.approx(0.02))]
    (band,) = axes.collections
    edges = band.get_paths()[0].vertices[:, 1]
    assert edges.max() == pytest.approx(means[0] + statistics.stdev(scales) / 2)
    assert edges.min() == pytest.approx(means[2] - statistics.stdev(scales) / 8)
    assert legend(figure) == ["run (3 seeds)", "short", "base"]


def test_long_runs_get_a_running_median(make_run: MakeRun, log_lines: LogLines, figures) -> None:
    short = figures(make_run("short", steps=200, every=50))["loss.png"]
    assert len(panel(short, "Cross-entropy").lines) == 1
    long = figures(make_run("long", steps=201, every=50))
    raw, smooth = panel(long["loss.png"], "Cross-entropy").lines
    expected = [line["cross_entropy"] for line in log_lines(201, 50, 0.3)[1:]]
    assert raw.get_ydata() == pytest.approx(expected)
    assert smooth.get_ydata()[100] == pytest.approx(statistics.median(expected[95:106]))
    assert raw.get_linewidth() < smooth.get_linewidth()
    assert legend(long["loss.png"]) == ["long", "each step", "running median"]
    # Learning rates have no noise to smooth.
    assert len(panel(long["steps.png"], "Learning rate").lines) == 1


@pytest.mark.parametrize("window", [1, 3, 11, 99])
def test_the_running_median_is_one(window: int) -> None:
    draw_one = random.Random(window)
    values = [draw_one.choice([draw_one.random(), 0.5]) for _ in range(60)]
    half = window // 2
    assert style.running_median(values, window) == [
        statistics.median(values[max(0, index - half) : index + half + 1]) for index in range(60)
    ]


def test_router_health_is_the_last_one(make_run: MakeRun, log_lines: LogLines, routing, figures) -> None:
    lines = log_lines(6, 3, 0.3)
    lines[3]["routing"] = routing([[0.1, 0.2], [0.3], []], None)
    lines[6]["routing"] = routing([[0.0, 1.0], [0.4], []], [0.5, 0.2, 0.0])
    found = figures(make_run("run", lines=lines))
    (image,) = panel(found["routing_load.png"], "run").images
    load = np.ma.filled(image.get_array(), np.nan)
    np.testing.assert_array_equal(load, [[0.0, 1.0], [0.4, np.nan], [np.nan, np.nan]])
    assert points(panel(found["routing_load.png"], "run")) == [(0, 0)]  # the dead head: column, row
    layers = found["routing_layers.png"]
    changed = points(panel(layers, "Tokens with other heads than at the start"))
    assert changed[:2] == [(0, 0.5), (1, 0.2)] and np.isnan(changed[2][1])
    assert points(panel(layers, "Entropy of the mean routing"))[:2] == [(0, 0.9), (1, pytest.approx(0.8))]


def test_nothing_lies_on_anything(make_run: MakeRun, log_lines: LogLines, routing, figures) -> None:
    """Many runs with long and odd names: texts do not overlap, panels and legend neither, all inside the picture."""
    runs = []
    for seed in range(9):
        lines = log_lines(6, 3, 0.1 * 10 ** (seed / 4))
        lines[0]["routing"] = routing([[seed / 9] * 4, [0.0, 1.0]], [0.5, 0.1])
        lines[3]["dropped"] = "the loss jumped"
        name = f"llama32-1b-recovery-with-layers-matched-{seed}-$x_{seed}$"
        runs.append(make_run(name, seed=seed, lines=lines, recipe={"max_steps": 6 + seed // 2}))
    found = figures(*runs)
    assert len(found) == 5
    for name, figure in found.items():
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        renderer = canvas.get_renderer()
        boxes = [axes.get_tightbbox(renderer) for axes in figure.axes] + [
            box.get_window_extent(renderer) for box in figure.legends
        ]
        for index, box in enumerate(boxes):
            assert box.x0 >= 0 and box.y0 >= 0, name
            assert box.x1 <= figure.bbox.width and box.y1 <= figure.bbox.height, name
            assert not any(box.overlaps(other) for other in boxes[:index]), name
        for axes in figure.axes:
            for axis in (axes.xaxis, axes.yaxis):
                texts = [text for text in axis.get_ticklabels() if _shown(text, axes)]
                extents = [text.get_window_extent(renderer) for text in texts]
                assert not any(a.overlaps(b) for i, a in enumerate(extents) for b in extents[:i]), (name, texts)


def _shown(text: Text, axes: Axes) -> bool:
    low, high = sorted(axes.get_xlim() if text in axes.xaxis.get_ticklabels() else axes.get_ylim())
    place = text.get_position()[0 if text in axes.xaxis.get_ticklabels() else 1]
    return bool(text.get_text()) and low <= place <= high
