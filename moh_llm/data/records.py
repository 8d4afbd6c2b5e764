"""Documents of a source's files: JSON lines, parquet and plain text, filtered, each fault with file and record."""

import codecs
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from moh_llm.data import chat
from moh_llm.data.locate import SourceFile, locate
from moh_llm.data.mixture import Source
from moh_llm.data.notes import note
from moh_llm.data.opening import embedded_documents, is_corruption, open_binary
from moh_llm.errors import UserError, reason

# Names under which public corpora keep a record's text, most common first.
TEXT_FIELDS = ("text", "content", "raw_content", "document")
_ENDINGS = {
    "jsonl": (".jsonl", ".json", ".ndjson"),
    "parquet": (".parquet",),
    "text": (".txt", ".md"),
}
_COMPRESSED = {"jsonl": ("", ".gz", ".zst", ".zstd"), "parquet": ("",), "text": ("", ".gz", ".zst", ".zstd")}
_SHOWN = 5  # bad records that a report quotes
_SHOWN_FIELDS = 200  # characters of a record's field names
# Of one record: a line of JSON as it stands in the file, a whole text file, the columns of a parquet row that are read.
# A tokenizer needs about 130 times as much memory as the document has bytes. The longest books have a few MiB.
RECORD_BYTES = 16 << 20
_BATCH_ROWS = 16  # of parquet that are held at once


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
    text_fields: dict[str, str] = field(default_factory=dict, compare=False)  # that were found, each with a file

    def fault(self, message: str, count: int = 1) -> None:
        """Count bad records, or raise `UserError` where those stop the run."""
        if not self.skip_bad:
            raise UserError(f"{message}; {self.advice}")
        self.bad += count
        if len(self.examples) < _SHOWN:
            self.examples.append(message)


def source_documents(
    source: Source,
    files: Sequence[SourceFile] | None = None,
    reading: Reading | None = None,
    template: chat.ChatTemplate | None = None,
) -> Iterator[tuple[str, str]]:
    """Yield group and text of a source's documents in their order, without empty and filtered ones.

    A document of a file is a group of its own: its group is its text.

    Args:
        source: what to read.
        files: those of its files to read; None: all.
        reading: counts; None: a bad record stops the reading.
        template: that of the tokenizer, which messages become text by.

    Raises:
        UserError: text that cannot be read.
    """
    reading = reading or Reading(advice="correct it, or leave the file out")
    if source.builtin is not None:
        for group, text in embedded_documents(source.builtin):
            reading.documents += 1
            reading.bytes += len(text.encode())
            yield group, text
    for file in locate(source) if files is None else files:
        for text in read_documents(file, source, reading, template):
            yield text, text


def read_documents(
    file: SourceFile, source: Source, reading: Reading, template: chat.ChatTemplate | None = None
) -> Iterator[str]:
    """Yield the file's documents in their order; empty and filtered ones are left out and counted.

    Args:
        file: what to read.
        source: gives format, type, text field and filters.
        reading: counts, and stops or skips at a bad record.
        template: that of the tokenizer; with a source of another type than text, documents are `ChatText`.

    Memory is bounded by `RECORD_BYTES` and, for parquet, by its pages; a longer record is a bad one.

    Raises:
        UserError: the file is gone, its format is not known or a package to read it is missing;
            or, unless bad records are skipped, one is met. The message names file and record.
    """
    kind = source.format or _format_of(file)
    if kind == "text" and source.type != "text":
        raise UserError(f"{file.name}: type: {source.type} needs JSON lines or parquet, not plain text")
    reader = {"jsonl": _json_lines, "parquet": _parquet_rows, "text": _whole_text}[kind]
    before, number = reading.stored, 0  # the number is that of the last record that was read
    try:
        with open_binary(file.path, seekable=kind == "parquet") as (raw, plain):
            records = _Records(file, source, reading, raw.tell, template)
            for at, text in reader(plain, records):
                number = at
                reading.stored = before + records.tell()
                if text is None:
                    continue
                if not text.strip():
                    reading.empty += 1
                    continue
                text, size = _encodable(text)
                reading.documents += 1
                reading.bytes += size
                yield text
            if not number:
                reading.fault(f"{file.name} is empty")
        reading.stored = before + file.size if file.size is not None else reading.stored
    except (UserError, GeneratorExit):
        raise
    # zstandard's, pyarrow's and the transports' errors share no base below Exception.
    except Exception as error:
        if is_corruption(error):
            reading.fault(f"{file.name} cannot be read past record {number}: {reason(error)}")
        elif isinstance(error, FileNotFoundError) and "://" not in file.path:
            raise UserError(f"{file.name} is gone; it was there when the source was listed") from error
        else:
            # With the transports, what went wrong is often only in the cause.
            why = reason(error.__cause__ or error)
            raise UserError(f"{file.name} cannot be read past record {number}: {why}; try again") from error


def _encodable(text: str) -> tuple[str, int]:
    """The text and its number of bytes; half a surrogate pair, which JSON can hold, becomes a question mark."""
    try:
        return text, len(text.encode())
    except UnicodeEncodeError:
        data = text.encode("utf-8", "replace")
        return data.decode(), len(data)


@dataclass
class _Records:
    """Takes the text out of parsed records of one file."""

    file: SourceFile
    source: Source
    reading: Reading
    tell: Callable[[], int]  # stored bytes read so far
    template: chat.ChatTemplate | None = None
    text_field: str | None = field(init=False)

    def __post_init__(self) -> None:
        self.text_field = self.source.text_field

    def candidates(self) -> tuple[str, ...]:
        """Names of the fields to read, or that the field of the text may have."""
        if self.source.type != "text":
            return (*chat.FIELDS[self.source.type], *chat.OPTIONS)
        return (self.source.text_field,) if self.source.text_field else TEXT_FIELDS

    def too_long(self, where: str, count: int = 1) -> None:
        """Report `count` records of more than `RECORD_BYTES`."""
        most = f"{RECORD_BYTES / 2**20:.4g} MiB"
        self.reading.fault(
            f"{where}: longer than {most}, the most for one document (split it into shorter ones)", count
        )

    def text_of(self, record: Any, where: str, names: Iterable[str] | None = None) -> str | None:
        """The record's text, or None where it is filtered out or bad; `names` are its fields, if it is cut to some."""
        if not isinstance(record, dict):
            self.reading.fault(f"{where}: expected a JSON object, found {type(record).__name__}")
            return None
        for name, accepted in self.source.filters.items():
            if not _accepts(_value_at(record, name), accepted):
                self.reading.filtered += 1
                return None
        if self.source.type != "text":
            return self._chat(record, where)
        if self.source.text_field is None:
            self._find_text_field(record, where)
        text = _value_at(record, self.text_field) if self.text_field else None
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

    def _chat(self, record: dict[str, Any], where: str) -> str | None:
        try:
            values = {name: _value_at(record, name) for name in self.candidates()}
            return chat.read_chat(self.source.type, values, self.template)
        except ValueError as error:
            self.reading.fault(f"{where}: {error}")
            return None


def _json_lines(plain: IO[bytes], records: _Records) -> Iterator[tuple[int, str | None]]:
    for number, line in enumerate(_lines(plain), 1):
        where = f"{records.file.name}, line {number}"
        decoded = None if line is None else _decode(line, where, records, first=number == 1)
        text = None
        if line is None:
            records.too_long(where)
        elif decoded is not None and decoded.strip():
            try:
                record = json.loads(decoded)
            except json.JSONDecodeError as error:
                records.reading.fault(f"{where}: not a JSON record ({error.msg} at character {error.pos + 1})")
            except (ValueError, RecursionError) as error:
                records.reading.fault(f"{where}: not a JSON record ({reason(error)})")
            else:
                text = records.text_of(record, where)
        yield number, text


def _lines(plain: IO[bytes]) -> Iterator[bytes | None]:
    """The lines with their ends; None for one that is too long, of which no more than a part is held."""
    while line := plain.readline(RECORD_BYTES + 1):
        if len(line) <= RECORD_BYTES:
            yield line
            continue
        yield None  # before the rest of it is read: where bad records stop the run, it is not
        while line and not line.endswith(b"\n"):
            line = plain.readline(1 << 20)


def _parquet_rows(plain: IO[bytes], records: _Records) -> Iterator[tuple[int, str | None]]:
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise UserError(f'{records.file.name}: reading it needs pyarrow; pip install "moh-llm[data]"') from error
    size = plain.seek(0, os.SEEK_END)
    table = ParquetFile(plain)
    present, rows = table.schema_arrow.names, table.metadata.num_rows
    wanted = [*records.source.filters, *records.candidates()]
    columns = [name for name in present if name in wanted or any(w.split(".")[0] == name for w in wanted)]
    number = 0
    # pyarrow reads ahead, so the position in the file is too far; the number of rows is right.
    records.tell = lambda: size * number // max(1, rows)
    for group in range(table.num_row_groups):
        described = table.metadata.row_group(group)
        if _mean_size(described, columns) > RECORD_BYTES:  # known without reading it
            first, number = number + 1, number + described.num_rows
            span = f"row {number}" if first == number else f"rows {first} to {number}, in the mean"
            records.too_long(f"{records.file.name}, {span}", described.num_rows)
            yield number, None
            continue
        # Other columns stay unread.
        for batch in table.iter_batches(batch_size=_BATCH_ROWS, row_groups=[group], columns=columns):
            for record in _rows(batch):
                number += 1
                where = f"{records.file.name}, row {number}"
                if record is None:
                    records.too_long(where)
                yield number, None if record is None else records.text_of(record, where, present)


def _rows(batch: Any) -> Iterator[dict[str, Any] | None]:
    """The rows of an Arrow batch; None for one that is too long, which is not made a Python object."""
    if not batch.num_columns:
        yield from ({} for _ in range(batch.num_rows))
    elif batch.nbytes <= RECORD_BYTES:
        yield from batch.to_pylist()
    else:
        for one in (batch.slice(row, 1) for row in range(batch.num_rows)):
            yield one.to_pylist()[0] if one.nbytes <= RECORD_BYTES else None


def _mean_size(group: Any, columns: Sequence[str]) -> float:
    """Bytes of a row of a parquet row group, of the columns that are read, by the metadata of the file."""
    chunks = [group.column(i) for i in range(group.num_columns)]
    inside = tuple(f"{name}." for name in columns)
    read = [chunk for chunk in chunks if chunk.path_in_schema in columns or chunk.path_in_schema.startswith(inside)]
    return sum(chunk.total_uncompressed_size for chunk in read) / max(1, group.num_rows)


def _whole_text(plain: IO[bytes], records: _Records) -> Iterator[tuple[int, str | None]]:
    data = plain.read(RECORD_BYTES + 1)
    if len(data) > RECORD_BYTES:
        records.too_long(records.file.name)
        yield 1, None
    elif data:
        text = _decode(data, records.file.name, records, first=True)
        yield 1, None if text is None else text.replace("\r\n", "\n")


def _decode(data: bytes, where: str, records: _Records, first: bool) -> str | None:
    """UTF-8 bytes as text, without the mark that some files begin with; None where they are something else."""
    skipped = len(codecs.BOM_UTF8) if first and data.startswith(codecs.BOM_UTF8) else 0
    try:
        return data[skipped:].decode()
    except UnicodeDecodeError as error:
        records.reading.fault(f"{where}: byte {skipped + error.start + 1} is not UTF-8")
        return None


def _format_of(file: SourceFile) -> str:
    name = file.name.lower()
    for kind, endings in _ENDINGS.items():
        if name.endswith(tuple(ending + packed for ending in endings for packed in _COMPRESSED[kind])):
            return kind
    known = ", ".join(ending for endings in _ENDINGS.values() for ending in endings)
    raise UserError(f"{file.name}: format not known by its ending; known are {known}, also .gz and .zst; give format")


def _value_at(record: dict[str, Any], name: str) -> Any:
    """The value at a dotted name; a field that itself has dots in its name comes first. None where there is none."""
    if name in record:
        return record[name]
    value: Any = record
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            return None
        value = value[part]
    return value


def _accepts(value: Any, accepted: Any) -> bool:
    if isinstance(accepted, dict):
        if not isinstance(value, int | float):
            return False
        return accepted.get("min", value) <= value <= accepted.get("max", value)
    return value in accepted if isinstance(accepted, list) else value == accepted
