"""Charts as inline SVG, each with the numbers that it shows. Needs matplotlib.

The style sheet of the page sets the colours, so that a chart follows the reader's light or dark theme: matplotlib draws
in placeholder colours, which become CSS variables.

Charts have a name that is unique on the page, a title, and a note on how to read them. ``order`` lists names whose
places decide on colours and markers, so that a series looks alike in all charts of a page.
"""

import io
import re
from collections.abc import Iterable, Mapping, Sequence
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

INK, FAINT = "#0a0b01", "#0a0b02"
# Colours that colour-blind readers tell apart; further series differ by their dashes and markers.
SERIES = tuple(f"#0a0c{number:02x}" for number in range(1, 8))
_VARIABLES = {INK: "--ink", FAINT: "--faint"} | {colour: f"--series-{n}" for n, colour in enumerate(SERIES, start=1)}
_DASHES = ("-", "--", "-.", ":")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_MAP = colormaps["cividis"].resampled(20)
_WIDTH = 4.6  # inches; the page scales charts to their column
_STYLE = {
    "font.size": 9,
    "axes.titlesize": 9,
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
    "axes.grid": True,
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
class Chart:
    """A picture and the numbers that it shows.

    Attributes:
        name: unique on its page.
        title: what is shown, with its unit.
        note: how to read it, and which equation, table or figure it is; may be empty.
        svg: the picture.
        head, body: the data behind it.
    """

    name: str
    title: str
    note: str
    svg: Markup
    head: list[str]
    body: list[list[str | float | int | None]]


@dataclass(frozen=True)
class Axis:
    """Label of an axis, and whether it is logarithmic (base 2 for lengths of text)."""

    title: str
    log: int | None = None


def line_chart(
    name: str,
    title: str,
    series: Mapping[str, Points],
    x: Axis,
    y: Axis,
    note: str = "",
    bands: Mapping[str, Sequence[tuple[float, float, float]]] | None = None,
    reference: float | None = None,
    order: Sequence[str] = (),
) -> Chart:
    """Curves of points (x, y) by name.

    Args:
        bands: per series (x, low, high), drawn behind its curve.
        reference: a value to compare with, drawn as a dotted line.
    """
    with matplotlib.style.context(["default", _STYLE]):
        figure, axes = _figure(2.9)
        many = max(map(len, series.values()), default=0) > 40
        for key, points in series.items():
            look = _look(key, [*order, *series]) | ({"marker": "none"} if many else {})
            if band := (bands or {}).get(key):
                axes.fill_between(*zip(*band, strict=True), color=look["color"], alpha=0.18, linewidth=0)
            x_values, y_values = [at for at, _ in points], [value for _, value in points]
            axes.plot(x_values, y_values, label=_label(key), linewidth=1.4, markersize=3.5, **look)
        if reference is not None:
            axes.axhline(reference, color=INK, linewidth=0.8, linestyle=":", zorder=1)
        _set_axis(axes, "x", x)
        _set_axis(axes, "y", y)
        if len(series) > 1:
            _legend(figure, axes)
        svg = _svg(figure, name, title)
    rows: dict[float, list[str | float | int | None]] = {}
    for number, points in enumerate(series.values()):
        for at, value in points:
            rows.setdefault(at, [at, *[None] * len(series)])[1 + number] = value
    return Chart(name, title, note, svg, [x.title, *series], [rows[at] for at in sorted(rows)])


def interval_chart(
    name: str,
    title: str,
    names: Sequence[str],
    series: Mapping[str, Sequence[Interval | None]],
    unit: str,
    note: str = "",
    zero: bool = False,
    order: Sequence[str] = (),
) -> Chart:
    """A row for each name, and in it the values of all series with their intervals; None where there is no value.

    ``zero`` draws the line of no difference.
    """
    with matplotlib.style.context(["default", _STYLE]):
        figure, axes = _figure(0.9 + (0.16 + 0.1 * len(series)) * len(names))
        for number, (key, values) in enumerate(series.items()):
            shift = 0.6 * (number + 0.5) / len(series) - 0.3
            look = _look(key, [*order, *series])
            known = [(row, *value) for row, value in enumerate(values) if value is not None]
            below = [0 if low is None else value - low for _, value, low, _ in known]
            above = [0 if high is None else high - value for _, value, _, high in known]
            axes.errorbar(
                [value for _, value, _, _ in known],
                [row + shift for row, *_ in known],
                xerr=[below, above],
                fmt=look["marker"],
                markersize=4,
                elinewidth=1,
                color=look["color"],
                label=_label(key),
            )
        if zero:
            axes.axvline(0, color=INK, linewidth=0.8)
        axes.set_yticks(range(len(names)), [_label(row, 24) for row in names])
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_xlabel(unit)
        if len(series) > 1:
            _legend(figure, axes)
        svg = _svg(figure, name, title)
    head = ["", *[column for key in series for column in (key, f"{key}: from", f"{key}: to")]]
    body = [[row, *[c for values in series.values() for c in values[n] or [None] * 3]] for n, row in enumerate(names)]
    return Chart(name, title, note, svg, head, body)


def heat_map(
    name: str,
    title: str,
    rows: Mapping[Any, Sequence[float]],
    axes_titles: tuple[str, str],
    unit: str,
    note: str = "",
) -> Chart:
    """Values from 0 to 1 as colours, in ``unit``, the first row above; columns are numbered, and rows may be shorter.

    ``axes_titles``: of x and y.
    """
    with matplotlib.style.context(["default", _STYLE | {"axes.grid": False}]):
        figure, axes = _figure(min(7.0, 1.2 + max(0.16 * len(rows), 1.0)))
        columns = range(max(map(len, rows.values())))
        full = [[*row, *[float("nan")] * (len(columns) - len(row))] for row in rows.values()]
        mesh = axes.pcolormesh(full, cmap=_MAP, vmin=0, vmax=1, edgecolors="face", linewidth=0.2)
        figure.colorbar(mesh, ax=axes, label=unit, location="bottom", aspect=40, shrink=0.8)
        for axis, names in ((axes.xaxis, list(columns)), (axes.yaxis, list(rows))):
            shown = range(0, len(names), -(-len(names) // 32))
            axis.set_ticks([place + 0.5 for place in shown], [_label(str(names[place]), 24) for place in shown])
            axis.set_tick_params(length=0)
        axes.set(xlabel=axes_titles[0], ylabel=axes_titles[1])
        axes.invert_yaxis()
        svg = _svg(figure, name, title)
    body = [[str(row), *shares] for row, shares in rows.items()]
    return Chart(name, title, note, svg, [axes_titles[1], *map(str, columns)], body)


def _figure(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    return figure, figure.subplots()


def _label(text: str, longest: int = 42) -> str:
    """A name as a chart can show it: short, no formula, and no entry that a legend hides."""
    text = text if len(text) <= longest else "…" + text[1 - longest :]
    return (" " if text.startswith("_") else "") + text.replace("$", r"\$")


def _look(name: str, names: Iterable[str]) -> dict[str, str]:
    """Colour, dashes and marker of a series; where colours repeat, dashes and markers differ."""
    place = list(dict.fromkeys(names)).index(name)
    turn = place // len(SERIES)
    return {
        "color": SERIES[place % len(SERIES)],
        "linestyle": _DASHES[turn % len(_DASHES)],
        "marker": _MARKERS[(place + turn) % len(_MARKERS)],
    }


def _set_axis(axes: Axes, which: str, wanted: Axis) -> None:
    axis = getattr(axes, f"{which}axis")
    axis.set_label_text(wanted.title)
    plain = FuncFormatter(lambda value, _: _short(value))
    if wanted.log is None:
        axis.set_major_locator(MaxNLocator(6))
    else:
        getattr(axes, f"set_{which}scale")("log", base=wanted.log)
        axis.set_major_locator(LogLocator(wanted.log, subs=(1,) if wanted.log == 2 else (1, 2, 5), numticks=7))
        axis.set_minor_formatter(NullFormatter())
    axis.set_major_formatter(plain)


def _short(value: float) -> str:
    for least, size, unit in ((1e12, 1e12, "T"), (1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= least:
            return f"{value / size:.4g}{unit}"
    return f"{value:.6g}"


def _legend(figure: Figure, axes: Axes) -> None:
    handles, names = axes.get_legend_handles_labels()
    columns = max(1, min(len(names), 60 // (max(map(len, names)) + 6)))
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + 0.16 * -(-len(names) // columns))
    figure.legend(handles, names, loc="outside lower center", ncols=columns)


def _svg(figure: Figure, name: str, title: str) -> Markup:
    """The figure to stand in a page: no prolog, no fixed size, colours by name, ids that no other chart has."""
    written = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = written.getvalue()
    text = text[text.index("<svg") :]
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    # Groups are numbered alike in each chart.
    text = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', text)
    text = re.sub(r'(href="|url\()#', rf"\1#{name}-", text)
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    size = re.match(r'<svg[^>]*viewBox="([^"]+)"', text)
    opening = f'<svg xmlns:xlink="http://www.w3.org/1999/xlink" viewBox="{size[1]}" role="img" aria-label="'
    return Markup(opening) + title + Markup('">') + Markup(text[text.index(">") + 1 :])
