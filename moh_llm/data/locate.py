"""The files of a source: where they are, what identifies them, and opening them, local or remote, compressed or not."""

import fnmatch
import gzip
import io
import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import IO, Any
from urllib.parse import quote

from moh_llm.data.embedded import SPLIT
from moh_llm.data.mixture import Source, matching
from moh_llm.data.tokenizer import TextTokenizer
from moh_llm.errors import UserError, reason, shown
from moh_llm.records.tokens import SourceIdentity, TextRecord

_CHUNK = 1 << 16  # bytes read at once


@dataclass(frozen=True)
class SourceFile:
    """One file of a source."""

    path: str  # local path or address
    size: int | None = None  # bytes; None where the server was not asked
    modified: str | None = None  # time of modification (UTC), or the Hub's hash of the content; None where unknown

    @property
    def name(self) -> str:
        """The path without user, password and query, for messages and records."""
        return shown(self.path)

    def record(self) -> TextRecord:
        """The record of this file."""
        return TextRecord(file=self.name, bytes=self.size, modified=self.modified)


def locate(source: Source) -> list[SourceFile]:
    """The source's files in order of its patterns, sorted within each, each path once; none for a built-in source.

    Raises:
        UserError: nothing is there, or a list of addresses or the Hub cannot be read.
    """
    if source.url_list is not None:
        files = [SourceFile(url) for url in _listed_addresses(source)]
    elif source.hub is not None:
        files = [file for pattern in source.data_files for file in _hub_files(source, pattern)]
    else:
        files = [file for pattern in source.files for file in _local_files(pattern, source.name)]
    return list({os.path.normpath(file.path): file for file in files}.values())  # a glob yields paths with `..`


def _local_files(pattern: str, name: str) -> Iterator[SourceFile]:
    paths = matching(pattern)
    if not paths:
        raise UserError(f"source {name}: no file at {pattern}")
    for path in paths:
        status = os.stat(path)
        modified = datetime.fromtimestamp(status.st_mtime_ns / 1e9, tz=timezone.utc)
        yield SourceFile(path, status.st_size, modified.isoformat(timespec="microseconds"))


def _hub_files(source: Source, pattern: str) -> list[SourceFile]:
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


def _listed_addresses(source: Source) -> list[str]:
    assert source.url_list is not None
    where = f"source {source.name}: list {shown(source.url_list)}"
    try:
        with open_file(source.url_list) as file:
            lines = [line.strip() for line in file.read().decode("utf-8-sig").split("\n")]
    except Exception as error:
        raise UserError(f"{where} cannot be read: {reason(error)}") from error
    urls = [line for line in lines if line and not line.startswith("#")]
    kept = [url for url in urls if source.match is None or fnmatch.fnmatchcase(url, source.match)]
    if not kept:
        raise UserError(f"{where} holds no address" + (f" that matches {source.match}" if urls else ""))
    return kept


def source_identity(
    source: Source, files: Sequence[SourceFile], tokenizer: TextTokenizer, validation_share: float
) -> SourceIdentity:
    """Everything that decides a source's shards. Raises UserError for messages where the tokenizer has no template."""
    if source.type == "messages" and tokenizer.chat is None:
        raise UserError(
            f"source {source.name} has messages, and tokenizer {tokenizer.name} has no chat template; "
            "put a chat_template.jinja beside it"
        )
    builtin = {"builtin": source.builtin or "", "python": platform.python_version(), "split": SPLIT}
    return SourceIdentity(
        tokenizer=tokenizer.sha256,
        validation_share=validation_share,
        type=source.type,
        text_field=source.text_field,
        chat_template=tokenizer.chat.sha256 if tokenizer.chat and source.type != "text" else None,
        text=builtin if source.builtin else [file.record() for file in files],
    )


@contextmanager
def open_file(path: str, seekable: bool = False) -> Iterator[IO[bytes]]:
    """Yield the file's decompressed bytes; the ending of its name says how they are compressed.

    Reading raises the decompressor's error where the data are corrupt or end too early. Decompression holds a bounded
    amount ahead of the reader. An HTTP address is read as one stream unless the reader must seek.

    Raises:
        UserError: a package is missing, or the path is a folder, pipe or device.
    """
    with _open_stored(path, seekable) as stored:
        raw = stored if seekable else io.BufferedReader(stored, _CHUNK)
        ending = shown(path).lower().rsplit(".", 1)[-1]
        if ending == "gz":
            yield io.BufferedReader(gzip.GzipFile(fileobj=raw), _CHUNK)
        elif ending in ("zst", "zstd"):
            # Not by fsspec, whose zstandard ends silently where a file is cut off, so that a corpus would shrink.
            try:
                from pyarrow import CompressedInputStream
            except ImportError as error:
                raise UserError(f'{shown(path)}: reading it needs pyarrow; pip install "moh-llm[data]"') from error
            yield io.BufferedReader(CompressedInputStream(raw, "zstd"), _CHUNK)
        else:
            yield raw


def _open_stored(path: str, seekable: bool) -> Any:
    if "://" not in path:
        if os.path.exists(path) and not os.path.isfile(path):  # reading a pipe or a device may never end
            raise UserError(f"{shown(path)} is no regular file; name a file")
        return open(path, "rb")
    import fsspec

    # A block size of 0 asks for one stream: some servers, as Dolma's, know neither sizes nor ranges.
    streamed = path.startswith(("http://", "https://")) and not seekable
    try:
        return fsspec.open(path, "rb", **({"block_size": 0} if streamed else {}))
    except ImportError as error:
        raise UserError(f'{shown(path)}: reading it needs a package ({error}); pip install "moh-llm[data]"') from error
