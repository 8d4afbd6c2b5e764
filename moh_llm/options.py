"""Options, each declared once: a frozen dataclass whose fields have a type, a default and a docstring.

    @options()
    class ConversionConfig:
        context: PositiveInt = 8192
        \"\"\"Tokens per sequence. Longer than the base was made for is cut to that.\"\"\"

The keyword arguments of the Python API, the flags of a command, its recipes, its ``--help`` and docs/reference.md all
come from these fields. pydantic checks types and bounds; what does not fit raises `OptionError`, a `UserError`.
"""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, ConfigDict, PlainValidator, ValidationError
from pydantic.dataclasses import dataclass
from typing_extensions import dataclass_transform

from moh_llm.errors import UserError, shown_in
from moh_llm.reading import check_path, expand_home

_Kind = TypeVar("_Kind", bound=type)


class OptionError(UserError):
    """The value of one option, named by ``option``, cannot be used."""

    def __init__(self, option: str, message: str):
        super().__init__(message)
        self.option = option


def _place(value: Any) -> str:
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise ValueError("a path or Hub id")
    place = expand_home(value)
    check_path(place, "option")
    return place


def _several(value: Any) -> Any:
    return (value,) if isinstance(value, str | os.PathLike) else tuple(value) if isinstance(value, list) else value


Place = Annotated[str, PlainValidator(_place)]
"""A path or Hub id, with ``~`` expanded."""
Folder = Annotated[Path, PlainValidator(lambda value: Path(_place(value)))]
"""A local path, with ``~`` expanded."""
Places = Annotated[tuple[Place, ...], BeforeValidator(_several)]
"""Several of them; one alone is a list of one."""
Names = Annotated[tuple[str, ...], BeforeValidator(_several)]
Pair = Annotated[tuple[float, float], BeforeValidator(_several)]


@dataclass_transform(frozen_default=True)
def options(group: str = "", kw_only: bool = False) -> Callable[[_Kind], _Kind]:
    """Make a class a frozen dataclass of options.

    Args:
        group: its name as a field of another class, which errors put before the names of fields.
        kw_only: whether its values are given by name alone.
    """
    checks = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)
    prefix = f"{group}." if group else ""

    def decorate(kind: _Kind) -> _Kind:
        made: Any = dataclass(frozen=True, kw_only=kw_only, config=checks)(kind)
        make = made.__init__

        @functools.wraps(make)
        def init(self: Any, *args: Any, **given: Any) -> None:
            try:
                make(self, *args, **given)
            except ValidationError as error:
                raise _fault(error, prefix) from error

        made.__init__ = init
        return made

    return decorate


def _fault(error: ValidationError, prefix: str) -> OptionError:
    """The first fault that pydantic found, as ``context=0 must be greater than 0``."""
    faults = error.errors(include_url=False)
    name = str(faults[0]["loc"][0])
    option, kind = f"{prefix}{name}", faults[0]["type"]
    if kind == "unexpected_keyword_argument":
        return OptionError(option, f"unknown option {option!r}")
    if kind == "missing" and len(faults[0]["loc"]) == 1:
        return OptionError(option, f"{option} is missing")
    # A value of several types fails for each of them.
    rules = [_rule(fault) for fault in faults if fault["loc"][0] == name]
    value = faults[0]["input"]
    given = shown_in(value if isinstance(value, str) else repr(value))
    given = given if len(given) <= 60 else f"{given[:57]}..."
    return OptionError(option, f"{option}={given} must be {' or '.join(dict.fromkeys(rules))}")


def _rule(fault: Any) -> str:
    """What a value must be, in the words of pydantic or of a check of ours."""
    own = fault.get("ctx", {}).get("error")
    told = fault["msg"].removeprefix("Input should be ") if own is None else str(own)
    return told.replace("greater than or equal to", "at least").replace("less than or equal to", "at most")
