"""YAML recipes of `convert` and `evaluate`: each key is the name of a flag, with underscores, or of a `RecipeOption`.

    python convert.py recipes/convert_llama3_8b.yaml --num_active_heads 24

A recipe is put in front of the command line's own flags, so that these override it.
"""

import argparse
import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from moh_llm.errors import UserError
from moh_llm.reading import read_yaml


class RemovedOption(argparse.Action):
    """An option of earlier versions: where it is given, the error says what does its work now."""

    def __init__(self, option_strings: Sequence[str], dest: str, instead: str):
        super().__init__(option_strings, dest, nargs="?", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        self.instead = instead

    def __call__(self, *_: Any) -> None:
        """Raise UserError."""
        raise UserError(f"{self.option_strings[0]} was removed: {self.instead}")


class RecipeOption(argparse.Action):
    """An option that recipes and the Python API have, and the command line has not."""

    def __init__(self, *args: Any, **more: Any):
        super().__init__(*args, **more, default=argparse.SUPPRESS, help=argparse.SUPPRESS)

    def __call__(self, parser: argparse.ArgumentParser, found: argparse.Namespace, value: Any, *_: Any) -> None:
        """Take the recipe's value."""
        setattr(found, self.dest, value)


def expand_recipe(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> list[str]:
    """The arguments with a recipe, where the first one names a YAML file, in the words of the command line.

    Underscores in the names of flags become hyphens.

    Args:
        parser: the command's.
        arguments: what follows the command's name.

    Raises:
        UserError: the words hold an option that only recipes have; the recipe cannot be read, holds a key that is no
            option, or a value that the option does not take.
    """
    words = [_hyphens(word) for word in arguments]
    for action in parser._actions:
        if isinstance(action, RecipeOption):
            _refuse_flag(action, words)
    if not words or not words[0].endswith((".yaml", ".yml")):
        return words
    content = read_yaml(Path(words[0]), words=True)  # a hash of digits stays one
    if not isinstance(content, dict):
        raise UserError(f"recipe {words[0]} must hold `key: value` lines")
    known = {action.dest: action for action in parser._actions if action.dest != "help"}
    named: list[str] = []
    flags: list[str] = []
    for key, value in content.items():
        if key not in known:
            current = [name for name, action in known.items() if not isinstance(action, RemovedOption)]
            nearest = difflib.get_close_matches(str(key), current, n=1, cutoff=0.0)[0]
            raise UserError(f"recipe {words[0]}: unknown key {key!r}; the nearest known key is {nearest!r}")
        action = known[key]
        given = list(_texts(words[0], key, value, action))
        if action.option_strings:
            flags += given
        else:
            named += given
    # Positional arguments first: a flag that takes several values would swallow them.
    return [*named, *flags, *words[1:]]


def _refuse_flag(action: argparse.Action, words: Sequence[str]) -> None:
    """Raise UserError where the words of the command line hold that option, whole or shortened."""
    (flag,) = action.option_strings
    names = (word.partition("=")[0] for word in words)
    if any(len(name) > 2 and flag.startswith(name) for name in names):
        raise UserError(f"{flag} was removed: write {action.dest} into a recipe, or pass it to the Python API")


def _hyphens(word: str) -> str:
    """`--num_active_heads=24` as `--num-active-heads=24`."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if word.startswith("--") else word


def _texts(recipe: str, key: str, value: Any, action: argparse.Action) -> Iterator[str]:
    """The words of the command line that say the same."""
    is_switch = action.nargs == 0
    if value is None or (is_switch and value is False):
        return
    if isinstance(action, RemovedOption):
        raise UserError(f"recipe {recipe}: {key} was removed: {action.instead}")
    if is_switch != (value is True) or isinstance(value, dict):
        expected = "true or false" if is_switch else "a value"
        raise UserError(f"recipe {recipe}: {key}={value} must be {expected}")
    flag = action.option_strings[-1:]
    if is_switch:
        yield from flag
        return
    values = value if isinstance(value, list) else [value]
    if len(values) != 1 and action.nargs not in ("+", "*"):
        raise UserError(f"recipe {recipe}: {key} takes one value, not {len(values)}")
    if action.nargs in ("+", "*"):
        yield from flag
        yield from map(str, values)
    else:
        yield from (f"{flag[0]}={values[0]}",) if flag else (str(values[0]),)
