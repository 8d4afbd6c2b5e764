"""``moh-llm recipes``: list the recipes and data mixtures that come with this package, and copy them to edit and run.

    moh-llm recipes
    moh-llm recipes copy recipes/smollm2_recovery.yaml data_mixtures --output-dir my-runs
    moh-llm recipes --all-keys train > my-recipe.yaml

Copies keep their paths below the output folder, so that commands run there find what a recipe's comments name.
"""

import argparse
import difflib
import os
import shutil
import textwrap
from pathlib import Path

from moh_llm.conversion.config import ConversionConfig
from moh_llm.errors import UserError
from moh_llm.evaluation.config import EvaluationConfig
from moh_llm.flags import as_path
from moh_llm.hub.config import PublishConfig
from moh_llm.options import options_of
from moh_llm.recipe import shipped_files
from moh_llm.terminal import say
from moh_llm.training.config import TrainConfig

KINDS = {"convert": ConversionConfig, "train": TrainConfig, "evaluate": EvaluationConfig, "publish": PublishConfig}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--all-keys",
        choices=list(KINDS),
        help="print a recipe of that command with all options, their meanings and defaults",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    copy = actions.add_parser("copy", help="copy some of them (default: list all)", description=__doc__)
    copy.add_argument("names", metavar="NAME", nargs="+", help="file or folder of the list, such as recipes/launch")
    copy.add_argument("--output-dir", type=as_path, default=Path(), help="folder to copy into (default: this one)")


def run(args: argparse.Namespace) -> None:
    """List or copy. Raises `UserError` for bad input."""
    if args.all_keys is not None:
        say(*full_recipe(args.all_keys).splitlines())
        return
    if args.action == "copy":
        for path in copy_files(args.names, args.output_dir):
            say(path)
        return
    files = shipped_files()
    width = max(map(len, files))
    for name, path in files.items():
        say(f"{name:{width}}  {summary(path)}")


def summary(path: Path) -> str:
    """The first comment line of a file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return next((line[1:].strip() for line in lines if line.startswith("#") and not line.startswith("#!")), "")


def copy_files(names: list[str], output: Path) -> list[Path]:
    """Copy recipes and data mixtures to their paths below the output folder, and return the copies.

    Raises:
        UserError: an unknown name, a file that is there (then nothing is copied), or a folder that cannot be written.
    """
    files = shipped_files()
    chosen: dict[str, Path] = {}
    for name in names:
        matches = {file: path for file, path in files.items() if f"{file}/".startswith(f"{name.rstrip('/')}/")}
        if not matches:
            nearest = difflib.get_close_matches(name, files, n=1, cutoff=0.0)[0]
            raise UserError(f"no recipe or data mixture {name!r}; the nearest name is {nearest!r}")
        chosen |= matches
    copies = {output / name: path for name, path in chosen.items()}
    for copy in copies:
        if os.path.lexists(copy):
            raise UserError(f"{copy} exists already; remove it or name another folder with --output-dir")
    for copy, path in copies.items():
        try:
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)  # with its mode: scripts stay executable
        except OSError as error:
            raise UserError(
                f"{copy} cannot be written: {error.strerror}; name another folder with --output-dir"
            ) from error
    return list(copies)


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
