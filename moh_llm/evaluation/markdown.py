"""Documents in Markdown, in which every value shows as plain text, whatever it holds."""

import html
import re
import unicodedata
from collections.abc import Callable, Sequence
from typing import Any

from moh_llm.evaluation.document import (
    Block,
    Bullets,
    Caution,
    Charts,
    Code,
    Commands,
    Details,
    Document,
    Heading,
    Inline,
    Paragraph,
    Table,
)

Clean = Callable[[Any], str]
# An absolute path: from a slash that nothing precedes that could be a relative path or an address.
_PATH = re.compile(
    r"(?<![\w.:/\\~<])(?:file:/+|[A-Za-z]:(?=[/\\])|~(?=[/\\]))?[/\\]?(?<=[/\\])(?:[^\s/\\]*[/\\])*(?=\S)"
)
_MARKUP = re.compile(r"[\\`*\[\]|~$#]|(?<![^\W_])_|_(?![^\W_])")


class Safe(str):
    """Markdown that is meant as such."""


def visible(value: Any) -> str:
    """A value as one line without control characters."""
    return "".join(c for c in " ".join(str(value).split()) if unicodedata.category(c) not in ("Cc", "Cf"))


def plain(value: Any) -> str:
    """A value as one line with absolute paths, which name places on this machine, reduced to their last component."""
    return _PATH.sub("", visible(value))


def text(value: Any) -> str:
    """A value as Markdown that shows it as it is, without absolute paths; `Safe` is passed through."""
    return value if isinstance(value, Safe) else _unlisted(_escape(value, plain))


def code(value: Any, clean: Clean = plain) -> Safe:
    """A name in a code span. A backtick, which would end it, becomes an apostrophe; a bar is kept out of tables."""
    return Safe("`" + (clean(value).replace("`", "'").replace("|", "\\|") or "-") + "`")


def address(value: str | None) -> str | None:
    """An address or a file's plain name that may stand in a link; None for anything else."""
    return value if value and re.fullmatch(r"https?://[\w.~:/?#@!$&*+,;=%-]+|[\w.-]+", value, re.ASCII) else None


def render_markdown(document: Document) -> str:
    """A document; charts are named only, since `report.html` shows them."""
    parts = [f"# {_escape(document.title, visible)}"]
    parts += [render_blocks(document.lead)] if document.lead else []
    for section in document.sections:
        parts += [f"## {_escape(section.title, visible)}", render_blocks(section.blocks)]
    return "\n\n".join(parts) + "\n"


def render_blocks(blocks: Sequence[Block], clean: Clean = visible) -> Safe:
    """Some of a document's blocks; ``clean`` makes a line of a value: `visible`, or `plain` for what is published."""
    return Safe("\n\n".join(_block(block, clean) for block in blocks))


def _block(block: Block, clean: Clean) -> str:
    match block:
        case Table():
            return _table(block, clean)
        case Paragraph():
            shown = _inline(block.text, clean)
            return f"**{shown}**" if block.strong else _unlisted(shown)
        case Caution():
            return f"> **{_escape(block.text, clean)}**"
        case Bullets():
            return "\n".join(f"- {_unlisted(_inline(item, clean))}" for item in block.items)
        case Heading():
            return f"### {_escape(block.text, clean)}"
        case Commands():
            return f"```\n{block.text}\n```"
        case Charts():
            return f"Charts in `report.html`: {'; '.join(_escape(chart.title, clean) for chart in block.charts)}."
        case Details():
            return f"{_unlisted(_escape(block.title, clean))}:\n\n{render_blocks(block.blocks, clean)}"


def _table(table: Table, clean: Clean) -> str:
    body = [[_inline(cell, clean) for cell in row] for row in table.rows]
    if table.total:
        body[-1][0] = f"**{body[-1][0]}**"
    rules = ["---" if column < table.text else "---:" for column in range(len(table.head))]
    head = [_inline(cell, clean) for cell in table.head]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, rules, *body])


def _inline(value: Inline, clean: Clean) -> str:
    parts = value if isinstance(value, tuple) else (value,)
    return "".join(
        code(part, clean) if isinstance(part, Code) else _escape(part, clean if len(parts) == 1 else str)
        for part in parts
    )


def _escape(value: Any, clean: Clean) -> str:
    return _MARKUP.sub(lambda found: "\\" + found[0], html.escape(clean(value), quote=False))


def _unlisted(line: str) -> str:
    """A line that begins no list: at the beginning of a line these would."""
    return "\\" + line if line.startswith(("-", "+")) else line
