"""Tables, and the Jinja templates of reports and model cards, in which every value shows as plain text.

    markdown_templates("moh_llm.evaluation").get_template("report.md").render(title=...)

A template states the layout of a page once; the values that it gets are strings and `Table`s. It escapes each value,
as Markdown or as HTML, so that a name such as ``<b>`` or ``a|b`` cannot become markup.
"""

import html
import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

# An absolute path: from a slash that nothing precedes that could be a relative path or an address.
_PATH = re.compile(
    r"(?<![\w.:/\\~<])(?:file:/+|[A-Za-z]:(?=[/\\])|~(?=[/\\]))?[/\\]?(?<=[/\\])(?:[^\s/\\]*[/\\])*(?=\S)"
)
_MARKUP = re.compile(r"[\\`*\[\]|~$#]|(?<![^\W_])_|_(?![^\W_])")


@dataclass(frozen=True)
class Table:
    """Rows of cells.

    Attributes:
        rows: cells as they are shown; "-" where a value is unknown.
        text: number of columns, from the left, that hold text. The others hold numbers, aligned to the right.
        style: "facts" for pairs without a head; "total" if the last row sums up the others; "models" for long cells
            that may be broken.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    text: int = 1
    style: str = ""

    def without_empty_columns(self) -> "Table":
        """The table without the columns in which every cell is "-"."""
        shown = [n for n in range(len(self.head)) if any(row[n] != "-" for row in self.rows)]
        return replace(self, head=[self.head[n] for n in shown], rows=[[row[n] for n in shown] for row in self.rows])


def facts(pairs: Sequence[tuple[str, str]]) -> Table:
    """A table of names and values, without a head."""
    return Table(["", ""], pairs, text=2, style="facts")


class Safe(str):
    """Markdown that a template prints as it is."""


def visible(value: Any) -> str:
    """A value as one line without control characters."""
    return "".join(c for c in " ".join(str(value).split()) if unicodedata.category(c) not in ("Cc", "Cf"))


def plain(value: Any) -> str:
    """A value as one line in which absolute paths, which name places on this machine, are cut to their last part."""
    return _PATH.sub("", visible(value))


def escape(value: Any, clean: Callable[[Any], str] = plain) -> Safe:
    """A value as Markdown that shows it as it is."""
    return Safe(_MARKUP.sub(lambda found: "\\" + found[0], html.escape(clean(value), quote=False)))


def code(value: Any, clean: Callable[[Any], str] = plain) -> Safe:
    """A name in a code span. A backtick, which would end it, becomes an apostrophe; a bar is kept out of tables."""
    return Safe("`" + (clean(value).replace("`", "'").replace("|", "\\|") or "-") + "`")


def address(value: str | None) -> str | None:
    """An address or a file's plain name that may stand in a link; None for anything else."""
    return value if value and re.fullmatch(r"https?://[\w.~:/?#@!$&*+,;=%-]+|[\w.-]+", value, re.ASCII) else None


def html_templates() -> Environment:
    """The templates of HTML reports."""
    loader = PackageLoader("moh_llm.evaluation")
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)


def markdown_templates(package: str, clean: Callable[[Any], str] = visible) -> Environment:
    """The templates of a package in Markdown, with the filters `table`, `code` and `verbatim`.

    ``clean`` makes one line of a value: `visible`, or `plain` for pages that are published.
    """

    def text(value: Any) -> str:
        if isinstance(value, Safe):
            return value
        line = escape(value, clean)
        return "\\" + line if line.startswith(("-", "+")) else line  # which would begin a list

    def table(shown: Table) -> Safe:
        rows = [[escape(cell, clean) for cell in row] for row in shown.rows]
        if shown.style == "total":
            rows[-1][0] = Safe(f"**{rows[-1][0]}**")
        head = [escape(cell, clean) for cell in shown.head]
        rules = ["---" if column < shown.text else "---:" for column in range(len(head))]
        return Safe("\n".join("| " + " | ".join(row) + " |" for row in [head, rules, *rows]))

    # Jinja's own escaping is HTML's, so `finalize` escapes what a template prints.
    templates = Environment(
        loader=PackageLoader(package), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=text
    )
    templates.filters |= {"table": table, "code": lambda value: code(value, clean), "verbatim": Safe}
    return templates
