"""How every picture looks: colours, axes, legend, file."""

import bisect
import textwrap
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

# Okabe and Ito's colours, which colour-blind readers tell apart, without the yellow, which white swallows.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES = ("-", "--", "-.", ":")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
# Up to here every point is a line's own; above, a running median shows the trend.
RAW_POINTS = 200
_UNIT_LETTERS = 36  # of a line beside a panel, which is so high
_STYLE = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "savefig.dpi": 140,
    "agg.path.chunksize": 10_000,
}


def in_our_style() -> AbstractContextManager[None]:
    """A context in which figures get our style, whatever the user's own settings."""
    return matplotlib.style.context(["default", _STYLE])


def panels(count: int, columns: int = 2, width: float = 5.0, height: float = 3.0) -> tuple[Figure, list[Axes]]:
    """A figure with ``count`` panels of some inches."""
    columns = min(columns, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(columns * width, rows * height), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08)
    every = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
    for axes in every[count:]:
        axes.remove()
    return figure, every[:count]


def line_style(index: int) -> dict[str, str]:
    """Colour and dashes of the group of that index."""
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": _DASHES[index // len(COLOURS) % len(_DASHES)]}


def marker(index: int) -> str:
    """Marker of the group of that index: where the colours begin again, each meets another marker than before."""
    return _MARKERS[(index + index // len(COLOURS)) % len(_MARKERS)]


def label(text: str, longest: int = 42) -> str:
    """A name as a picture can show it: short enough, and no formula or hidden entry by accident."""
    text = text if len(text) <= longest else "…" + text[1 - longest :]
    return (" " if text.startswith("_") else "") + text.replace("$", r"\$")


def tokens_axis(axes: Axes) -> None:
    """The x axis of every curve."""
    axes.set_xlabel("training tokens")
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: tokens_text(value)))


def tokens_text(tokens: float) -> str:
    """A number of tokens in few letters: ``1.5M``."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(tokens) >= size:
            return f"{tokens / size:g}{unit}"
    return f"{tokens:g}"


def value_axis(axes: Axes, title: str, unit: str, values: Iterable[float]) -> None:
    """Name a panel and its y axis, which is logarithmic where its values span more than a factor of ten."""
    shown = list(values)
    axes.set_title(title, loc="left")
    axes.set_ylabel(textwrap.fill(unit, _UNIT_LETTERS))
    plain = FuncFormatter(lambda value, _: f"{value:.6g}")
    if shown and min(shown) > 0 and max(shown) > 10 * min(shown):
        axes.set_yscale("log")
        decades = max(shown) / min(shown)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 1e3 else (1,)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(plain)


def legend_below(figure: Figure, handles: Sequence[Line2D]) -> None:
    """One legend for all panels, under them, where it covers no curve."""
    longest = max(len(handle.get_label()) for handle in handles)
    width, height = figure.get_size_inches()
    columns = max(1, min(len(handles), int(width / (0.6 + 0.085 * longest))))
    rows = -(-len(handles) // columns)
    figure.set_size_inches(width, height + 0.2 + 0.21 * rows)  # the panels keep their height
    figure.legend(handles=handles, loc="outside lower center", ncols=columns)


def save(figure: Figure, path: Path) -> None:
    """Write a picture as PNG."""
    figure.savefig(path, format="png")


def median_window(count: int) -> int:
    """Of how many points the running median of ``count`` is one: 5 %, or 1 where each is drawn as it is."""
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
