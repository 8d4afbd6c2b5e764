"""Reading documents: JSON lines (plain, gzip, zstandard), plain text, and what Python itself ships."""

import ast
import importlib.util
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moh_llm.data.mixture import Source
from moh_llm.errors import UserError

# Names under which public corpora keep a record's text, most common first.
TEXT_FIELDS = ("text", "content", "raw_content", "document")
_JSON_ENDINGS = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".jsonl.zst", ".json.zst", ".jsonl.zstd")
_TEXT_ENDINGS = (".txt", ".md", ".txt.gz", ".txt.zst")


def iter_documents(source: Source) -> Iterator[str]:
    """Yield the source's documents in a fixed order, empty ones left out.

    Raises:
        UserError: a file cannot be read or decompressed, a line is not JSON, or a record lacks the
            text field; the message names file and line.
    """
    if source.builtin is not None:
        yield from (text for text in _BUILTIN[source.builtin]() if text.strip())
        return
    for file in source.files:
        yield from (text for text in _read_file(file, source.text_field) if text.strip())


def _read_file(file: str, text_field: str | None) -> Iterator[str]:
    import fsspec

    name = file.lower()
    if not name.endswith(_JSON_ENDINGS + _TEXT_ENDINGS):
        known = ", ".join((".jsonl", ".jsonl.gz", ".jsonl.zst", ".txt"))
        raise UserError(f"{file}: format not known by its ending; known are {known}")
    compression = {"gz": "gzip", "zst": "zstd", "zstd": "zstd"}.get(name.rsplit(".", 1)[-1])
    if compression == "zstd" and importlib.util.find_spec("zstandard") is None:
        raise UserError(f'{file}: reading it needs zstandard; pip install "moh-llm[data]"')
    try:
        with fsspec.open(file, "rt", encoding="utf-8", compression=compression) as lines:
            if name.endswith(_TEXT_ENDINGS):
                yield lines.read()
                return
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _text_of(line, text_field, f"{file}, line {number}")
    except UserError:
        raise
    # EOFError, zlib.error and zstandard's own error share no base below Exception.
    except Exception as error:
        raise UserError(f"{file} cannot be read: {' '.join(str(error).split())}") from error


def _text_of(line: str, text_field: str | None, where: str) -> str:
    try:
        record: Any = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where}: not a JSON record ({error})") from error
    if not isinstance(record, dict):
        raise UserError(f"{where}: expected one JSON object a line")
    for field in (text_field,) if text_field else TEXT_FIELDS:
        if isinstance(record.get(field), str):
            return record[field]
    wanted = text_field or " or ".join(TEXT_FIELDS)
    raise UserError(f"{where}: no text field {wanted}; the record has {', '.join(map(str, record))}")


def _python_topics() -> Iterator[str]:
    """The language reference's help topics, a document each."""
    from pydoc_data.topics import topics

    yield from (topics[name] for name in sorted(topics))


def _standard_library() -> Iterator[str]:
    """Sources of the standard library's own modules, tests and installed packages left out."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data", "__pycache__"}
    for path in sorted(root.rglob("*.py")):
        if not skipped.intersection(path.relative_to(root).parts):
            try:
                yield path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue  # a handful of codec tables are written in other encodings


def _python_docstrings() -> Iterator[str]:
    """Per module, the docstrings of the module, its classes and functions."""
    for code in _standard_library():
        nodes = (node for node in ast.walk(ast.parse(code)) if isinstance(node, _DOCUMENTED))
        texts = [text for node in nodes if (text := ast.get_docstring(node))]
        yield "\n\n".join(texts)


_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_BUILTIN = {
    "python_topics": _python_topics,
    "python_docstrings": _python_docstrings,
    "python_sources": _standard_library,
}
