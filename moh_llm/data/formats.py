"""Formats of text: JSON lines, parquet and plain text as records, each within bounds."""

import codecs
import json
import os
from collections.abc import Iterator, Sequence
from typing import IO, Any

from moh_llm.data.fields import Records
from moh_llm.data.locate import SourceFile
from moh_llm.errors import UserError, reason

_ENDINGS = {
    "jsonl": (".jsonl", ".json", ".ndjson"),
    "parquet": (".parquet",),
    "text": (".txt", ".md"),
}
_COMPRESSED = {"jsonl": ("", ".gz", ".zst", ".zstd"), "parquet": ("",), "text": ("", ".gz", ".zst", ".zstd")}
# Of one record: a line of JSON as it stands in the file, a whole text file, the columns of a parquet row that are read.
# A tokenizer needs about 130 times as much memory as the document has bytes. The longest books have a few MiB.
RECORD_BYTES = 16 << 20
_BATCH_ROWS = 16  # of parquet that are held at once


def format_of(file: SourceFile) -> str:
    """The format that a file's ending says. Raises UserError for another ending."""
    name = file.name.lower()
    for kind, endings in _ENDINGS.items():
        if name.endswith(tuple(ending + packed for ending in endings for packed in _COMPRESSED[kind])):
            return kind
    known = ", ".join(ending for endings in _ENDINGS.values() for ending in endings)
    raise UserError(f"{file.name}: format not known by its ending; known are {known}, also .gz and .zst; give format")


def json_lines(plain: IO[bytes], records: Records) -> Iterator[tuple[int, str | None]]:
    """Number and text of each line; None for one without."""
    for number, line in enumerate(_lines(plain), 1):
        where = f"{records.file.name}, line {number}"
        decoded = None if line is None else _decode(line, where, records, first=number == 1)
        text = None
        if line is None:
            _too_long(records, where)
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


def parquet_rows(plain: IO[bytes], records: Records) -> Iterator[tuple[int, str | None]]:
    """Number and text of each row, likewise."""
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
            _too_long(records, f"{records.file.name}, {span}", described.num_rows)
            yield number, None
            continue
        # Other columns stay unread.
        for batch in table.iter_batches(batch_size=_BATCH_ROWS, row_groups=[group], columns=columns):
            for record in _rows(batch):
                number += 1
                where = f"{records.file.name}, row {number}"
                if record is None:
                    _too_long(records, where)
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


def whole_text(plain: IO[bytes], records: Records) -> Iterator[tuple[int, str | None]]:
    """The file as one text, likewise."""
    data = plain.read(RECORD_BYTES + 1)
    if len(data) > RECORD_BYTES:
        _too_long(records, records.file.name)
        yield 1, None
    elif data:
        text = _decode(data, records.file.name, records, first=True)
        yield 1, None if text is None else text.replace("\r\n", "\n")


def _decode(data: bytes, where: str, records: Records, first: bool) -> str | None:
    """UTF-8 bytes as text, without the mark that some files begin with; None where they are something else."""
    skipped = len(codecs.BOM_UTF8) if first and data.startswith(codecs.BOM_UTF8) else 0
    try:
        return data[skipped:].decode()
    except UnicodeDecodeError as error:
        records.reading.fault(f"{where}: byte {skipped + error.start + 1} is not UTF-8")
        return None


def _too_long(records: Records, where: str, count: int = 1) -> None:
    """Report `count` records of more than `RECORD_BYTES`."""
    most = f"{RECORD_BYTES / 2**20:.4g} MiB"
    records.reading.fault(f"{where}: longer than {most}, the most for one document (split it into shorter ones)", count)
