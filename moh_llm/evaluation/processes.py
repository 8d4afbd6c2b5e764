"""The processes of one evaluation, and the benchmarks that they have finished, kept until its report is written.

OUTPUT.partial/MODEL/BENCHMARK.jsonl     what the scores depend on and the scores; then, with --log-samples, the items
"""

import contextlib
import hashlib
import json
import re
import shutil
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

from moh_llm.devices import Team, check_group, world_size
from moh_llm.errors import UserError
from moh_llm.files import write_text


class BenchmarkError(Exception):
    """A benchmark could not be scored. The message is the error of the first process that failed."""


def connect() -> Team:
    """Connect to the launcher's other processes; without a launcher the team is this process alone.

    Raises UserError if several processes were started that are not connected.
    """
    if world_size() == 1:
        return Team()
    import torch
    from accelerate import PartialState

    # Without a GPU, accelerate connects only if `cpu` is given. The timeout covers the wait for the slowest process.
    state = PartialState(cpu=not torch.accelerator.is_available(), timeout=timedelta(weeks=1))
    check_group(state.num_processes)
    return Team(state.process_index, state.num_processes)


def disconnect() -> None:
    """Close the connection to the other processes, if there is one."""
    import torch.distributed

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


class Finished:
    """The finished benchmarks of an evaluation, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, model: str, benchmark: str, key: dict[str, Any]) -> dict[str, Any] | None:
        """The scores, or None if there are none or ``key``, on which they depend, was another."""
        file = self.file(model, benchmark)
        if not file.is_file():
            return None
        with file.open(encoding="utf-8") as lines:
            found = json.loads(next(lines))
        return found["scores"] if found["key"] == key else None

    def write(
        self, model: str, benchmark: str, key: dict[str, Any], scores: dict[str, Any], items: Iterable[Any]
    ) -> None:
        """Keep the scores of a benchmark and its items. Raises UserError if the folder cannot be written."""
        file = self.file(model, benchmark)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot make {file.parent}: {error.strerror}; name another --output-dir") from error
        lines = [{"key": key, "scores": scores}, *items]
        write_text(file, "".join(json.dumps(line, ensure_ascii=False, default=str) + "\n" for line in lines))

    def copy_items(self, model: str, benchmark: str, to: Path) -> None:
        """Copy the items of a benchmark, as JSON lines."""
        to.parent.mkdir(parents=True, exist_ok=True)
        with self.file(model, benchmark).open("rb") as lines, to.open("wb") as copy:
            next(lines)
            shutil.copyfileobj(lines, copy)

    def file(self, model: str, benchmark: str) -> Path:
        """Where a benchmark of a model is kept."""
        return self.folder / file_name(model) / f"{file_name(benchmark)}.jsonl"

    def remove(self) -> None:
        """Remove all that was kept, and the folders that this empties; other files stay."""
        for pattern in ("*/*.jsonl", "*/.*.jsonl.*.tmp"):
            for file in self.folder.glob(pattern):
                file.unlink(missing_ok=True)
        for folder in (*self.folder.glob("*"), self.folder):
            with contextlib.suppress(OSError):
                folder.rmdir()


def file_name(name: str) -> str:
    """A benchmark's or model's name as part of a path: neither hidden nor the folder above.

    A name that has to be changed gets a part of its hash, so that two names never become one.
    """
    plain = re.sub(r"^\.+|[^\w.-]+", "_", name)
    return plain if plain == name else f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
