"""The files of a source: its location -> the files to read, in a fixed order, with what identifies each."""

import fnmatch
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from urllib.parse import quote, urldefrag

from moh_llm.data.mixture import Source
from moh_llm.data.notes import note
from moh_llm.data.opening import SPLIT, special_kind
from moh_llm.data.patterns import matching
from moh_llm.data.tokenizer import TextTokenizer
from moh_llm.errors import UserError, reason, shown, without_passwords_in
from moh_llm.records.tokens import SourceIdentity, TextRecord

_LIST_CHARACTERS = 1 << 28  # of a list of addresses


@dataclass(frozen=True)
class SourceFile:
    """One file of a source.

    Attributes:
        path: local path or address.
        size: bytes; None where the server was not asked.
        modified: time of modification (UTC), or the Hub's hash of the content; None where unknown.
    """

    path: str
    size: int | None = None
    modified: str | None = None

    @property
    def name(self) -> str:
        """The path as it may be shown and recorded: without user, password and query."""
        return shown(self.path)

    def record(self) -> TextRecord:
        """The record of this file."""
        return TextRecord(file=self.name, bytes=self.size, modified=self.modified)


def locate(source: Source) -> list[SourceFile]:
    """The source's files, sorted within each pattern, each once; none for a built-in source.

    A file that several patterns, paths or links lead to is the first of these, which a line says.

    Raises:
        UserError: nothing is there, or a list of addresses or the Hub cannot be read.
    """
    first: dict[str, SourceFile] = {}
    again = []
    for file in _named(source):
        if (known := first.setdefault(_real_path(file.path), file)) is not file:
            again.append((file, known))
    if again:
        (file, known), count = again[0], len(again)
        what = f"{known.name} twice" if file.name == known.name else f"{file.name}, which is {known.name}"
        more = f", and {count - 1:,} more like it" if count > 1 else ""
        note(f"source {source.name} names {what}{more}; each file is read once")
    return list(first.values())


def _named(source: Source) -> list[SourceFile]:
    """The source's files as its patterns and lists name them, with those that are named twice."""
    where = f"source {source.name}"
    if source.files:
        try:
            return [file for pattern in source.files for file in _local(pattern, where)]
        except OSError as error:
            raise UserError(f"{where}: {error.filename} cannot be read: {error.strerror}") from error
    if source.hub is not None:
        return [file for pattern in source.data_files for file in _on_hub(source, pattern)]
    if source.urls:
        return [SourceFile(url) for url in source.urls]
    if source.url_list is not None:
        return [SourceFile(url) for url in _listed(source)]
    return []


def _real_path(path: str) -> str:
    """The same for all paths of a file, through links and ``..`` too. Hard links are files of their own."""
    path = path.removeprefix("file://").removeprefix("local://")
    if path.startswith(("http://", "https://")):
        return urldefrag(path).url  # the fragment is not sent
    return path if "://" in path else os.path.realpath(path)


def source_identity(
    source: Source, files: Sequence[SourceFile], tokenizer: TextTokenizer, validation_share: float
) -> SourceIdentity:
    """All that decides a source's shards: text, tokenizer, what is kept and held out.

    Raises:
        UserError: the source has messages, and the tokenizer no chat template.
    """
    if source.type == "messages" and tokenizer.chat is None:
        raise UserError(
            f"source {source.name} has messages, and tokenizer {tokenizer.name} has no chat template; "
            "put a chat_template.jinja beside it"
        )
    chat: dict[str, Any] = {}
    if source.type != "text":
        chat = {"type": source.type, "chat_template": tokenizer.chat and tokenizer.chat.sha256}
        if tokenizer.chat and tokenizer.chat.reads_clock:
            chat["chat_date"] = source.chat_date
    builtin = {"builtin": source.builtin or "", "python": platform.python_version(), "split": SPLIT}
    return SourceIdentity(
        tokenizer=tokenizer.sha256,
        validation_share=validation_share,
        format=source.format,
        text_field=source.text_field,
        filters=without_passwords_in(source.filters),  # as they are recorded, since the two are compared
        text=builtin if source.builtin else [file.record() for file in files],
        **chat,
    )


def _local(pattern: str, where: str) -> list[SourceFile]:
    matches = matching(pattern, where)
    for match in matches:
        if os.path.exists(match) and (kind := special_kind(match)):
            raise UserError(f"{where}: {match} is {kind}, which is not read; name files, or take it out of the folder")
    files = [match for match in matches if Path(match).is_file()]
    if not files:
        raise UserError(f"{where}: no file at {pattern}")
    return [_described(Path(file)) for file in files]


def _described(path: Path) -> SourceFile:
    status = os.stat(path)
    modified = datetime.fromtimestamp(status.st_mtime_ns / 1e9, tz=timezone.utc)
    return SourceFile(str(path), status.st_size, modified.isoformat(timespec="microseconds"))


def _on_hub(source: Source, pattern: str) -> list[SourceFile]:
    import fsspec

    # A branch's name may hold slashes.
    revision = f"@{quote(source.revision, safe='')}" if source.revision else ""
    address = f"datasets/{source.hub}{revision}/{pattern}"
    try:
        found = fsspec.filesystem("hf").glob(address, detail=True)
    # The client, its transport and fsspec each have their own errors, with no base in common.
    except Exception as error:
        raise UserError(f"source {source.name}: the Hub's {address} cannot be listed: {reason(error)}") from error
    files = {path: info for path, info in found.items() if info.get("type") == "file"}
    if not files:
        raise UserError(f"source {source.name}: the Hub holds no file {address}")
    return [SourceFile(f"hf://{path}", files[path].get("size"), files[path].get("blob_id")) for path in sorted(files)]


def _listed(source: Source) -> list[str]:
    import fsspec

    assert source.url_list is not None
    where = f"source {source.name}: list {SourceFile(source.url_list).name}"
    try:
        if "://" not in source.url_list and (kind := special_kind(source.url_list)):
            raise UserError(f"it is {kind}")
        with fsspec.open(source.url_list, "rt", encoding="utf-8") as file:
            text = file.read(_LIST_CHARACTERS + 1)
        if len(text) > _LIST_CHARACTERS:
            raise UserError(f"it is longer than {_LIST_CHARACTERS >> 20} MiB")
        lines = [line.strip() for line in text.split("\n")]
    except Exception as error:
        raise UserError(f"{where} cannot be read: {reason(error)}") from error
    urls = [line for line in lines if line and not line.startswith("#")]
    kept = [url for url in urls if source.match is None or fnmatch.fnmatchcase(url, source.match)]
    if not kept:
        raise UserError(f"{where} holds no address" + (f" that matches {source.match}" if urls else ""))
    return kept
