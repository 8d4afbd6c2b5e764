"""Documents of a source: JSON lines, parquet and plain text within bounds; a bad record stops with file and line.

datatrove's and datasets' readers do not serve here: they hold a line or a row of any length, and datatrove's skip
records without text or JSON with a line in a log, so that a corpus would shrink unnoticed.
"""

import json
from collections.abc import Iterator, Sequence
from typing import IO, Any

from moh_llm.data import chat
from moh_llm.data.embedded import embedded_documents
from moh_llm.data.locate import SourceFile, locate, open_file
from moh_llm.data.mixture import Source
from moh_llm.errors import UserError, reason

# Of one record: a line of JSON as it stands in the file, a text file, the columns of a parquet row that are read.
# A tokenizer needs about 130 times as much memory as the document has bytes. The longest books have a few MiB.
RECORD_BYTES = 16 << 20
_BATCH_ROWS = 16  # of parquet that are held at once
_ENDINGS = {"line": (".jsonl", ".json", ".ndjson"), "row": (".parquet",), "text": (".txt", ".md")}
_COMPRESSED = (".gz", ".zst", ".zstd")


def source_documents(
    source: Source, files: Sequence[SourceFile] | None = None, template: chat.ChatTemplate | None = None
) -> Iterator[tuple[str, str]]:
    """Yield group and text of a source's documents in their order, without empty ones; from ``files``, or from all.

    `is_held_out` splits documents by their group. Of a document in a file it is the text, so that duplicates stay
    together. Documents of a source of another type than text are `ChatText`, which the tokenizer's chat ``template``
    writes.

    Raises:
        UserError: a file or record cannot be read (the message names both), or a source has no text.
    """
    found = False
    if source.builtin is not None:
        found = True
        yield from embedded_documents(source.builtin)
    for file in locate(source) if files is None else files:
        for text in _documents(file, source, template):
            found = True
            yield text, text
    if not found and files is None:
        raise UserError(f"source {source.name} holds no text")


def _documents(file: SourceFile, source: Source, template: chat.ChatTemplate | None) -> Iterator[str]:
    """Yield the texts of one file. Memory is bounded by `RECORD_BYTES` and, for parquet, by its pages."""
    name, unit = file.name, _unit_of(file)
    if unit == "text" and source.type != "text":
        raise UserError(f"{name}: type: {source.type} needs JSON lines or parquet, not plain text")
    number = 0
    try:
        with open_file(file.path, seekable=unit == "row") as opened:
            records = _rows(opened, source) if unit == "row" else _parts(opened, whole=unit == "text")
            for number, record in enumerate(records, start=1):
                try:
                    text = _text_of(record, unit, source, template)
                except ValueError as error:
                    where = name if unit == "text" else f"{name}, {unit} {number}"
                    raise UserError(f"{where}: {reason(error)}; correct it or leave the file out") from error
                if text.strip():
                    yield text
    except (UserError, GeneratorExit):
        raise
    # The errors of pyarrow, decompressors and transports share no base below Exception.
    except Exception as error:
        why = reason(error.__cause__ or error)  # transports keep what went wrong in the cause
        raise UserError(f"{name} cannot be read past record {number}: {why}") from error
    if not number:
        raise UserError(f"{name} is empty; leave it out, or get it again")


def _unit_of(file: SourceFile) -> str:
    """What a record of the file is, by the ending of its name: `line` of JSON, `row` of parquet or whole `text`."""
    name = file.name.lower()
    for unit, endings in _ENDINGS.items():
        packed = ("",) if unit == "row" else ("", *_COMPRESSED)
        if name.endswith(tuple(ending + more for ending in endings for more in packed)):
            return unit
    known = ", ".join(ending for endings in _ENDINGS.values() for ending in endings)
    raise UserError(f"{file.name}: unknown ending; known are {known}, and all but parquet's with .gz and .zst")


def _parts(file: IO[bytes], whole: bool) -> Iterator[bytes]:
    """The lines of a file, or all of it as one part; of a part that is too long, more bytes than may be."""
    while part := file.read(RECORD_BYTES + 1) if whole else file.readline(RECORD_BYTES + 1):
        yield part


def _rows(file: IO[bytes], source: Source) -> Iterator[Any]:
    """The rows of a parquet file, as Arrow batches of one row each with the columns that are read."""
    try:
        from pyarrow import RecordBatch
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise UserError('reading parquet needs pyarrow; pip install "moh-llm[data]"') from error
    table = ParquetFile(file)
    fields = (source.text_field,) if source.type == "text" else (*chat.FIELDS[source.type], *chat.OPTIONS)
    names = table.schema_arrow.names
    columns = [name for name in names if name in fields]
    if not columns:
        raise ValueError(f"no column {' or '.join(fields)} in {', '.join(names)[:200]}; see text_field and type")
    for batch in table.iter_batches(batch_size=_BATCH_ROWS, columns=columns):
        for row in range(batch.num_rows):
            # A slice of a dictionary-encoded column has the bytes of the whole dictionary; a decoded row has its own.
            one = (array.slice(row, 1) for array in batch.columns)
            own = [array.dictionary_decode() if hasattr(array, "dictionary_decode") else array for array in one]
            yield RecordBatch.from_arrays(own, batch.schema.names)


def _text_of(stored: Any, unit: str, source: Source, template: chat.ChatTemplate | None) -> str:
    """The text of a record, "" for a blank line. Raises ValueError: what is wrong, in words that follow the place."""
    if (stored.nbytes if unit == "row" else len(stored)) > RECORD_BYTES:
        most = f"{RECORD_BYTES / 2**20:.4g} MiB"
        raise ValueError(f"longer than {most}, the most for one document (split it into shorter ones)")
    if unit == "text":
        return stored.decode("utf-8-sig").replace("\r\n", "\n")
    if unit == "line" and not stored.strip():
        return ""
    try:  # Arrow's values become Python objects only now that their size is known
        record = stored.to_pylist()[0] if unit == "row" else json.loads(stored)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not a JSON record ({error})") from error
    if not isinstance(record, dict):
        raise ValueError(f"expected a JSON object, found {type(record).__name__}")
    if source.type != "text":
        return chat.read_chat(source.type, record, template)
    text = record.get(source.text_field)
    if not isinstance(text, str):
        holds = f", which holds {json.dumps(text, default=str)[:40]}" if source.text_field in record else ""
        raise ValueError(
            f"no text in the field {source.text_field}{holds}; the record has {', '.join(record)[:200]}; "
            "text_field of the source, in a mixture file, names another"
        )
    return chat.in_utf8(text)
