"""The folder of what DeepSpeed compiles, which all runs of pytest in a virtual environment share."""

import contextlib
import fcntl
import os
from pathlib import Path


def enter(folder: Path) -> int:
    """Enter a folder of builds, and remove the locks in it whose owners cannot be alive.

    A build that is killed leaves its lock, for which everyone who comes after would wait for ever. The lock names no
    owner, and on a busy machine a build may take any time, so its age tells nothing. Therefore a run of pytest holds
    a shared lock on the file `runs`, which the kernel releases however the run ends: only a run that finds itself alone
    removes locks. Returns the descriptor of that file, which stays open until the process ends.
    """
    folder.mkdir(exist_ok=True)
    runs = os.open(folder / "runs", os.O_RDWR | os.O_CREAT)
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(runs, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for lock in folder.glob("*/lock"):
            lock.unlink()
    fcntl.flock(runs, fcntl.LOCK_SH)
    return runs
