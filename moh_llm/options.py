"""Options, each declared once: a frozen dataclass whose fields have a type, a default and a docstring.

    @options()
    class ConversionConfig:
        context: PositiveInt = 8192
        \"\"\"Tokens per sequence. Longer than the base was made for is cut to that.\"\"\"

The keyword arguments of the Python API, the flags of a command, its recipes, its ``--help`` and docs/reference.md all
come from these fields. pydantic checks types and bounds; what does not fit raises `OptionError`, a `UserError`.
"""

import dataclasses
import functools
import os
import types
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import BeforeValidator, ConfigDict, PlainValidator, ValidationError
from pydantic.dataclasses import dataclass
from typing_extensions import dataclass_transform

from moh_llm.errors import UserError, shown_in
from moh_llm.reading import expand_home, is_path

_Kind = TypeVar("_Kind", bound=type)


class OptionError(UserError):
    """The value of one option, named by ``option``, cannot be used."""

    def __init__(self, option: str, message: str):
        super().__init__(message)
        self.option = option


def _place(value: Any) -> str:
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise ValueError("a path or Hub id")
    if not is_path(os.fspath(value)):
        raise ValueError("a path in UTF-8 without NUL characters")
    return expand_home(value)


def as_tuple(value: Any) -> Any:
    """A list as a tuple, one text or path alone as a tuple of one; other values stay, for the type to refuse."""
    return (value,) if isinstance(value, str | os.PathLike) else tuple(value) if isinstance(value, list) else value


def _pair(value: Any) -> Any:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError("a list of 2 numbers")
    return tuple(value)


Place = Annotated[str, PlainValidator(_place)]
"""A path or Hub id, with ``~`` expanded."""
Folder = Annotated[Path, PlainValidator(lambda value: Path(_place(value)))]
"""A local path, with ``~`` expanded."""
Places = Annotated[tuple[Place, ...], BeforeValidator(as_tuple)]
"""Several of them; one alone is a list of one."""
Names = Annotated[tuple[str, ...], BeforeValidator(as_tuple)]
Pair = Annotated[tuple[float, float], BeforeValidator(_pair)]


# Types in words, and what stands for their values in ``--help``; of all others `_words` makes them.
_WORDS = {
    Place: ("path or Hub id", "NAME"),
    Folder: ("path", "DIR"),
    Places: ("list of paths", "FILE"),
    Names: ("list of names", "[NAME,...]"),
    Pair: ("list of 2 numbers", "[X,X]"),
    str: ("text", "NAME"),
    bool: ("true or false", "true|false"),
    int: ("whole number", "N"),
    float: ("number", "X"),
    type(None): ("null", "X"),
}
_BOUNDS = {"gt": "above", "ge": "of at least", "lt": "below", "le": "at most"}


@dataclass_transform(frozen_default=True)
def options(group: str = "", kw_only: bool = False) -> Callable[[_Kind], _Kind]:
    """Make a class a frozen dataclass of options.

    ``group`` is its name as a field of another class, which errors put before the names of fields.
    """
    checks = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)
    prefix = f"{group}." if group else ""

    def decorate(kind: _Kind) -> _Kind:
        made: Any = dataclass(frozen=True, kw_only=kw_only, config=checks)(kind)
        make = made.__init__

        @functools.wraps(make)
        def init(self: Any, *args: Any, **given: Any) -> None:
            names = [field.name for field in dataclasses.fields(made)]
            try:
                make(self, **dict(zip(names, args, strict=False)), **given)
            except ValidationError as error:
                raise _fault(error, prefix) from error

        made.__init__ = init
        return made

    return decorate


def _fault(error: ValidationError, prefix: str) -> OptionError:
    """The first fault that pydantic found, as ``context=0 must be greater than 0``."""
    faults = error.errors(include_url=False)
    first = next((fault for fault in faults if fault["type"] != "missing"), faults[0])
    name, kind = str(first["loc"][0]), first["type"]
    option = f"{prefix}{name}"
    if kind == "unexpected_keyword_argument":
        return OptionError(option, f"unknown option {option!r}")
    if kind == "missing":
        return OptionError(option, f"{option} is missing")
    # A value of several types fails for each of them.
    rules = [_rule(fault) for fault in faults if fault["loc"][0] == name]
    value = first["input"]
    given = shown_in(value if isinstance(value, str) else repr(value))
    given = given if len(given) <= 60 else f"{given[:57]}..."
    return OptionError(option, f"{option}={given} must be {' or '.join(dict.fromkeys(rules))}")


def _rule(fault: Any) -> str:
    """What a value must be, in the words of pydantic or of a check of ours."""
    own = fault.get("ctx", {}).get("error")
    told = fault["msg"].removeprefix("Input should be ") if own is None else str(own)
    told = told.replace("greater than or equal to", "at least").replace("less than or equal to", "at most")
    if fault.get("ctx", {}).get("le") == 1 and 1 < fault["input"] <= 100:
        told += f" (for {fault['input']:g} % use {fault['input'] / 100:g})"
    return told.replace("tuple", "list")


@dataclasses.dataclass(frozen=True)
class Option:
    """One option: its type, its default (`dataclasses.MISSING` for a required one) and its docstring on one line."""

    hint: Any
    default: Any
    meaning: str

    @property
    def parts(self) -> list[Any]:
        """The types of its values, None among them where null is one."""
        return list(get_args(self.hint)) if get_origin(self.hint) in (Union, types.UnionType) else [self.hint]

    @property
    def nullable(self) -> bool:
        """Whether null is a value."""
        return type(None) in self.parts

    @property
    def kind(self) -> Any:
        """The type of the values other than null; a dataclass for a group of options."""
        return self.parts[0]

    @property
    def is_required(self) -> bool:
        """Whether it has no default."""
        return self.default is dataclasses.MISSING

    @property
    def is_group(self) -> bool:
        """Whether it holds options itself."""
        return dataclasses.is_dataclass(self.kind)

    @property
    def is_list(self) -> bool:
        """Whether it has several values."""
        return self.kind in (Places, Names, Pair)

    @property
    def takes_text(self) -> bool:
        """Whether all its values are texts, and no numbers or switches."""
        texts = (Place, Folder, Places, Names, str, type(None))
        return all(part in texts or get_origin(part) is Literal for part in self.parts)

    @property
    def type_in_words(self) -> str:
        """Such as ``whole number above 0 or null``."""
        return " or ".join(_words(part) for part in self.parts)

    @property
    def metavar(self) -> str:
        """What stands for the value in ``--help``."""
        if get_origin(self.kind) is Literal:
            return "|".join(get_args(self.kind))
        kind = self.kind if self.kind in _WORDS else next(iter(get_args(self.kind)), type(None))
        return _WORDS[kind][1]

    @property
    def default_in_words(self) -> str:
        """The default as a recipe has it; empty where the option must be given."""
        return "" if self.is_required else show(self.default)

    @property
    def summary(self) -> str:
        """The first sentence of its meaning."""
        return self.meaning.split(". ")[0].rstrip(".")


@functools.cache
def options_of(kind: type, prefix: str = "") -> dict[str, Option]:
    """All options of a dataclass by dotted name: those that must be given first, groups before their members."""
    hints, found = get_type_hints(kind, include_extras=True), {}
    documented: list[Any] = [base.__dict__.get("__pydantic_fields__", {}) for base in kind.__mro__]
    for field in sorted(dataclasses.fields(kind), key=lambda field: field.default is not dataclasses.MISSING):
        described = (fields[field.name].description for fields in documented if field.name in fields)
        option = Option(hints[field.name], field.default, " ".join((next(filter(None, described), "")).split()))
        if option.is_group:
            option = dataclasses.replace(option, meaning=" ".join(option.kind.__doc__.split()))
        found[prefix + field.name] = option
        if option.is_group:
            found |= options_of(option.kind, f"{prefix}{field.name}.")
    return found


def _words(part: Any) -> str:
    if part in _WORDS:
        return _WORDS[part][0]
    if get_origin(part) is Literal:
        return " or ".join(get_args(part))
    if dataclasses.is_dataclass(part):
        return "group of options"
    number, *rules = get_args(part)  # Annotated
    bounds = [bound for rule in rules for bound in getattr(rule, "metadata", [rule])]
    told = [
        f"{word} {getattr(bound, name)}" for bound in bounds for name, word in _BOUNDS.items() if hasattr(bound, name)
    ]
    return " ".join([_WORDS[number][0], " and ".join(told)])


def show(value: Any) -> str:
    """A value as YAML has it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"[{', '.join(map(show, value))}]" if isinstance(value, list | tuple) else str(value)
