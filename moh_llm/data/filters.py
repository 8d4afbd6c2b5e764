"""Filters of a source: which records are kept, and which parts of a filter no record meets.

A value that YAML reads as another type than the field has, or a misspelt name, would leave all records out, or some.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moh_llm.records.tokens import FilterRecord

# Types of values in words; other types, as parquet has them, by their name.
_WORDS = {str: "a text", bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "a map"}


@dataclass
class Filters:
    """A source's filters, with what was met so far."""

    filters: Mapping[str, Any]
    met: dict[str, FilterRecord] = field(init=False)

    def __post_init__(self) -> None:
        self.met = {
            name: FilterRecord(met=[False] * len(_parts(accepted)), types=[]) for name, accepted in self.filters.items()
        }

    def keep(self, record: dict[str, Any]) -> bool:
        """Whether a record meets all filters."""
        kept = True
        for name, accepted in self.filters.items():
            value, seen, found = value_at(record, name), self.met[name], False
            for number, part in enumerate(_parts(accepted)):
                if _accepts(value, part):
                    seen.met[number] = found = True
            if value is not None and (kind := _WORDS.get(type(value), type(value).__name__)) not in seen.types:
                seen.types.append(kind)
            kept = kept and found
        return kept


def merge(parts: Sequence[Mapping[str, FilterRecord]]) -> dict[str, FilterRecord]:
    """What was met in several readings, of parts of a source's files."""
    return {
        name: FilterRecord(
            met=[any(found) for found in zip(*(part[name].met for part in parts), strict=True)],
            types=sorted({kind for part in parts for kind in part[name].types}),
        )
        for name in parts[0]
    }


def unmet(filters: Mapping[str, Any], met: Mapping[str, FilterRecord]) -> list[str]:
    """The parts of filters that no record met, in words; of records that were read to their end."""
    lines = []
    for name, accepted in filters.items():
        for part, found in zip(_parts(accepted), met[name].met, strict=True):
            if found:
                continue
            line, types = f"no record meets the filter {name}: {_shown(part)}", met[name].types
            wanted = "a number" if isinstance(part, dict) else _WORDS[type(part)]
            if not types:
                line += f", since none has a value of {name}"
            elif wanted not in types:
                quote = "; put it in quotes" if types == ["a text"] else ""
                line += f": this is {wanted}, and the field holds {' or '.join(sorted(types))}{quote}"
            lines.append(line)
    return lines


def value_at(record: dict[str, Any], name: str) -> Any:
    """The value at a dotted name; a field that itself has dots in its name comes first. None where there is none."""
    if name in record:
        return record[name]
    value: Any = record
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            return None
        value = value[part]
    return value


def _parts(accepted: Any) -> list[Any]:
    """Values of a filter, of which a record has one, or its range."""
    return accepted if isinstance(accepted, list) else [accepted]


def _accepts(value: Any, part: Any) -> bool:
    # To Python true is 1, and false is 0.
    if isinstance(value, bool) != isinstance(part, bool):
        return False
    if isinstance(part, dict):
        return isinstance(value, int | float) and part.get("min", value) <= value <= part.get("max", value)
    return bool(value == part)


def _shown(part: Any) -> str:
    if isinstance(part, bool):
        return str(part).lower()
    return f"{{{', '.join(f'{key}: {value}' for key, value in part.items())}}}" if isinstance(part, dict) else str(part)
