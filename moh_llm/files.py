"""Atomic writes of files and folders: a reader sees the old content or the new content, never a part."""

import contextlib
import errno
import functools
import hashlib
import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import psutil

from moh_llm.errors import UserError, without_passwords_in

# Errors of the place that is written to, rather than of the program.
_DISK_REFUSALS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM}

_Read = TypeVar("_Read")
_CACHED = re.compile(r"(models|datasets|spaces)--.")  # folders of a Hub cache


def write_text(path: Path, text: str) -> None:
    """`write_bytes` of ``text``; surrogates, for bytes of names that are not UTF-8, become escapes, ``\\udcNN``."""
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


def write_bytes(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path`` atomically: to a temporary file beside it, which is then renamed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):  # a file system that is read-only refuses this, too
            temporary.unlink()
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error


def write_json(path: Path, record: Any) -> None:
    """Write ``record`` as indented JSON, atomically and without the users and passwords of addresses.

    Raises:
        ValueError: the record holds NaN or infinity.
        UserError: the file cannot be written.
    """
    text = json.dumps(record, indent=2, allow_nan=False)
    if "@" in text and ":/" in text:
        text = json.dumps(without_passwords_in(record), indent=2, allow_nan=False)
    write_text(path, text + "\n")


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


def once_per_file(read: Callable[[Path], _Read]) -> Callable[[Path], _Read]:
    """Keep what a function reads of a file until its size or times change: a start asks for it several times."""

    @functools.lru_cache(maxsize=4096)
    def kept(path: Path, size: int, modified: int, changed: int) -> _Read:
        return read(path)

    def call(path: Path) -> _Read:
        found = path.stat()
        return kept(path.resolve(), found.st_size, found.st_mtime_ns, found.st_ctime_ns)

    return call


def check_links(folder: Path, files: Iterable[Path]) -> None:
    """Raise UserError if one of the ``files`` is a link that leaves ``folder``.

    Links into a Hub cache do not leave the folder, because snapshots consist of such links:
    `models--OWNER--NAME/snapshots/COMMIT/FILE` points to `models--OWNER--NAME/blobs/HASH`.
    """
    for path in files:
        target = Path(os.path.realpath(path))  # unlike Path.resolve, it does not raise on circular links
        is_cached = target.parent.name == "blobs" and _CACHED.match(target.parents[1].name)
        if not is_cached and not target.is_relative_to(os.path.realpath(folder)):
            raise UserError(
                f"{path} is a link to {target}, outside its folder; replace the link by the file if it belongs there"
            )


def check_holds_none(output: Path, reads: Iterable[str | Path]) -> None:
    """Raise UserError if ``output`` holds one of the inputs; names that are not local paths are ignored."""
    for read in map(Path, reads):
        if read.exists() and Path(os.path.realpath(read)).is_relative_to(os.path.realpath(output)):
            raise UserError(f"--output-dir {output} would replace {read}, which is an input; name another folder")


def check_place(output: Path, flag: str = "--output-dir") -> None:
    """Raise UserError if ``output`` is a broken link, a file, or in the folder of a model, with which it would go."""
    if output.is_symlink() and not output.exists():
        raise UserError(f"{flag} {output} is a link to {os.readlink(output)}, which does not exist; name a folder")
    for folder in Path(os.path.realpath(output)).parents:
        if (folder / "config.json").is_file() and any(folder.glob("*.safetensors*")):
            raise UserError(f"{flag} {output} lies in {folder}, the folder of a model; name another folder")
    if output.exists() and not output.is_dir():
        raise UserError(f"{flag} {output} is a file; name a folder")


def check_output_folder(output: Path, overwrite: bool, reads: Iterable[str | Path] = ()) -> None:
    """Raise UserError unless ``output`` can be made: it is absent, empty, a link to such a folder, or ``overwrite``.

    A folder that holds the working folder or an input of the job (``reads``) is never replaced.
    """
    check_place(output)
    if Path.cwd().is_relative_to(os.path.realpath(output)):
        raise UserError(f"--output-dir {output} would replace the working folder; name a folder in it")
    check_holds_none(output, reads)
    if output.exists() and any(output.iterdir()) and not overwrite:
        raise UserError(f"--output-dir {output} exists and is not empty; pass --overwrite or name another folder")


@contextlib.contextmanager
def new_folder(output: Path, overwrite: bool = False) -> Iterator[Path]:
    """Yield a temporary folder beside ``output`` that becomes ``output`` if the block succeeds.

    If ``output`` is a link, the folder that it points to is replaced. On an exception the temporary folder is removed
    and ``output`` is left as it was.

    Raises:
        UserError: ``output`` exists (checked before and after the block), or the disk refuses.
    """
    output = Path(os.path.realpath(output))
    _clear_leftovers(output)  # which may have held the old content of `output`
    check_output_folder(output, overwrite)
    with scratch_folder(output) as temporary:
        old = temporary.with_suffix(".old")
        try:
            yield temporary
            share_files(temporary)
            check_output_folder(output, overwrite)  # another process may have made it meanwhile
            if overwrite and output.exists():
                os.replace(output, old)
            os.replace(temporary, output)  # replaces an empty folder; the kernel refuses any other
            shutil.rmtree(old, ignore_errors=True)
        finally:
            if old.exists() and not output.exists():  # interrupted between the two renames
                os.replace(old, output)


def share_files(folder: Path) -> None:
    """Give files the default permissions: safetensors makes files that only their owner can read."""
    umask = os.umask(0)
    os.umask(umask)
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink() and path.stat().st_nlink == 1:  # hard links belong to the base
            path.chmod(0o666 & ~umask)


@contextlib.contextmanager
def scratch_folder(output: Path) -> Iterator[Path]:
    """Yield a temporary folder beside ``output``, which is removed at the end.

    A folder that a killed process left is removed by the next process that makes the same output on this machine.

    Raises:
        UserError: the disk refuses.
    """
    _clear_leftovers(output)
    temporary = output.with_name(f".{output.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        yield temporary
    except OSError as error:
        if temporary.exists() and error.errno not in _DISK_REFUSALS:  # not of the disk, but of what the caller did
            raise
        raise UserError(f"cannot write {output}: {error.strerror}; free some space or name another place") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _clear_leftovers(output: Path) -> None:
    """Remove the temporary folders that killed processes of this machine left beside ``output``."""
    pattern = re.compile(re.escape(f".{output.name}.{socket.gethostname()}.") + r"(\d+)\.(tmp|old)")
    if not output.parent.is_dir():
        return
    for path in output.parent.iterdir():
        found = pattern.fullmatch(path.name)
        # A leftover with our own process id is from an earlier process: ids recur in containers.
        if found is None or (int(found[1]) != os.getpid() and _is_running(int(found[1]))):
            continue
        if found[2] == "old" and not output.exists():  # killed between the two renames
            os.replace(path, output)
        else:
            shutil.rmtree(path, ignore_errors=True)


def _is_running(process: int) -> bool:
    """Whether a process of this number runs; one that has ended and that its parent has not noticed does not."""
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
