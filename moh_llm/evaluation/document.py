"""A report as data: sections of tables, sentences and charts, which HTML, Markdown and model cards show alike."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from urllib.parse import quote


class Code(str):
    """A name, such as that of a file or an option, which is set in the type of code."""


Inline = str | Code | tuple[str, ...]
"""Text of one line, or its parts: values as `Code`, between them words that need no cleaning."""


@dataclass(frozen=True)
class Table:
    """Rows of cells.

    Attributes:
        head: names of the columns.
        rows: cells, as they are printed; a dash stands for what is not known.
        text: so many columns from the left hold text, the others numbers, which are aligned to the right.
        total: whether the last row sums up the others.
        kind: "facts": pairs without a head; "models": long cells, which may be broken; "tokens": cells after the
            first are "on", "off" or "shared".
    """

    head: Sequence[Inline]
    rows: Sequence[Sequence[Inline]]
    text: int = 1
    total: bool = False
    kind: str = ""

    def without_empty_columns(self) -> "Table":
        """The table without the columns in which every cell is a dash."""
        shown = [n for n in range(len(self.head)) if any(row[n] != "-" for row in self.rows)]
        return replace(self, head=[self.head[n] for n in shown], rows=[[row[n] for n in shown] for row in self.rows])


def facts(pairs: Sequence[tuple[str, Inline]]) -> Table:
    """A table of what and how much, without a head."""
    return Table(["", ""], pairs, text=2, kind="facts")


@dataclass(frozen=True)
class Paragraph:
    """Sentences; ``strong`` ones are the results."""

    text: Inline
    strong: bool = False


@dataclass(frozen=True)
class Caution:
    """What a reader must know before quoting a number."""

    text: str


@dataclass(frozen=True)
class Bullets:
    """A list."""

    items: Sequence[Inline]


@dataclass(frozen=True)
class Heading:
    """A heading within a section."""

    text: str


@dataclass(frozen=True)
class Commands:
    """Lines for a shell."""

    text: str


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
    svg: str
    head: list[str]
    body: list[list[str | float | int | None]]

    @property
    def csv_link(self) -> str:
        """The numbers as a `data:` address to download."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([self.head, *self.body])
        return "data:text/csv;charset=utf-8," + quote(text.getvalue())


@dataclass(frozen=True)
class Charts:
    """Charts side by side."""

    charts: Sequence[Chart]


@dataclass(frozen=True)
class Details:
    """Blocks that a page shows collapsed under a title."""

    title: str
    blocks: Sequence["Block"]


Block = Table | Paragraph | Caution | Bullets | Heading | Commands | Charts | Details


@dataclass(frozen=True)
class Section:
    """A part of the document; ``name`` is unique in it."""

    name: str
    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Document:
    """A whole report; ``lead`` stands before its sections."""

    title: str
    lead: Sequence[Block]
    sections: Sequence[Section]
