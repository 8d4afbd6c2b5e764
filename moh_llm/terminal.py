"""Terminal output that shows names safely: control characters in them as escapes (`moh_llm.errors.printable`)."""

import shutil
import sys
from collections.abc import Sequence
from typing import TextIO

from moh_llm.errors import printable


def say(*lines: object, file: TextIO | None = None) -> None:
    """Print lines, with unprintable characters (including newlines) as escapes."""
    for line in lines:
        print(printable(str(line)), file=file)
    (file or sys.stdout).flush()


def say_aside(*lines: object) -> None:
    """`say` to standard error."""
    say(*lines, file=sys.stderr)


def say_passing(*lines: object) -> None:
    """`say` to standard error; on a terminal a line takes the place of the one before, and no line clears it."""
    if not sys.stderr.isatty():
        say(*lines, file=sys.stderr)
        return
    text = printable(str(lines[-1] if lines else ""))
    print(f"\r\x1b[K{text[: shutil.get_terminal_size().columns - 1]}", end="", file=sys.stderr, flush=True)


def say_table(*rows: Sequence[str]) -> None:
    """`say` rows of cells in columns, the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *cells in rows:
        say("  ".join([name.ljust(widths[0]), *map(str.rjust, cells, widths[1:])]))
