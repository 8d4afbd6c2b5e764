"""Values in Markdown: whatever a record holds shows as plain text, and names no place on this machine."""

import html
import re
import unicodedata
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
