"""What commands show: names as they are, whatever characters are in them.

A path may hold brackets, which rich takes for markup, colons, which it takes for emoji, characters that move the
cursor or hide what follows, and bytes that are not UTF-8. `say` and `console` show the first two as they are and the
others as escapes (`moh_llm.errors.printable`), so that a line stays one line.
"""

import os
import sys
from typing import TYPE_CHECKING, Any, TextIO

from moh_llm.errors import printable, without_passwords

if TYPE_CHECKING:
    from rich.console import Console


def say(*lines: object, file: TextIO | None = None) -> None:
    """Print lines; what is not printable in one is shown as an escape, a newline too."""
    for line in lines:
        print(printable(str(line)), file=file)
    (file or sys.stdout).flush()


def say_aside(*lines: object) -> None:
    """`say` on the standard error."""
    say(*lines, file=sys.stderr)


_said: set[str] = set()


def say_once(line: str) -> None:
    """`say_aside` of a line that this process has not printed yet. Of a training job only the first process prints."""
    line = without_passwords(line)
    if line not in _said and os.environ.get("RANK", "0") == "0":
        _said.add(line)
        say_aside(line)


def console(**settings: Any) -> "Console":
    """A console of rich that takes nothing in a text for markup or emoji, and colours no part of it."""
    from rich.console import Console

    return Console(markup=False, emoji=False, highlight=False, **settings)


def speak_utf8() -> None:
    """Start this program anew in Python's UTF-8 mode unless names of files and the output are in UTF-8.

    In a POSIX locale they are ASCII, and files whose names are written in a recipe would not be found. Does not return
    where the program is started anew. Characters that the output's encoding lacks are shown as escapes.
    """
    if sys.getfilesystemencoding() != "utf-8" and not sys.flags.utf8_mode and os.name == "posix":
        os.environ["PYTHONUTF8"] = "1"  # for the processes that this one starts
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
