"""How the commands of this folder end, with 0, or with 1 and a line that says what is wrong, and how they resume."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moh_llm.errors import UserError
from moh_llm.files import sha256, write_json
from moh_llm.reading import read_json


def status_of(run: Callable[[argparse.Namespace], None], args: argparse.Namespace) -> int:
    """The exit status of `run(args)`; its `UserError` is printed."""
    try:
        run(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def keep_settings(folder: Path, settings: dict[str, Any]) -> None:
    """Write what a folder's results depend on into its `settings.json`, or compare with what is there.

    Raises:
        UserError: the results are of other settings.
    """
    path = folder / "settings.json"
    if not path.exists():
        if folder.is_dir() and any(folder.iterdir()):
            raise UserError(f"{folder} is not empty, and nothing says what its results are of; name another folder")
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, settings)
    elif differ := [name for name, value in settings.items() if read_json(path).get(name) != value]:
        raise UserError(f"{folder} holds results of another {', '.join(differ)} ({path}); name another folder")


def mixture_settings(mixture: str) -> dict[str, str]:
    """A mixture's name, and the hash of its file, for `keep_settings`."""
    return {"mixture": mixture} | ({"mixture's file": sha256(Path(mixture))} if Path(mixture).is_file() else {})
