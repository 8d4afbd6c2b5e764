"""Writing files and folders in one step: a reader sees the old content or the new one, never a part."""

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

from moh_llm.errors import UserError, without_passwords_in

# What the disk answers when the fault is the place to write to, not the program.
_DISK_REFUSALS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM}

# What a run writes in its own folder, without reports, which are made there by another command.
_OF_RUNS = {"model", "checkpoints", "milestones", "tensorboard"}
_CACHED = re.compile(r"(models|datasets|spaces)--.")  # how the folders of a Hub cache begin


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` in one step: to a temporary name beside it, then rename.

    A surrogate, which stands for a byte of a name that is not UTF-8, is written as JSON escapes it, ``\\udcNN``.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error


def write_json(path: Path, record: Any) -> None:
    """Write ``record`` as indented JSON in one step. NaN and infinity are refused (ValueError).

    User and password of the addresses in it are left out.
    """
    text = json.dumps(record, indent=2, allow_nan=False)
    if "@" in text and ":/" in text:
        text = json.dumps(without_passwords_in(record), indent=2, allow_nan=False)
    write_text(path, text + "\n")


def sha256(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


def outside(path: Path, folder: Path) -> Path | None:
    """Where a file of ``folder`` really lies if a link leads to a place that is not the folder's; None if none does.

    Links to files inside the folder are its own, and so are those into a Hub cache, whose snapshots hold links only:
    `models--OWNER--NAME/snapshots/COMMIT/FILE` to `models--OWNER--NAME/blobs/HASH`.
    """
    target = Path(os.path.realpath(path))  # which does not raise at links in a circle
    if target.is_relative_to(os.path.realpath(folder)):
        return None
    blobs = target.parent
    return None if blobs.name == "blobs" and _CACHED.match(blobs.parent.name) else target


def check_links(folder: Path, files: Iterable[Path]) -> None:
    """Raise UserError where one of a folder's ``files`` lies outside of it (`outside`): it may be no part of it."""
    for path in files:
        if target := outside(path, folder):
            raise UserError(
                f"{path} is a link to {target}, outside its folder; replace it by the file itself if it belongs there"
            )


def check_holds_none(output: Path, reads: Iterable[str | Path]) -> None:
    """Raise UserError if ``output`` holds one of the job's own inputs; names that are not local paths are ignored."""
    for read in map(Path, reads):
        if read.exists() and Path(os.path.realpath(read)).is_relative_to(os.path.realpath(output)):
            raise UserError(f"--output {output} would replace {read}, which is read; name another folder")


def follow(output: Path) -> Path:
    """The folder that ``output`` names: what it links to where it is a link, else itself.

    Raises:
        UserError: the link leads to nothing, or back to itself.
    """
    if not output.is_symlink():
        return output
    target = Path(os.path.realpath(output))
    if not output.exists():
        _clear_leftovers(target)  # a process that was killed while it replaced the folder left it under another name
    if not output.exists():
        raise UserError(f"--output {output} is a link to {os.readlink(output)}, which is not there; name a folder")
    return target


def check_output_folder(output: Path, overwrite: bool, reads: Iterable[str | Path] = ()) -> None:
    """Raise UserError unless ``output`` can be made: absent, an empty folder, a link to one, or ``overwrite``.

    A folder that holds the working folder, or one of the job's own inputs ``reads``, is never replaced, and none is
    made inside of what belongs to something else (`check_place`).
    """
    check_place(output)
    _check_free(output, overwrite, reads)


def check_place(output: Path, flag: str = "--output") -> None:
    """Raise UserError where ``output`` lies in the folder of a model, in what a training run made, or in a Hub cache.

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
    """Yield a temporary folder beside ``output`` that becomes ``output`` when the block ends well.

    Where ``output`` is a link, the folder that it links to is replaced, and the temporary one is beside that. On any
    exception the temporary folder is removed and ``output`` stays as it was. Raises UserError when ``output`` is in
    the way, at the beginning or by the end, or the disk refuses.
    """
    output = follow(output)
    _clear_leftovers(output)
    _check_free(output, overwrite)
    with scratch_folder(output) as temporary:
        old = temporary.with_suffix(".old")
        try:
            yield temporary
            share_files(temporary)
            _check_free(output, overwrite)  # something else may lie there by now
            if overwrite and output.exists():
                os.replace(output, old)
            os.replace(temporary, output)  # or into the place of an empty folder; the kernel refuses any other
            shutil.rmtree(old, ignore_errors=True)
        finally:
            if old.exists() and not output.exists():  # stopped between the two renames
                os.replace(old, output)


def share_files(folder: Path) -> None:
    """Give files the permissions that new files have here; safetensors makes them for their owner alone."""
    umask = os.umask(0)
    os.umask(umask)
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink() and path.stat().st_nlink == 1:  # a linked one is its base's
            path.chmod(0o666 & ~umask)


@contextlib.contextmanager
def scratch_folder(output: Path) -> Iterator[Path]:
    """Yield a temporary folder beside ``output``, for what is to be renamed into its place; removed at the end.

    What a killed process left is removed by the next one that makes the same output on that
    machine. Raises UserError when the disk refuses, or when something else removed the folder meanwhile.
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
            why = f"its temporary folder {temporary} was removed by something else; start again"
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
        # Our own number on one is that of an earlier process: in a container numbers recur.
        if found is None or (int(found[1]) != os.getpid() and _is_running(int(found[1]))):
            continue
        if found[2] == "old" and not output.exists():  # killed between the two renames
            os.replace(path, output)
        else:
            shutil.rmtree(path, ignore_errors=True)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
