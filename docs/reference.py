"""Writes `docs/reference.md`, all options of all commands, from the dataclasses that declare them: `make reference`."""

import sys

from moh_llm.commands.recipes import KINDS
from moh_llm.conversion.config import ConversionConfig
from moh_llm.options import Option, options_of

_PAGE = """# Options

Written by `make reference` from the dataclasses that declare the options; do not edit.

An option is a flag (`--num-active-heads 24`), a line of a YAML recipe (`num_active_heads: 24`) and a keyword argument
of the Python API (`num_active_heads=24`). Flags override the recipe. In flags `_` and `-` are the same. A dotted name
is an option in a group of the recipe. Options without a flag are marked.
`moh-llm recipes --all-keys COMMAND` prints a recipe with all of them.
"""


def page() -> str:
    """The reference page, in Markdown."""
    parts = [_PAGE]
    for command, kind in KINDS.items():
        parts.append(f"\n## {command}\n\n{' '.join((kind.__doc__ or '').split())}\n")
        parts.append("\n| option | type | default | meaning |\n|---|---|---|---|\n")
        parts += [_row(command, name, option) for name, option in options_of(kind).items()]
    return "".join(parts)


def _row(command: str, name: str, option: Option) -> str:
    default = "required" if option.is_required else f"`{option.default_in_words}`"
    if option.is_group:
        default = "`null`" if option.nullable else ""
    unflagged = " (no flag)" if command == "convert" and name in ConversionConfig.WITHOUT_FLAG else ""
    cells = (f"`{name}`{unflagged}", option.type_in_words, default, option.meaning)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"


if __name__ == "__main__":
    sys.stdout.write(page())
