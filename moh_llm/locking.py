"""One writer per output folder: an exclusive lock that the kernel releases when its process dies.

    with lock_folder(output):
        ...  # no other process of this toolkit writes there

In a distributed job only the first process takes the lock; if it is refused, all processes end.

The lock is a file beside the folder, ``.NAME.lock``, so that the folder can be replaced as a whole. It is removed when
the writer ends; one that a killed writer left has no effect. On file systems without locks, filelock falls back to the
existence of the file.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from moh_llm.errors import UserError

INSIDE = ".moh_llm.lock"  # used if nothing can be written beside the folder, for example beside a mount point


@contextlib.contextmanager
def lock_folder(output: Path, wait: bool = False) -> Iterator[None]:
    """Hold the lock of ``output`` within the block. The same thread may take it several times.

    The folder need not exist. With ``wait`` another writer is waited for.

    Raises:
        UserError: another process holds the lock, or no lock file can be made.
    """
    path = _lock_path(Path(os.path.realpath(output)))
    lock = FileLock(path, is_singleton=True)
    try:
        lock.acquire(timeout=-1 if wait else 0)
    except Timeout as error:
        raise UserError(
            f"{output} is being written by another process; wait for it to end, or name another output"
        ) from error
    except (OSError, NotImplementedError) as error:
        raise UserError(
            f"cannot write {output}: its lock {path} cannot be made ({error}); name another place"
        ) from error
    try:
        yield
    finally:
        if lock.lock_counter == 1 and type(lock) is FileLock:  # the fallback removes its file itself
            # Before the release: a process that has the file open then finds it unlinked and tries again.
            with contextlib.suppress(OSError):
                path.unlink()
        lock.release()


def _lock_path(output: Path) -> Path:
    beside = output.with_name(f".{output.name}.lock")
    with contextlib.suppress(OSError):
        beside.parent.mkdir(parents=True, exist_ok=True)
    if output.is_dir() and not os.access(beside.parent, os.W_OK):
        return output / INSIDE
    return beside
