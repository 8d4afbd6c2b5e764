"""Documents of a source: JSON lines, parquet and plain text within bounds; each fault names file and record.

datatrove's and datasets' readers do not serve here: they hold a line or a row of any length, and datatrove's skip
records without text or JSON with a line in a log, so that a corpus would shrink unnoticed.
"""

import codecs
import gzip
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from moh_llm.data import chat
from moh_llm.data.embedded import embedded_documents
from moh_llm.data.locate import SourceFile, locate, open_file
from moh_llm.data.mixture import Source
from moh_llm.errors import UserError, reason

# Names under which public corpora keep a record's text, most common first.
TEXT_FIELDS = ("text", "content", "raw_content", "document")
# Of one record: a line of JSON as it stands in the file, a text file, the columns of a parquet row that are read.
# A tokenizer needs about 130 times as much memory as the document has bytes. The longest books have a few MiB.
RECORD_BYTES = 16 << 20
_BATCH_ROWS = 16  # of parquet that are held at once
_ENDINGS = {"jsonl": (".jsonl", ".json", ".ndjson"), "parquet": (".parquet",), "text": (".txt", ".md")}
_COMPRESSED = (".gz", ".zst", ".zstd")
_EXAMPLES = 5  # bad records that a report quotes
_ADVICE = "correct it or leave the file out (moh-llm tokenize --on-bad-record skip leaves such records out)"


@dataclass
class Reading:
    """Counts of what was read of a source, and whether a bad record stops the run or is skipped.

    `stored` is the number of stored bytes read so far, over all files.
    """

    skip_bad: bool = False
    stored: int = field(default=0, compare=False)
    documents: int = 0
    bytes: int = 0
    empty: int = 0
    filtered: int = 0
    bad: int = 0
    examples: list[str] = field(default_factory=list)

    def fault(self, message: str, count: int = 1) -> None:
        """Count bad records, or raise `UserError` where those stop the run."""
        if not self.skip_bad:
            raise UserError(f"{message}; {_ADVICE}")
        self.bad += count
        if len(self.examples) < _EXAMPLES:
            self.examples.append(message)

    def check_text(self, source: Source) -> None:
        """Raise UserError if a source that was read to its end gave no document."""
        if not self.documents:
            left_out = f"{self.filtered} records were filtered out, {self.bad} bad"
            raise UserError(f"source {source.name} holds no text ({left_out})")


def source_documents(
    source: Source,
    files: Sequence[SourceFile] | None = None,
    reading: Reading | None = None,
    template: chat.ChatTemplate | None = None,
) -> Iterator[tuple[str, str]]:
    """Yield group and text of a source's documents in their order; empty and filtered ones are left out and counted.

    `is_held_out` splits documents by their group. Of a document in a file it is the text, so that duplicates stay
    together.

    Args:
        source: what to read.
        files: those of its files to read; None: all.
        reading: counts, and stops or skips at a bad record; None: a bad record stops.
        template: the tokenizer's chat template, which turns messages into text. Documents of a source of another type
            than text are `ChatText`.

    Raises:
        UserError: a file is gone, its format is not known, a package to read it is missing, or, unless bad records
            are skipped, a record is bad. The message names file and record.
    """
    reading = reading or Reading()
    if source.builtin is not None:
        for group, text in embedded_documents(source.builtin):
            reading.documents += 1
            reading.bytes += len(text.encode())
            yield group, text
    for file in locate(source) if files is None else files:
        for text in _FileReader(file, source, reading, template).documents():
            yield text.group if isinstance(text, chat.ChatText) else text, text


def value_at(record: dict[str, Any], name: str) -> Any:
    """The value at a dotted name, or of a field whose own name has the dots. None where there is none."""
    if name in record:
        return record[name]
    value: Any = record
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            return None
        value = value[part]
    return value


class _FileReader:
    """Reads the documents of one file. Memory is bounded by `RECORD_BYTES` and, for parquet, by its pages."""

    def __init__(self, file: SourceFile, source: Source, reading: Reading, template: chat.ChatTemplate | None):
        self.file, self.source, self.reading, self.template = file, source, reading, template
        self.text_field = source.text_field
        self.format = source.format or self._format_of_ending()
        self.number = 0  # of the last record that was read
        self.names: Sequence[str] = ()  # columns of a parquet file

    def _format_of_ending(self) -> str:
        name = self.file.name.lower()
        for kind, endings in _ENDINGS.items():
            packed = ("",) if kind == "parquet" else ("", *_COMPRESSED)
            if name.endswith(tuple(ending + more for ending in endings for more in packed)):
                return kind
        known = ", ".join(ending for endings in _ENDINGS.values() for ending in endings)
        raise UserError(
            f"{self.file.name}: unknown ending; known are {known}, also with .gz and .zst; or set format of the source"
        )

    def documents(self) -> Iterator[str]:
        """Yield the texts in their order."""
        name, reading = self.file.name, self.reading
        if self.format == "text" and self.source.type != "text":
            raise UserError(f"{name}: type: {self.source.type} needs JSON lines or parquet, not plain text")
        if self.format == "text" and self.source.filters:
            raise UserError(f"{name}: filters need JSON lines or parquet, not plain text; remove them from the source")
        records = {"jsonl": self._json_lines, "parquet": self._parquet_rows, "text": self._whole_text}[self.format]
        before = reading.stored
        try:
            with open_file(self.file.path, seekable=self.format == "parquet") as (raw, plain):
                for stored, where, record in records(raw, plain):
                    reading.stored = before + stored
                    text = None if record is None else self._text_of(record, where)
                    if text is None:
                        continue
                    if not text.strip():
                        reading.empty += 1
                        continue
                    try:
                        size = len(text.encode())
                    except UnicodeEncodeError:  # JSON can hold half a surrogate pair
                        text = text.encode("utf-8", "replace").decode()
                        size = len(text.encode())
                    reading.documents += 1
                    reading.bytes += size
                    yield text
                if not self.number:
                    reading.fault(f"{name} is empty")
            reading.stored = before + self.file.size if self.file.size is not None else reading.stored
        except (UserError, GeneratorExit):
            raise
        # pyarrow's and the transports' errors share no base below Exception.
        except Exception as error:
            if _is_corruption(error):
                reading.fault(f"{name} cannot be read past record {self.number}: {reason(error)}")
            elif isinstance(error, FileNotFoundError) and "://" not in self.file.path:
                raise UserError(f"{name} is gone; it was there when the source was listed") from error
            else:
                # The transports keep what went wrong in the cause.
                why = reason(error.__cause__ or error)
                raise UserError(f"{name} cannot be read past record {self.number}: {why}; try again") from error

    # Each of these yields, per record, the stored bytes read so far, where it is, and its fields; None if it is bad.

    def _json_lines(self, raw: IO[bytes], plain: IO[bytes]) -> Iterator[tuple[int, str, Any]]:
        while line := plain.readline(RECORD_BYTES + 1):
            self.number += 1
            where, record = f"{self.file.name}, line {self.number}", None
            if len(line) > RECORD_BYTES:
                self._too_long(where)
                while line and not line.endswith(b"\n"):
                    line = plain.readline(1 << 20)
            elif (text := self._decode(line, where)) is not None and text.strip():
                try:
                    record = json.loads(text)
                except (ValueError, RecursionError) as error:
                    self.reading.fault(f"{where}: not a JSON record ({reason(error)})")
            yield raw.tell(), where, record

    def _parquet_rows(self, raw: IO[bytes], plain: IO[bytes]) -> Iterator[tuple[int, str, Any]]:
        try:
            from pyarrow.parquet import ParquetFile
        except ImportError as error:
            raise UserError(f'{self.file.name}: reading it needs pyarrow; pip install "moh-llm[data]"') from error
        size = plain.seek(0, os.SEEK_END)
        table = ParquetFile(plain)
        self.names, rows = table.schema_arrow.names, max(1, table.metadata.num_rows)
        wanted = [*self.source.filters, *self._fields()]
        columns = [name for name in self.names if name in wanted or any(w.split(".")[0] == name for w in wanted)]
        for number in range(table.num_row_groups):
            group = table.metadata.row_group(number)
            if _mean_row_bytes(group, columns) > RECORD_BYTES:  # known without reading it
                first, self.number = self.number + 1, self.number + group.num_rows
                where = f"{self.file.name}, rows {first} to {self.number}, on average"
                self._too_long(where, group.num_rows)
                yield size * self.number // rows, where, None
                continue
            for batch in table.iter_batches(batch_size=_BATCH_ROWS, row_groups=[number], columns=columns):
                for record in _rows(batch):
                    self.number += 1
                    where = f"{self.file.name}, row {self.number}"
                    if record is None:
                        self._too_long(where)
                    # pyarrow reads ahead, so that the position in the file would be too far.
                    yield size * self.number // rows, where, record

    def _whole_text(self, raw: IO[bytes], plain: IO[bytes]) -> Iterator[tuple[int, str, Any]]:
        data, record = plain.read(RECORD_BYTES + 1), None
        if not data:
            return
        self.number = 1
        if len(data) > RECORD_BYTES:
            self._too_long(self.file.name)
        elif (text := self._decode(data, self.file.name)) is not None:
            record = {self.text_field or TEXT_FIELDS[0]: text.replace("\r\n", "\n")}
        yield raw.tell(), self.file.name, record

    def _decode(self, data: bytes, where: str) -> str | None:
        """UTF-8 as text, without the byte order mark that some files begin with; None where it is something else."""
        skipped = len(codecs.BOM_UTF8) if self.number == 1 and data.startswith(codecs.BOM_UTF8) else 0
        try:
            return data[skipped:].decode()
        except UnicodeDecodeError as error:
            self.reading.fault(f"{where}: byte {skipped + error.start + 1} is not UTF-8")
            return None

    def _too_long(self, where: str, count: int = 1) -> None:
        most = f"{RECORD_BYTES / 2**20:.4g} MiB"
        self.reading.fault(
            f"{where}: longer than {most}, the most for one document (split it into shorter ones)", count
        )

    def _fields(self) -> tuple[str, ...]:
        """Names of the fields that may hold the text."""
        if self.source.type != "text":
            return (*chat.FIELDS[self.source.type], *chat.OPTIONS)
        return (self.source.text_field,) if self.source.text_field else TEXT_FIELDS

    def _text_of(self, record: Any, where: str) -> str | None:
        """The record's text, or None where it is filtered out or bad."""
        if not isinstance(record, dict):
            self.reading.fault(f"{where}: expected a JSON object, found {type(record).__name__}")
            return None
        try:
            if not all(_meets(record, name, accepted) for name, accepted in self.source.filters.items()):
                self.reading.filtered += 1
                return None
            if self.source.type != "text":
                values = {name: value_at(record, name) for name in self._fields()}
                return chat.read_chat(self.source.type, values, self.template, self.source.chat_date)
        except ValueError as error:
            self.reading.fault(f"{where}: {error}")
            return None
        if self.source.text_field is None:
            self._find_text_field(record, where)
        text = value_at(record, self.text_field) if self.text_field else None
        if isinstance(text, str):
            return text
        has = ", ".join(" ".join(str(name).split()) for name in self.names or record)[:200] or "no field"
        what = f"no text field {self.text_field or ' or '.join(self._fields())}"
        if text is not None or self.text_field in record:
            what = f"its {self.text_field} is {'null' if text is None else type(text).__name__}, not a text"
        self.reading.fault(f"{where}: {what}; the record has {has}; text_field in a mixture file can name another")
        return None

    def _find_text_field(self, record: dict[str, Any], where: str) -> None:
        """Take the text's field from the first record that has a known name, whatever it holds there.

        A later record with a name that comes first is refused: which of the two is the text cannot be known, and
        metadata read as text would go unnoticed.
        """
        found = next((name for name in TEXT_FIELDS if name in record), None)
        if self.text_field is None:
            self.text_field = found
        elif found is not None and TEXT_FIELDS.index(found) < TEXT_FIELDS.index(self.text_field):
            raise UserError(
                f"{where}: it has a field {found}, and the records before it, read from {self.text_field}, have none; "
                "name the field of the text as text_field of the source, in a mixture file"
            )


def _meets(record: dict[str, Any], name: str, accepted: Any) -> bool:
    """Whether a record meets a filter. Raises ValueError where the two are of different types and can never match."""
    value, parts = value_at(record, name), accepted if isinstance(accepted, list) else [accepted]
    if value is None:
        return False
    kinds = ["a number" if isinstance(part, dict) else _kind(part) for part in parts]
    kind = _kind(value)
    if kind not in kinds:
        quotes = "; put it in quotes" if kind == "a text" else ""
        raise ValueError(f"its {name} is {kind}, and the filter wants {' or '.join(sorted({*kinds}))}{quotes}")
    for part in (part for part, wanted in zip(parts, kinds, strict=True) if wanted == kind):
        if value == part or (isinstance(part, dict) and part.get("min", value) <= value <= part.get("max", value)):
            return True
    return False


def _kind(value: Any) -> str:
    """The type of a value in words; Python takes true for a number."""
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int | float):
        return "a number"
    return "a text" if isinstance(value, str) else f"of type {type(value).__name__}"


def _is_corruption(error: BaseException) -> bool:
    """Whether an error means corrupt or truncated data, and not, for example, a lost connection."""
    if isinstance(error, EOFError | zlib.error | gzip.BadGzipFile):
        return True
    if type(error) is OSError and error.errno is None:  # how pyarrow puts it
        return True
    return type(error).__module__.split(".")[0] == "pyarrow"


def _rows(batch: Any) -> Iterator[dict[str, Any] | None]:
    """The rows of an Arrow batch; None for one that is too long, which does not become a Python object."""
    if not batch.num_columns:
        yield from ({} for _ in range(batch.num_rows))
    elif batch.nbytes <= RECORD_BYTES:
        yield from batch.to_pylist()
    else:
        for one in (batch.slice(row, 1) for row in range(batch.num_rows)):
            yield one.to_pylist()[0] if one.nbytes <= RECORD_BYTES else None


def _mean_row_bytes(group: Any, columns: Sequence[str]) -> float:
    """Mean bytes of a row of a parquet row group, in the columns that are read, by the metadata of the file."""
    chunks = [group.column(i) for i in range(group.num_columns)]
    inside = tuple(f"{name}." for name in columns)
    read = [chunk for chunk in chunks if chunk.path_in_schema in columns or chunk.path_in_schema.startswith(inside)]
    return sum(chunk.total_uncompressed_size for chunk in read) / max(1, group.num_rows)
