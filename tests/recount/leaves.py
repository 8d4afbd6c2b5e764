"""A record against the tree of what its figures should be: each number must be known, and equal."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Exempt:
    """A field, or all fields below a key, that is not computed again; `why` must say so."""

    why: str


@dataclass(frozen=True)
class Near:
    """A number that may be off by ``by``, where the record rounds it or its definition leaves a choice."""

    value: float
    by: float


TIME = Exempt("a time, or what follows from one")
# Of figures in float32, which are added up in another order than the package's.
_RELATIVE, _ABSOLUTE = 2e-5, 2e-6


def differences(found: Any, expected: Any, path: str) -> Iterator[str]:
    """What in a record is not as expected, one line a field; ``path`` names the record."""
    if isinstance(expected, Exempt):
        return
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        for key in [key for key, value in found.items() if key not in expected and _holds_numbers(value)]:
            yield f"{path}.{key}: unknown; compute it again (it is {_short(found[key])})"
        for key, value in expected.items():
            if key in found:
                yield from differences(found[key], value, f"{path}.{key}")
            elif not isinstance(value, Exempt):
                yield f"{path}.{key}: missing (it would be {_short(value)})"
    elif isinstance(expected, list | tuple) and isinstance(found, list | tuple):
        if len(found) != len(expected):
            yield f"{path}: {len(found)} entries, not {len(expected)}"
        for number, (one, other) in enumerate(zip(found, expected, strict=False)):
            yield from differences(one, other, f"{path}[{number}]")
    elif not _equal(found, expected):
        yield f"{path}: {_short(found)} is recorded, and it is {_short(expected)}"


def _equal(found: Any, expected: Any) -> bool:
    if isinstance(expected, Near):
        return _is_number(found) and abs(found - expected.value) <= expected.by
    if isinstance(expected, float) and _is_number(found):
        return math.isclose(found, expected, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE)
    return type(found) is type(expected) and found == expected


def _holds_numbers(value: Any) -> bool:
    """Whether it is a number, or a list or map that holds one: names and settings need no entry."""
    if isinstance(value, Mapping):
        return any(map(_holds_numbers, value.values()))
    return any(map(_holds_numbers, value)) if isinstance(value, list) else _is_number(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _short(value: Any) -> str:
    return repr(value) if len(repr(value)) < 120 else f"{repr(value)[:117]}..."
