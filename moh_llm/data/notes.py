"""Lines to the user about the text that is read, on standard error: each once in a process."""

import os

from moh_llm.errors import without_passwords
from moh_llm.terminal import say_aside

_said: set[str] = set()


def note(line: str) -> None:
    """Print a line, unless this process has printed it before, or is one of a training job but not its first."""
    line = without_passwords(line)
    if line not in _said and os.environ.get("RANK", "0") == "0":
        _said.add(line)
        say_aside(line)
