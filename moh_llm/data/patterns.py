"""The local paths that a pattern matches, without a walk through a whole machine."""

import glob
import itertools
import os
import re
from pathlib import Path

from moh_llm.errors import UserError

MOST_ENTRIES = 4_000_000  # that a pattern with ** may look through, about ten seconds on a local disk
_SYSTEM = tuple(map(Path, ("/dev", "/proc", "/sys")))
_ESCAPED = re.compile(r"\[([*?[])\]")  # what glob.escape writes


def matching(pattern: str, where: str) -> list[str]:
    """The paths that a path or glob matches, sorted. Raises UserError, which begins with ``where``, for one too wide.

    An OSError is the caller's.
    """
    # A file whose name holds [ or * is still found by its name.
    if Path(pattern).is_file():
        return [pattern]
    _check_walk(pattern, where)
    return sorted(glob.glob(pattern, recursive=True))


def _check_walk(pattern: str, where: str) -> None:
    """Raise UserError where ``**`` would list a machine, a home folder, or more than `MOST_ENTRIES`."""
    parts = Path(pattern).parts
    if "**" not in parts:
        return
    # An escaped bracket or asterisk is no pattern.
    plain = itertools.takewhile(lambda part: not glob.has_magic(_ESCAPED.sub("", part)), parts)
    fixed = Path(*(_ESCAPED.sub(r"\1", part) for part in plain)).resolve()
    home = Path.home().resolve()
    if fixed in (*_SYSTEM, home, *home.parents) or any(system in fixed.parents for system in _SYSTEM):
        raise UserError(f"{where}: {pattern} would look through all of {fixed}; name a folder of text in it")
    seen = 0
    for root in glob.glob(str(Path(*parts[: parts.index("**")]))):
        # Links are followed, as the glob does, so that folders that link to each other have no end.
        for _, folders, files in os.walk(root, followlinks=True):
            folders[:] = [name for name in folders if not name.startswith(".")]
            seen += len(folders) + len(files)
            if seen > MOST_ENTRIES:
                raise UserError(
                    f"{where}: {pattern} would look through more than {MOST_ENTRIES:,} files and folders; name a "
                    "folder further down, or remove a link that leads back up"
                )
