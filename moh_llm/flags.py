"""The flags of a command, made of the fields of its options."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from moh_llm.errors import UserError, printable, without_passwords
from moh_llm.options import Option, options_of
from moh_llm.reading import expand_home
from moh_llm.recipe import check_name, read_options, recipe_values

_Config = TypeVar("_Config")


class _Give(argparse.Action):
    """Adds a value to the list `given`, which keeps the order of the command line."""

    def __call__(self, parser: Any, found: argparse.Namespace, value: Any, flag: str | None = None) -> None:
        value = value if self.nargs != 0 else self.const
        found.given = [*found.given, ("command line", self.dest, value)]


class OptionParser(argparse.ArgumentParser):
    """A parser whose flags are the options of a dataclass, for `options_from`. `--a_b` and `--a-b` are the same."""

    kind: Any = None

    def add_options(self, kind: type, hidden: Sequence[str] = (), joint: str = "-", described: bool = True) -> None:
        """Declare a flag for each option.

        Args:
            kind: the dataclass.
            hidden: options without a flag: arguments of another form, and those of recipes and the Python API alone.
            joint: what joins the words of a flag. With "-" switches take no value; with "_" flags are written as in
                a recipe, with a value each.
            described: whether ``--help`` lists them.
        """
        self.kind, self.allow_abbrev = kind, False
        self.set_defaults(given=[])
        place: Any = self
        for name, option in options_of(kind).items():
            if name in hidden:
                continue
            if option.is_group and described:
                place = self.add_argument_group(name, option.meaning)
            elif "." not in name:
                place = self
            flag, more = f"--{name.replace('_', joint)}", {"metavar": option.metavar}
            if option.kind is bool and joint == "-":
                flag = flag.replace("--", "--no-", 1) if option.default else flag
                more = {"nargs": 0, "const": not option.default}
            elif option.is_list and joint == "-":
                more["nargs"] = "+"
            told = help_of(option, flag.startswith("--no-")) if described and not option.is_group else argparse.SUPPRESS
            place.add_argument(flag, dest=name, action=_Give, default=argparse.SUPPRESS, help=told, **more)

    def add_words(self, metavar: str, kind: type, name: str) -> None:
        """Declare that the words without a flag are a recipe, or values of one option (see `options_from`)."""
        self.add_argument("words", metavar=metavar, nargs="*", help=f"{help_of(options_of(kind)[name])}; or a recipe")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[argparse.Namespace, list[str]]:  # type: ignore[override]
        """As argparse does it; a flag that there is not is refused by its name."""
        if self.kind is None:
            return super().parse_known_args(args, namespace)
        flags = {flag.replace("_", "-"): flag for flag in self._option_string_actions}
        words = []
        for word in args:
            name, equals, value = word.partition("=")
            words.append(flags.get(name.replace("_", "-"), name) + equals + value if word.startswith("--") else word)
        found, unknown = super().parse_known_args(words, namespace)
        for word in unknown:
            if not word.startswith("--"):
                raise UserError(f"command line: {word!r} follows no --option; options are written --option value")
            name = word[2:].partition("=")[0].replace("-", "_")
            check_name(self.kind, name, "command line")
            raise UserError(f"command line: {name} has no flag; write it into a recipe, or pass it to the Python API")
        return found, []

    def error(self, message: str) -> NoReturn:
        """Raise UserError; of a parser without options print usage and message, and exit with status 2."""
        if self.kind is not None:
            raise UserError(message)
        super().error(printable(without_passwords(message)))


def options_from(kind: type[_Config], args: argparse.Namespace, positional: str) -> _Config:
    """The options of a command line ``[RECIPE.yaml | WORD ...] --flag value ...``, whose words are of one option."""
    words, given = list(args.words), []
    if words and words[0].endswith((".yaml", ".yml")):
        given = recipe_values(words.pop(0))
    if words:
        several = options_of(kind)[positional].is_list
        if not several and len(words) > 1:
            raise UserError(f"command line: {words[1]!r} follows no --option; options are written --option value")
        given.append(("command line", positional, words if several else words[0]))
    return read_options(kind, [*given, *args.given])


def as_path(word: str) -> Path:
    """A word of the command line as a path, with ``~`` expanded."""
    return Path(expand_home(word))


def help_of(option: Option, is_negated: bool = False) -> str:
    """The first sentence of an option's meaning, with its default; ``is_negated``: of a flag `--no-NAME`."""
    told, default = option.summary.replace("%", "%%").replace("`", ""), option.default
    if is_negated:
        return f"Without {told[0].lower()}{told[1:]}"
    if option.is_required or default is None or default is False:
        return told
    return f"{told} (default: {option.default_in_words})"
