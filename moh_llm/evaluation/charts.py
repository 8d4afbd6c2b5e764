"""Line charts, interval charts and heat maps as inline SVG. Needs matplotlib.

    chart = LineChart("loss", "Loss", "", {"loss": [(32, 3.1), (64, 2.9)]}, Axis("training tokens"), Axis("loss"))
    page = f"<figure>{chart.svg}</figure>"

A chart holds the numbers that it shows; ``svg`` draws it. The page's style sheet sets the colours, so that a chart
follows the reader's light or dark theme: the colours that matplotlib draws in become CSS variables; ``png`` keeps them.
"""

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from moh_llm.errors import UserError

try:
    import matplotlib.style
    from matplotlib import colormaps
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
except ModuleNotFoundError as error:
    raise UserError('the report needs matplotlib: pip install "moh-llm[report]"') from error

Points = Sequence[tuple[float, float]]
Interval = tuple[float, float | None, float | None]
"""A value and the ends of an interval around it, if they are known."""

# Those of the style sheet's light theme. Colour-blind readers tell the series apart.
INK, FAINT = "#1b1f24", "#8b949e"
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b07900", "#3a9bdc", "#010101")
_VARIABLES = {INK: "--ink", FAINT: "--faint"} | {colour: f"--series-{n}" for n, colour in enumerate(SERIES, start=1)}
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_WIDTH = 4.6  # inches; the page scales charts to their column
_STYLE = {
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "grid.color": FAINT,
    "grid.alpha": 0.35,
    "grid.linewidth": 0.5,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "legend.frameon": False,
    "legend.fontsize": 8,
    "svg.fonttype": "none",
}


@dataclass(frozen=True)
class Axis:
    """Label of an axis, and the base of its logarithm if it is logarithmic."""

    title: str
    log: int | None = None


@dataclass(frozen=True)
class Chart:
    """A chart, which a subclass draws.

    Attributes:
        name: unique on its page.
        title: what is shown.
        note: how to read it, and which table or figure of the paper it is; may be empty.
    """

    name: str
    title: str
    note: str

    def _draw(self, figure: Figure, axes: Axes) -> None:
        raise NotImplementedError

    def _save(self, title: str, **options: Any) -> bytes:
        written = io.BytesIO()
        # The salt makes ids repeat, so that pages can be compared.
        with matplotlib.style.context(["default", _STYLE | {"svg.hashsalt": self.name}]):
            figure = Figure(figsize=(_WIDTH, 2.9), layout="constrained")
            self._draw(figure, figure.subplots())
            figure.suptitle(title, wrap=True)
            figure.savefig(written, **options)
        return written.getvalue()

    @property
    def png(self) -> bytes:
        """The picture on white, with its title."""
        return self._save(_label(self.title, 150), format="png", dpi=160, facecolor="white")

    @property
    def svg(self) -> Markup:
        """The picture to stand in a page: no prolog, no fixed size, colours by name, ids that no other chart has."""
        text = self._save("", format="svg").decode()
        text = text[text.index("<svg") :]
        for colour, variable in _VARIABLES.items():
            text = text.replace(colour, f"var({variable})")
        # Groups are numbered alike in each chart.
        text = re.sub(r'\bid="([^"]+)"', rf'id="{self.name}-\1"', text)
        text = re.sub(r'(href="|url\()#', rf"\1#{self.name}-", text)
        text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
        size = re.match(r'<svg[^>]*viewBox="([^"]+)"', text)
        opening = f'<svg xmlns:xlink="http://www.w3.org/1999/xlink" viewBox="{size[1]}" role="img" aria-label="'
        return Markup(opening) + self.title + Markup('">') + Markup(text[text.index(">") + 1 :])


@dataclass(frozen=True)
class LineChart(Chart):
    """Curves of points (x, y) by name.

    Attributes:
        reference: a value to compare with, drawn as a dotted line.
        order: names whose places decide on colours, so that a series looks alike in all charts of a page.
    """

    series: Mapping[str, Points]
    x: Axis
    y: Axis
    reference: float | None = None
    order: Sequence[str] = ()

    def _draw(self, figure: Figure, axes: Axes) -> None:
        axes.grid(True)
        many = max(map(len, self.series.values())) > 40
        for key, points in self.series.items():
            look = _look(key, [*self.order, *self.series]) | ({"marker": "none"} if many else {})
            axes.plot(*zip(*points, strict=True), label=_label(key), linewidth=1.4, markersize=3.5, **look)
        if self.reference is not None:
            axes.axhline(self.reference, color=INK, linewidth=0.8, linestyle=":", zorder=1)
        _set_axis(axes, "x", self.x)
        _set_axis(axes, "y", self.y)
        if len(self.series) > 1:
            _legend(figure, axes)


@dataclass(frozen=True)
class IntervalChart(Chart):
    """A row for each name, and in it the values of all series with their intervals; None where there is no value.

    Attributes:
        order: as of `LineChart`.
        zero: draw the line of no difference.
    """

    names: Sequence[str]
    series: Mapping[str, Sequence[Interval | None]]
    unit: str
    order: Sequence[str]
    zero: bool = False

    def _draw(self, figure: Figure, axes: Axes) -> None:
        axes.grid(True)
        figure.set_size_inches(_WIDTH, 0.9 + (0.16 + 0.1 * len(self.series)) * len(self.names))
        for number, (key, values) in enumerate(self.series.items()):
            shift = 0.6 * (number + 0.5) / len(self.series) - 0.3
            known = [(row, *value) for row, value in enumerate(values) if value is not None]
            below = [0 if low is None else value - low for _, value, low, _ in known]
            above = [0 if high is None else high - value for _, value, _, high in known]
            at, rows = [value for _, value, _, _ in known], [row + shift for row, *_ in known]
            look = _look(key, self.order) | {"linestyle": "none"}
            axes.errorbar(at, rows, xerr=[below, above], markersize=4, elinewidth=1, label=_label(key), **look)
        if self.zero:
            axes.axvline(0, color=INK, linewidth=0.8)
        axes.set_yticks(range(len(self.names)), [_label(name, 24) for name in self.names])
        axes.set_ylim(len(self.names) - 0.5, -0.5)
        axes.set_xlabel(self.unit)
        if len(self.series) > 1:
            _legend(figure, axes)


@dataclass(frozen=True)
class HeatMap(Chart):
    """Values from 0 to 1 as colours, in ``unit``, the first row above; rows may differ in length.

    Attributes:
        axes_titles: of x and y.
        width: what a column counts for on the x axis.
    """

    rows: Sequence[Sequence[float]]
    axes_titles: tuple[str, str]
    unit: str
    width: int = 1

    def _draw(self, figure: Figure, axes: Axes) -> None:
        figure.set_size_inches(_WIDTH, min(7.0, 1.2 + max(0.16 * len(self.rows), 1.0)))
        columns = max(map(len, self.rows))
        full = [[*row, *[float("nan")] * (columns - len(row))] for row in self.rows]
        colours = colormaps["cividis"].resampled(20)
        mesh = axes.pcolormesh(full, cmap=colours, vmin=0, vmax=1, edgecolors="face", linewidth=0.2)
        figure.colorbar(mesh, ax=axes, label=self.unit, location="bottom", aspect=40, shrink=0.8)
        for axis, count, width in ((axes.xaxis, columns, self.width), (axes.yaxis, len(self.rows), 1)):
            shown = range(0, count, -(-count // 16))
            axis.set_ticks([place + 0.5 for place in shown], [str(place * width) for place in shown])
            axis.set_tick_params(length=0)
        axes.set(xlabel=self.axes_titles[0], ylabel=self.axes_titles[1])
        axes.invert_yaxis()


def _label(text: str, longest: int = 42) -> str:
    """A name as a chart can show it: short, no formula, and no entry that a legend hides."""
    text = text if len(text) <= longest else "…" + text[1 - longest :]
    return (" " if text.startswith("_") else "") + text.replace("$", r"\$")


def _look(name: str, names: Sequence[str]) -> dict[str, str]:
    """Colour and marker of a series by the place of its name; where colours repeat, the markers differ."""
    turn, place = divmod(list(dict.fromkeys(names)).index(name), len(SERIES))
    return {"color": SERIES[place], "marker": _MARKERS[(place + turn) % len(_MARKERS)]}


def _set_axis(axes: Axes, which: str, wanted: Axis) -> None:
    axis = getattr(axes, f"{which}axis")
    axis.set_label_text(wanted.title)
    if wanted.log is None:
        axis.set_major_locator(MaxNLocator(6))
    else:
        getattr(axes, f"set_{which}scale")("log", base=wanted.log)
        axis.set_major_locator(LogLocator(wanted.log, subs=(1,) if wanted.log == 2 else (1, 2, 5), numticks=7))
        axis.set_minor_formatter(NullFormatter())
    axis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))


def _short(value: float) -> str:
    for least, size, unit in ((1e12, 1e12, "T"), (1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= least:
            return f"{value / size:.4g}{unit}"
    return f"{value:.6g}"


def _legend(figure: Figure, axes: Axes) -> None:
    """A legend below the plot, which keeps its height."""
    handles, names = axes.get_legend_handles_labels()
    columns = max(1, min(len(names), 60 // (max(map(len, names)) + 6)))
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + 0.16 * -(-len(names) // columns))
    figure.legend(handles, names, loc="outside lower center", ncols=columns)
