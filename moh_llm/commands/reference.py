"""All options of all commands: ``python -m moh_llm.commands.reference > docs/reference.md``, and recipes in full."""

import sys
import textwrap

from moh_llm.conversion.config import ConversionConfig
from moh_llm.evaluation.config import EvaluationConfig
from moh_llm.hub.config import PublishConfig
from moh_llm.options import Option, options_of
from moh_llm.training.config import TrainConfig

KINDS = {"convert": ConversionConfig, "train": TrainConfig, "evaluate": EvaluationConfig, "publish": PublishConfig}
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


def full_recipe(command: str) -> str:
    """A recipe of that command with all options at their defaults, each below its meaning."""
    lines = [f"# All options of `moh-llm {command}`, at their defaults."]
    for name, option in options_of(KINDS[command]).items():
        *groups, last = name.split(".")
        indent = "  " * len(groups)
        told = f"{option.meaning} ({option.type_in_words}{', required' if option.is_required else ''})"
        lines += ["", *textwrap.wrap(told, 116, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")]
        # What must be given, and the members of groups that are off, are comments: the recipe is one as it is.
        off = option.is_required or (groups and options_of(KINDS[command])[groups[0]].default is None)
        value = "" if option.is_group and not option.nullable else f" {option.default_in_words}"
        lines.append(f"{indent}{'# ' if off else ''}{last}:{value}".rstrip())
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
