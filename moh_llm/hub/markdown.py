"""Values in Markdown: whatever a record holds shows as plain text, and names no place on this machine."""

import html
import re
import unicodedata
from collections.abc import Sequence
from typing import Any

# An absolute path: from a slash that nothing precedes that could be a relative path or an address.
_PATH = re.compile(
    r"(?<![\w.:/\\~<])(?:file:/+|[A-Za-z]:(?=[/\\])|~(?=[/\\]))?[/\\]?(?<=[/\\])(?:[^\s/\\]*[/\\])*(?=\S)"
)
_MARKUP = re.compile(r"[\\`*\[\]|~$#]|(?<![^\W_])_|_(?![^\W_])")


class Safe(str):
    """Markdown that is meant as such."""


def plain(value: Any) -> str:
    """A value as one line: no control character, and absolute paths reduced to their last component."""
    spaced = " ".join(str(value).split())
    visible = "".join(c for c in spaced if unicodedata.category(c) not in ("Cc", "Cf"))
    return _PATH.sub("", visible)


def text(value: Any) -> str:
    """A value as Markdown that shows it as it is; `Safe` is passed through."""
    if isinstance(value, Safe):
        return value
    escaped = _MARKUP.sub(lambda found: "\\" + found[0], html.escape(plain(value), quote=False))
    # At the beginning of a list's entry these would begin another list.
    return "\\" + escaped if escaped.startswith(("-", "+")) else escaped


def code(value: Any) -> Safe:
    """A name in a code span. A backtick, which would end it, becomes an apostrophe; a bar is kept out of tables."""
    return Safe("`" + (plain(value).replace("`", "'").replace("|", "\\|") or "-") + "`")


def address(value: str | None) -> str | None:
    """An address or a file's plain name that may stand in a link; None for anything else."""
    return value if value and re.fullmatch(r"https?://[\w.~:/?#@!$&*+,;=%-]+|[\w.-]+", value, re.ASCII) else None


def number(value: float | None, form: str) -> Safe:
    """A number by a format; a dash where there is none."""
    return Safe("-" if value is None else f"{value:{form}}")


def digits(value: float | None, places: int) -> Safe:
    """A number with so many digits that count."""
    return Safe(number(value, f"#.{places}g").rstrip("."))


def interval(bounds: Sequence[float] | None, places: int) -> Safe:
    """An interval to follow its figure; empty where there is none, as of one document."""
    return Safe("" if bounds is None else f" ({digits(bounds[0], places)} to {digits(bounds[1], places)})")


def score(figure: dict[str, Any] | None, sign: str = "") -> Safe:
    """A value with its standard error; a dash where there is none."""
    if figure is None:
        return Safe("-")
    error = "" if figure["stderr"] is None else f" ± {figure['stderr']:.1f}"
    return Safe(f"{figure['value']:{sign}.1f}{error}")
