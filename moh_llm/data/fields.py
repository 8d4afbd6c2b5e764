"""The text of a record: its filters, its field, and the counts of a source's reading."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from moh_llm.data import chat
from moh_llm.data.filters import Filters, value_at
from moh_llm.data.locate import SourceFile
from moh_llm.data.mixture import Source
from moh_llm.data.notes import note
from moh_llm.errors import UserError

# Names under which public corpora keep a record's text, most common first.
TEXT_FIELDS = ("text", "content", "raw_content", "document")
_SHOWN = 5  # bad records that a report quotes
_SHOWN_FIELDS = 200  # characters of a record's field names


@dataclass
class Reading:
    """Counts of reading a source's files, and what to do with a bad record: stop, with advice, or skip.

    `stored` is the number of stored bytes read so far, over all files.
    """

    skip_bad: bool = False
    advice: str = "correct it, or pass --on-bad-record skip to leave such records out"
    stored: int = field(default=0, compare=False)
    documents: int = 0
    bytes: int = 0
    empty: int = 0
    filtered: int = 0
    bad: int = 0
    examples: list[str] = field(default_factory=list)
    filters: Filters | None = field(default=None, compare=False)  # with what records met; None: none was read
    text_fields: dict[str, str] = field(default_factory=dict, compare=False)  # that were found, each with a file

    def fault(self, message: str, count: int = 1) -> None:
        """Count bad records, or raise `UserError` where those stop the run."""
        if not self.skip_bad:
            raise UserError(f"{message}; {self.advice}")
        self.bad += count
        if len(self.examples) < _SHOWN:
            self.examples.append(message)


@dataclass
class Records:
    """Takes the text out of parsed records of one file."""

    file: SourceFile
    source: Source
    reading: Reading
    tell: Callable[[], int]  # stored bytes read so far
    template: chat.ChatTemplate | None = None
    text_field: str | None = field(init=False)

    filters: Filters = field(init=False)

    def __post_init__(self) -> None:
        self.text_field = self.source.text_field
        if self.reading.filters is None:
            self.reading.filters = Filters(self.source.filters)
        self.filters = self.reading.filters

    def candidates(self) -> tuple[str, ...]:
        """Names of the fields to read, or that the field of the text may have."""
        if self.source.type != "text":
            return (*chat.FIELDS[self.source.type], *chat.OPTIONS)
        return (self.source.text_field,) if self.source.text_field else TEXT_FIELDS

    def text_of(self, record: Any, where: str, names: Iterable[str] | None = None) -> str | None:
        """The record's text, or None where it is filtered out or bad; `names` are its fields, if it is cut to some."""
        if not isinstance(record, dict):
            self.reading.fault(f"{where}: expected a JSON object, found {type(record).__name__}")
            return None
        if not self.filters.keep(record):
            self.reading.filtered += 1
            return None
        if self.source.type != "text":
            return self._chat(record, where)
        if self.source.text_field is None:
            self._find_text_field(record, where)
        text = value_at(record, self.text_field) if self.text_field else None
        if isinstance(text, str):
            return text
        self.reading.fault(f"{where}: {self._no_text(record, text, names)}")
        return None

    def _find_text_field(self, record: dict[str, Any], where: str) -> None:
        """Take the first known name in the record as the text's field. Raises UserError where it was another before.

        Whether it holds a text is not asked: else a field of something else would be read where one text is missing.
        """
        found = next((name for name in TEXT_FIELDS if name in record), None)
        known = TEXT_FIELDS if self.text_field is None else TEXT_FIELDS[: TEXT_FIELDS.index(self.text_field)]
        if found in known and self.text_field is not None:
            raise UserError(
                f"{where}: it has a field {found}, and records before it, read from {self.text_field}, have none; "
                "name the field of the text as text_field of the source, in a mixture file"
            )
        if self.text_field is None and found is not None:
            self.text_field, fields = found, self.reading.text_fields
            if found not in fields and fields:
                other, file = next(iter(fields.items()))
                note(
                    f"source {self.source.name}: the text is read from {other} in {file}, from {found} in "
                    f"{self.file.name}; say text_field where it is one field"
                )
            fields.setdefault(found, self.file.name)

    def _no_text(self, record: dict[str, Any], value: Any, names: Iterable[str] | None) -> str:
        """What a record has in place of a text, in words."""
        others = [name for name in self.candidates() if name != self.text_field and isinstance(record.get(name), str)]
        other = f" (if its {others[0]} is the text, say text_field: {others[0]} in a mixture file)" if others else ""
        if value is not None:
            return f"its {self.text_field} is {type(value).__name__}, no text{other}"
        fields = ", ".join(" ".join(str(name).split()) for name in names or record) or "no field"
        fields = fields if len(fields) <= _SHOWN_FIELDS else f"{fields[:_SHOWN_FIELDS]}..."
        wanted = self.text_field or " or ".join(self.candidates())
        return f"no text field {wanted}; the record has {fields}{other}"

    def dated(self, date: str) -> chat.ChatTemplate | None:
        """The template as of a date."""
        return self.template and replace(self.template, date=date)

    def _chat(self, record: dict[str, Any], where: str) -> str | None:
        try:
            values = {name: value_at(record, name) for name in self.candidates()}
            text = chat.read_chat(self.source.type, values, self.dated(self.source.chat_date))
            if self.template and self.template.reads_clock and self.source.chat_date != chat.CHAT_DATE:
                # Where the date is changed, the same conversations are held out.
                text.group = str(chat.read_chat(self.source.type, values, self.dated(chat.CHAT_DATE)))
            return text
        except ValueError as error:
            self.reading.fault(f"{where}: {error}")
            return None
