"""Atomic writes of files and folders: a reader sees the old content or the new content, never a part."""

import contextlib
import errno
import hashlib
import itertools
import json
import os
import re
import shutil
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil

from moh_llm.errors import UserError, without_passwords_in

# Errors of the place that is written to, rather than of the program.
_DISK_REFUSALS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM}

# Folders that a training run writes (not reports, which another command makes there).
_OF_RUNS = {"model", "checkpoints", "tensorboard"}
_CACHED = re.compile(r"(models|datasets|spaces)--.")  # folders of a Hub cache


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` atomically: to a temporary file beside it, which is then renamed.

    Surrogates, which stand for bytes of names that are not UTF-8, are written as escapes, ``\\udcNN``.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
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


def outside(path: Path, folder: Path) -> Path | None:
    """The target of a file of ``folder`` if it is a link that leaves the folder, else None.

    Links into a Hub cache do not leave the folder, because snapshots consist of such links:
    `models--OWNER--NAME/snapshots/COMMIT/FILE` points to `models--OWNER--NAME/blobs/HASH`.
    """
    target = Path(os.path.realpath(path))  # unlike Path.resolve, it does not raise on circular links
    if target.is_relative_to(os.path.realpath(folder)):
        return None
    blobs = target.parent
    return None if blobs.name == "blobs" and _CACHED.match(blobs.parent.name) else target


def check_links(folder: Path, files: Iterable[Path]) -> None:
    """Raise UserError if one of the ``files`` is a link that leaves ``folder`` (see `outside`)."""
    for path in files:
        if target := outside(path, folder):
            raise UserError(
                f"{path} is a link to {target}, outside its folder; replace the link by the file if it belongs there"
            )


def check_holds_none(output: Path, reads: Iterable[str | Path]) -> None:
    """Raise UserError if ``output`` holds one of the inputs; names that are not local paths are ignored."""
    for read in map(Path, reads):
        if read.exists() and Path(os.path.realpath(read)).is_relative_to(os.path.realpath(output)):
            raise UserError(f"--output {output} would replace {read}, which is an input; name another folder")


def follow(output: Path) -> Path:
    """Resolve ``output`` if it is a link.

    Raises:
        UserError: the link is broken or circular.
    """
    if not output.is_symlink():
        return output
    target = Path(os.path.realpath(output))
    if not output.exists():
        _clear_leftovers(target)  # a killed process may have left the folder under its temporary name
    if not output.exists():
        raise UserError(f"--output {output} is a link to {os.readlink(output)}, which does not exist; name a folder")
    return target


def check_output_folder(output: Path, overwrite: bool, reads: Iterable[str | Path] = ()) -> None:
    """Raise UserError unless ``output`` can be made: it is absent, empty, a link to such a folder, or ``overwrite``.

    A folder that holds the working folder or an input of the job (``reads``) is never replaced. No folder is made
    inside a model, a run or a Hub cache (see `check_place`).
    """
    check_place(output)
    _check_free(output, overwrite, reads)


def check_place(output: Path, flag: str = "--output") -> None:
    """Raise UserError if ``output`` lies inside a model, a training run or a Hub cache.

    It would be taken for a part of that, and removed with it.
    """
    from huggingface_hub.constants import HF_HUB_CACHE

    place = Path(os.path.realpath(output))
    for inner, folder in itertools.pairwise((place, *place.parents)):
        if inner.name in _OF_RUNS and (folder / "run.json").is_file():
            what = f"is part of the training run in {folder}"
        elif (folder / "config.json").is_file() and any(folder.glob("*.safetensors*")):
            what = f"lies in {folder}, the folder of a model"
        elif folder == Path(os.path.realpath(HF_HUB_CACHE)) or _CACHED.match(folder.name):
            what = f"lies in {folder}, a cache of the Hub"
        else:
            continue
        raise UserError(f"{flag} {output} {what}; name another folder")


def _check_free(output: Path, overwrite: bool, reads: Iterable[str | Path] = ()) -> None:
    follow(output)
    if output.exists() and not output.is_dir():
        raise UserError(f"--output {output} is a file; name a folder")
    if file := next((parent for parent in output.parents if parent.is_file()), None):
        raise UserError(f"--output {output} lies below {file}, which is a file; name another folder")
    if Path.cwd().is_relative_to(os.path.realpath(output)):
        raise UserError(f"--output {output} would replace the working folder; name a folder in it")
    check_holds_none(output, reads)
    if output.exists() and any(output.iterdir()) and not overwrite:
        raise UserError(f"--output {output} exists and is not empty; pass --overwrite or name another folder")


@contextlib.contextmanager
def new_folder(output: Path, overwrite: bool = False) -> Iterator[Path]:
    """Yield a temporary folder beside ``output`` that becomes ``output`` if the block succeeds.

    If ``output`` is a link, the folder that it points to is replaced. On an exception the temporary folder is removed
    and ``output`` is left as it was.

    Raises:
        UserError: ``output`` exists (checked before and after the block), or the disk refuses.
    """
    output = follow(output)
    _clear_leftovers(output)
    _check_free(output, overwrite)
    with scratch_folder(output) as temporary:
        old = temporary.with_suffix(".old")
        try:
            yield temporary
            share_files(temporary)
            _check_free(output, overwrite)  # another process may have made it meanwhile
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
        UserError: the disk refuses, or the folder was removed meanwhile.
    """
    _clear_leftovers(output)
    temporary = output.with_name(f".{output.name}.{_host()}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"cannot write {output}: {error.strerror}; free some space or name another place") from error
    try:
        yield temporary
    except UserError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _DISK_REFUSALS:
            why = f"{error.strerror}; free some space or name another place"
        elif not temporary.is_dir():
            why = f"its temporary folder {temporary} was removed by another process; start again"
        else:
            raise
        raise UserError(f"cannot write {output}: {why}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())


def _clear_leftovers(output: Path) -> None:
    """Remove the temporary folders that killed processes of this machine left beside ``output``."""
    pattern = re.compile(re.escape(f".{output.name}.{_host()}.") + r"(\d+)\.(tmp|old)")
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
    except psutil.AccessDenied:
        return True
