"""What all records share: reading a file into typed fields, and writing it in one step.

    class Milestone(Record):
        step: int = Field(ge=1)
        files: dict[str, str]

    milestone = Milestone.read(folder / "milestone.json")

A file that is no such record gives one line that names the file, the field, and what is wrong with it.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from typing_extensions import Self

from moh_llm.errors import UserError, shown_in
from moh_llm.files import write_json
from moh_llm.reading import read_json

_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument", "multiple_argument_values")  # error types of pydantic


class Record(BaseModel):
    """A JSON record with typed fields; fields that it does not know are kept as they are.

    Values are taken as JSON gives them: a number in quotes is no number. NaN and infinity are refused.
    """

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a record. Raises UserError when the file is missing, is not JSON, or lacks or misstates a field."""
        return cls.parse(read_json(path), str(path))

    @classmethod
    def parse(cls, content: Any, where: str) -> Self:
        """The record that ``content`` (from JSON) holds; ``where`` names it in the UserError of a malformed one."""
        with validating(where):
            return cls.model_validate(content)

    def write(self, path: Path) -> None:
        """Write the record as indented JSON in one step."""
        write_json(path, self.content())

    def content(self) -> dict[str, Any]:
        """The record as JSON's types, as it is written."""
        return self.model_dump(mode="json", exclude_unset=True)


@contextmanager
def validating(where: str, keys: Iterable[str] = ()) -> Iterator[None]:
    """Raise UserError for the first fault that pydantic finds in the block: ``WHERE has step = "x": Input should ...``.

    ``where`` names what is validated, and ``keys`` are those that it may have, where others are faults.
    """
    try:
        yield
    except ValidationError as error:
        faults = error.errors(include_url=False)
        fault = next((fault for fault in faults if fault["type"] in _UNKNOWN), faults[0])
        raise UserError(f"{where} {_describe(fault, ', '.join(keys))}") from error


def _describe(fault: Any, keys: str) -> str:
    field = ".".join(map(str, fault["loc"]))
    if fault["type"] in _UNKNOWN:
        return f"has the unknown key {field!r}; the keys are {keys}"
    if fault["type"] == "value_error":  # of a check that a record defines itself
        return f"is malformed: {fault['ctx']['error']}"
    if fault["type"] == "missing":
        return f"lacks {field}"
    if not field and keys:
        return f"must be a map with the keys {keys}"
    given = shown_in(repr(fault["input"]))  # before it is cut, which could hide that it is an address
    given = given if len(given) <= 60 else f"{given[:57]}..."
    name = f"{field} = {given}" if field else given
    return f"has {name}: {fault['msg']}"
