"""Documents of a source's files: JSON lines, parquet and plain text, filtered, every fault named."""

import codecs
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import IO, Any

from moh_llm.addresses import reason
from moh_llm.data.locate import SourceFile
from moh_llm.data.mixture import Source
from moh_llm.data.opening import is_corruption, open_binary
from moh_llm.errors import UserError

# Names under which public corpora keep a record's text, most common first.
TEXT_FIELDS = ("text", "content", "raw_content", "document")
_ENDINGS = {
    "jsonl": (".jsonl", ".json", ".ndjson"),
    "parquet": (".parquet",),
    "text": (".txt", ".md"),
}
_COMPRESSED = {"jsonl": ("", ".gz", ".zst", ".zstd"), "parquet": ("",), "text": ("", ".gz", ".zst", ".zstd")}
_SHOWN = 5  # bad records that a report quotes


@dataclass
class Reading:
    """What reading a source's files met with, and what to do with a bad record: stop, with advice, or skip."""

    skip_bad: bool = False
    advice: str = "mend it, or pass --on-bad-record skip to leave such records out"
    documents: int = 0
    bytes: int = 0
    empty: int = 0
    filtered: int = 0
    bad: int = 0
    examples: list[str] = field(default_factory=list)

    def fault(self, message: str) -> None:
        """Count a bad record, or raise `UserError` where those stop the run."""
        if not self.skip_bad:
            raise UserError(f"{message}; {self.advice}")
        self.bad += 1
        if len(self.examples) < _SHOWN:
            self.examples.append(message)


def read_documents(
    file: SourceFile, source: Source, reading: Reading, position: Callable[[int], None] | None = None
) -> Iterator[str]:
    """Yield the file's documents in their order; empty and filtered ones are left out and counted.

    Args:
        file: what to read.
        source: gives format, text field and filters.
        reading: counts, and says what happens at a bad record.
        position: told with each record how many stored bytes were read.

    Raises:
        UserError: the file is gone, its format is not known or a package to read it is missing;
            or, unless bad records are skipped, one is met. The message names file and record.
    """
    kind = source.format or _format_of(file)
    reader = {"jsonl": _json_lines, "parquet": _parquet_rows, "text": _whole_text}[kind]
    number = 0  # of the last record that was read
    try:
        with open_binary(file.path, seekable=kind == "parquet") as (raw, plain):
            records = _Records(file, source, reading, raw.tell)
            for at, text in reader(plain, records):
                number = at
                if position is not None:
                    position(records.tell())
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
    """The text and its bytes; what UTF-8 cannot hold (half a surrogate pair, from JSON) becomes a question mark."""
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
    text_field: str | None = None

    def candidates(self) -> tuple[str, ...]:
        """Names under which the text may lie."""
        return (self.source.text_field,) if self.source.text_field else TEXT_FIELDS

    def text_of(self, record: Any, where: str, names: Iterable[str] | None = None) -> str | None:
        """The record's text, or None where it is filtered out or bad; `names` are its fields, if it is cut to some."""
        if not isinstance(record, dict):
            self.reading.fault(f"{where}: expected a JSON object, found {type(record).__name__}")
            return None
        for name, accepted in self.source.filters.items():
            if not _accepts(_value_at(record, name), accepted):
                self.reading.filtered += 1
                return None
        if self.text_field is None:
            self.text_field = next((n for n in self.candidates() if isinstance(_value_at(record, n), str)), None)
        text = _value_at(record, self.text_field) if self.text_field else None
        if isinstance(text, str):
            return text
        wanted = self.text_field or " or ".join(self.candidates())
        found = "; ".join(
            f"its {name} is {type(value).__name__}, no text"
            for name in self.candidates()
            if (value := _value_at(record, name)) is not None
        )
        fields = ", ".join(" ".join(str(name).split()) for name in names or record) or "no field"
        self.reading.fault(f"{where}: {found or f'no text field {wanted}; the record has {fields}'}")
        return None


def _json_lines(plain: IO[bytes], records: _Records) -> Iterator[tuple[int, str | None]]:
    for number, line in enumerate(plain, 1):
        where = f"{records.file.name}, line {number}"
        decoded = _decode(line, where, records, first=number == 1)
        text = None
        if decoded is not None and decoded.strip():
            try:
                record = json.loads(decoded)
            except json.JSONDecodeError as error:
                records.reading.fault(f"{where}: not a JSON record ({error.msg} at character {error.pos + 1})")
            except (ValueError, RecursionError) as error:
                records.reading.fault(f"{where}: not a JSON record ({reason(error)})")
            else:
                text = records.text_of(record, where)
        yield number, text


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
    # Reading ahead, by pyarrow, says nothing of where we are; rows do.
    records.tell = lambda: size * number // max(1, rows)
    # Other columns stay unread.
    for batch in table.iter_batches(batch_size=128, columns=columns):
        for record in batch.to_pylist() if columns else [{}] * batch.num_rows:
            number += 1
            yield number, records.text_of(record, f"{records.file.name}, row {number}", present)


def _whole_text(plain: IO[bytes], records: _Records) -> Iterator[tuple[int, str | None]]:
    if data := plain.read():
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
