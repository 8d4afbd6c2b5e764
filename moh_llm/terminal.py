"""Terminal output that shows names safely.

Paths can contain brackets and colons, which rich would read as markup and emoji, and control characters. `say` and
`console` print the former as they are, `say` the latter as escapes (`moh_llm.errors.printable`).
"""

import shutil
import sys
from typing import TYPE_CHECKING, Any, TextIO

from moh_llm.errors import printable

if TYPE_CHECKING:
    from rich.console import Console


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


def console(**settings: Any) -> "Console":
    """A rich console without markup, emoji and highlighting."""
    from rich.console import Console

    return Console(markup=False, emoji=False, highlight=False, **settings)
