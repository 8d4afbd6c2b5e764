"""Terminal output that shows names safely.

Paths can contain brackets and colons, which rich would read as markup and emoji, control characters, and bytes that are
not UTF-8. `say` and `console` print the former as they are and the latter as escapes (`moh_llm.errors.printable`).
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


def speak_utf8() -> None:
    """Restart the program in Python's UTF-8 mode if file names are not in UTF-8.

    In a POSIX locale file names are ASCII, and files that a recipe names would not be found. Does not return if it
    restarts. Characters that the output encoding lacks are printed as escapes.
    """
    if sys.getfilesystemencoding() != "utf-8" and not sys.flags.utf8_mode and os.name == "posix":
        os.environ["PYTHONUTF8"] = "1"  # for child processes
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
