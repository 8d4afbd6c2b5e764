"""Terminal output that shows names safely.

Paths can contain brackets and colons, which rich would read as markup and emoji, and control characters. `say` and
`console` print the former as they are, `say` the latter as escapes (`moh_llm.errors.printable`).
"""

import os
import sys
from typing import TYPE_CHECKING, Any, TextIO

from moh_llm.errors import printable, without_passwords

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


_said: set[str] = set()


def say_once(line: str) -> None:
    """`say_aside` of a line that this process has not printed yet. Of a training job only the first process prints."""
    line = without_passwords(line)
    if line not in _said and os.environ.get("RANK", "0") == "0":
        _said.add(line)
        say_aside(line)


def console(**settings: Any) -> "Console":
    """A rich console without markup, emoji and highlighting."""
    from rich.console import Console

    return Console(markup=False, emoji=False, highlight=False, **settings)
