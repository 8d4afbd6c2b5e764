"""The processes of one evaluation, and the answers that they keep until its report is written.

OUTPUT.partial/answers-KEY/RANK.jsonl            answers of one model, by request; the key is what they depend on
OUTPUT.partial/samples/MODEL/BENCHMARK.jsonl     with --log-samples, the log of a benchmark's items
"""

import contextlib
import hashlib
import json
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO, TypeVar

from moh_llm.devices import check_group, world_size
from moh_llm.errors import UserError

T = TypeVar("T")


class BenchmarkError(Exception):
    """A benchmark could not be scored. The message is the error of the first process that failed."""


@dataclass(frozen=True)
class Team:
    """The processes of one evaluation; each has the whole model and answers every ``size``-th request."""

    rank: int = 0
    size: int = 1

    def gather(self, item: T) -> list[T]:
        """The item of every process, in the order of their ranks, on all of them."""
        if self.size == 1:
            return [item]
        import torch.distributed

        items: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(items, item)
        return items

    def broadcast(self, make: Callable[[], T]) -> T:
        """Call ``make`` on the first process and return its result on all; a UserError there ends all of them."""
        return self.gather(self.barrier(lambda: make() if self.rank == 0 else None))[0]  # type: ignore[return-value]

    def barrier(self, action: Callable[[], T]) -> T:
        """Call ``action`` on every process, wait for all, and return this process's result.

        A UserError on one process ends all of them: the first process raises it, the others exit silently.
        """
        problem: str | None = None
        try:
            result = action()
        except UserError as error:
            problem = str(error)
        for rank, theirs in enumerate(self.gather(problem)):
            if theirs is not None and self.rank > 0:
                raise SystemExit(2)
            if theirs is not None:
                raise UserError(theirs if rank == 0 else f"{theirs} (process {rank} of {self.size})")
        return result


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


class AnswerCache:
    """The folder of an evaluation's answers and logs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def beside(cls, output: Path) -> "AnswerCache":
        """The cache that belongs to a report's folder."""
        return cls(output.with_name(f"{output.name}.partial"))

    def open(self, key: dict[str, Any], team: Team) -> "Answers":
        """Open the answers that depend on ``key``: the model's files, dtype, hardware, versions.

        A request's text, and so its benchmark and data, is its own key. Batch size and number of processes change an
        answer by rounding alone and are not in it. Raises UserError if the folder cannot be written.
        """
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        folder = self.folder / f"answers-{digest[:16]}"

        def open_own() -> TextIO:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                return (folder / f"{team.rank}.jsonl").open("a", buffering=1, encoding="utf-8")
            except OSError as error:
                raise UserError(f"cannot write to {folder}: {error.strerror}; name another --output") from error

        known = team.broadcast(lambda: _read(folder))
        return Answers(known, team.barrier(open_own), team.size)

    def samples_file(self, label: str, benchmark: str) -> Path:
        """Where the log of a benchmark's items lies."""
        return self.folder / "samples" / file_name(label) / f"{file_name(benchmark)}.jsonl"

    def remove(self) -> None:
        """Remove all answers and logs, of earlier runs too, and the folders that this empties; other files stay."""
        for pattern in ("answers-*/*.jsonl", "samples/*/*.jsonl", "samples/*/.*.jsonl.*.tmp"):
            for file in self.folder.glob(pattern):
                with contextlib.suppress(OSError):
                    file.unlink()
        for folder in (*self.folder.glob("samples/*"), *self.folder.glob("*"), self.folder):
            with contextlib.suppress(OSError):
                folder.rmdir()


class Answers:
    """Answers of one model; those that an earlier run left are found, new ones are kept.

    Not lm-eval's cache, which stores pickles, and neither time nor cut prompts.
    """

    def __init__(
        self, known: dict[str, list[Any]] | None = None, file: TextIO | None = None, processes: int = 1
    ) -> None:
        self.known, self._file, self._processes = known or {}, file, processes
        if file is not None:
            file.write("\n")  # a killed run may have left a part of a line
        self.start()

    def start(self) -> None:
        """Begin a benchmark."""
        self.cut = False
        """Whether some prompt since was longer than the model's context and lost its beginning."""
        self.seconds = 0.0
        """Seconds that an earlier run took for the answers that were found since."""
        self._last = time.perf_counter()

    def find(self, kind: str, request: Iterable[Any]) -> Any:
        """The answer to a request, or None; log-likelihoods are pairs, as lm-eval has them."""
        entry = self.known.get(_hash(kind, request))
        if entry is None:
            return None
        answer, seconds, cut = entry
        self.seconds, self.cut = self.seconds + seconds, self.cut or cut
        return tuple(answer) if isinstance(answer, list) else answer

    def add_partial(self, kind: str, request: Iterable[Any], answer: Any) -> None:
        """Keep an answer. lm-eval calls this, its cache hook, as soon as a request is answered."""
        if self._file is not None:
            now = time.perf_counter()
            entry = [_hash(kind, request), answer, round((now - self._last) / self._processes, 6), self.cut]
            self._file.write(json.dumps(entry) + "\n")
            self._last = now


def _read(folder: Path) -> dict[str, list[Any]]:
    known = {}
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError):  # the end of a line was not written
                key, *entry = json.loads(line)
                known[key] = entry
    return known


def _hash(kind: str, request: Iterable[Any]) -> str:
    return hashlib.sha256(json.dumps([kind, *request]).encode()).hexdigest()


def file_name(name: str) -> str:
    """A benchmark's or model's name as part of a path: neither hidden nor the folder above.

    A name that has to be changed gets a part of its hash, so that two names never become one.
    """
    plain = re.sub(r"^\.+|[^\w.-]+", "_", name)
    return plain if plain == name else f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
