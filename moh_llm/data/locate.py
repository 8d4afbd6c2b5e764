"""Where a source lies: its location -> the files to read, in a fixed order, with what identifies each."""

import fnmatch
import glob
import os
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from urllib.parse import quote

from moh_llm.addresses import reason, shown
from moh_llm.data.mixture import Source
from moh_llm.errors import UserError


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


def locate(source: Source) -> list[SourceFile]:
    """The source's files, sorted within each pattern; none for a built-in source.

    Raises:
        UserError: nothing is there, or a list of addresses or the Hub cannot be read.
    """
    where = f"source {source.name}"
    if source.files:
        return [file for pattern in source.files for file in _local(pattern, where)]
    if source.hub is not None:
        return [file for pattern in source.data_files for file in _on_hub(source, pattern)]
    if source.urls:
        return [SourceFile(url) for url in source.urls]
    if source.url_list is not None:
        return [SourceFile(url) for url in _listed(source)]
    return []


def _local(pattern: str, where: str) -> list[SourceFile]:
    # A file whose name holds [ or * is still found by its name.
    exact = Path(pattern).is_file()
    matches = [pattern] if exact else sorted(glob.glob(pattern, recursive=True))
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
        with fsspec.open(source.url_list, "rt", encoding="utf-8") as file:
            lines = [line.strip() for line in file]
    except Exception as error:
        raise UserError(f"{where} cannot be read: {reason(error)}") from error
    urls = [line for line in lines if line and not line.startswith("#")]
    kept = [url for url in urls if source.match is None or fnmatch.fnmatchcase(url, source.match)]
    if not kept:
        raise UserError(f"{where} holds no address" + (f" that matches {source.match}" if urls else ""))
    return kept
