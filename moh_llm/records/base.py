"""What all records share: reading a file into typed fields, and writing it in one step.

    class Milestone(Record):
        step: int = Field(ge=1)
        files: dict[str, str]

    milestone = Milestone.read(folder / "milestone.json")

A file that is no such record gives one line that names the file, the field, and what is wrong with it.
"""

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from typing_extensions import Self

from moh_llm.errors import UserError, without_passwords
from moh_llm.files import write_json
from moh_llm.reading import read_json


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
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            raise UserError(f"{where} {describe_fault(error)}") from error

    def write(self, path: Path) -> None:
        """Write the record as indented JSON in one step."""
        write_json(path, self.content())

    def content(self) -> dict[str, Any]:
        """The record as JSON's types, as it is written."""
        return self.model_dump(mode="json", exclude_unset=True)


def describe_fault(error: ValidationError) -> str:
    """The first fault that validation found, on one line: ``has step = "x": Input should be a valid integer``."""
    fault = error.errors(include_url=False)[0]
    if fault["type"] == "value_error":  # of a check that a record defines itself
        return f"is malformed: {fault['ctx']['error']}"
    field = ".".join(map(str, fault["loc"]))
    if fault["type"] == "missing":
        return f"lacks {field}"
    given = without_passwords(repr(fault["input"]))  # before it is cut, which could hide that it is an address
    given = given if len(given) <= 60 else f"{given[:57]}..."
    name = f"{field} = {given}" if field else given
    return f"has {name}: {fault['msg']}"
