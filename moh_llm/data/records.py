"""Documents of a source's files: JSON lines, parquet and plain text, filtered, each fault with file and record."""

from collections.abc import Iterator, Sequence

from moh_llm.data import chat
from moh_llm.data.fields import Reading, Records
from moh_llm.data.filters import unmet
from moh_llm.data.formats import format_of, json_lines, parquet_rows, whole_text
from moh_llm.data.locate import SourceFile, locate
from moh_llm.data.mixture import Source
from moh_llm.data.notes import note
from moh_llm.data.opening import embedded_documents, is_corruption, open_binary
from moh_llm.errors import UserError, reason


def source_documents(
    source: Source,
    files: Sequence[SourceFile] | None = None,
    reading: Reading | None = None,
    template: chat.ChatTemplate | None = None,
) -> Iterator[tuple[str, str]]:
    """Yield group and text of a source's documents in their order, without empty and filtered ones.

    A document of a file is a group of its own: its group is its text, of a conversation that of one date.

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
            yield text.group if isinstance(text, chat.ChatText) else text, text


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
    kind = source.format or format_of(file)
    if kind == "text" and source.type != "text":
        raise UserError(f"{file.name}: type: {source.type} needs JSON lines or parquet, not plain text")
    if kind == "text" and source.filters:
        raise UserError(f"{file.name}: filters need JSON lines or parquet, not plain text; remove them from the source")
    reader = {"jsonl": json_lines, "parquet": parquet_rows, "text": whole_text}[kind]
    before, number = reading.stored, 0  # the number is that of the last record that was read
    try:
        with open_binary(file.path, seekable=kind == "parquet") as (raw, plain):
            records = Records(file, source, reading, raw.tell, template)
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


def check_filters(source: Source, reading: Reading, empty: bool) -> None:
    """Name the filters that no record met, after a source was read to its end. Raises UserError if it is `empty`."""
    lines = unmet(source.filters, reading.filters.met) if reading.filters else []
    if empty:
        raise UserError(": ".join([f"source {source.name} holds no text", *lines[:1]]))
    for line in lines:
        note(f"source {source.name}: {line}")
