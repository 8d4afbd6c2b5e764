"""What the sections of `gpu.py` have in common: shapes, a clock, rows, and the file that they go to."""

import contextlib
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from moh_llm.devices import choose_device, synchronize

Run = Callable[[], Any]
Row = dict[str, Any]
LOST = "the process ended in this row"
READY = "the process ended before this row was timed"
CUT = "cut: the section's seconds are used up"


class Shape(NamedTuple):
    """A layer: query heads, key-value heads, their size, the width."""

    heads: int
    groups: int
    size: int
    width: int


class Sizes(NamedTuple):
    """What is measured: shapes of layers, lengths, rows of decoding, what local fallbacks see, and repetitions."""

    shapes: dict[str, Shape]
    lengths: tuple[int, ...]
    compiled: int  # tokens of the calls that compile
    contexts: tuple[int, ...]  # keys in decoding
    rows: tuple[int, ...]
    window: int
    sinks: int
    start: int  # first tokens with all heads on
    seconds: float  # of the turns of one cell
    rounds: int


SHAPES = {"llama3-8b": Shape(32, 8, 128, 4096), "smollm2-135m": Shape(9, 3, 64, 576)}
FULL = Sizes(SHAPES, (8192, 32768, 2048), 1024, (8192, 32768), (16, 64), 256, 4, 1024, 0.6, 12)
SMALL = Sizes(
    {"llama3-8b": Shape(8, 2, 16, 64), "smollm2-135m": Shape(3, 1, 16, 48)},
    *((96, 160), 96, (160,), (2,), 16, 2, 32, 0.01, 1),
)


class Clock:
    """Milliseconds of calls. On CUDA between events, each call after 256 MB were written, so that the L2 cache has none
    of its inputs; launches count unless they are recorded in a graph."""

    def __init__(self, device: torch.device, sizes: Sizes):
        self.device, self.sizes = device, sizes
        self.flush = torch.empty(256 << 20, dtype=torch.int8, device=device) if device.type == "cuda" else None

    def turns(self, runs: dict[str, Run]) -> dict[str, list[float]]:
        """Milliseconds of each in each round: one that does not count, two that do, and more while there is time."""
        found: dict[str, list[float]] = {name: [] for name in runs}
        end = time.perf_counter() + self.sizes.seconds
        for number in range(1 + self.sizes.rounds):
            if number > 2 and time.perf_counter() > end:
                break
            taken = {name: self._once(run) for name, run in runs.items()}
            synchronize(self.device)
            for name, ms in taken.items() if number else ():
                found[name].append(ms())
        return found

    def _once(self, run: Run) -> Callable[[], float]:
        """Call it; what comes back says how long it took, once the device is done."""
        if self.flush is None:
            began = time.perf_counter()
            run()
            synchronize(self.device)
            taken = 1e3 * (time.perf_counter() - began)
            return lambda: taken
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.flush.zero_()
        begin.record()
        run()
        end.record()
        return lambda: begin.elapsed_time(end)


def reason(error: BaseException) -> str:
    """An error in one line."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip()[:160] if lines else ''}"


class Lost(Exception):
    """The device answers no more; another process goes on."""


@dataclass
class Record:
    """Rows of one section: written as a line of JSON each, at once; the last line of a row counts.

    A row is written before it is measured, too, so that one in which the process dies is known. What another process
    measured before is not measured again.
    """

    path: Path  # of the lines
    section: str
    until: float  # `time.time()` after which nothing new is begun
    clock: Clock
    before: dict[str, Row] = field(default_factory=dict)  # rows of earlier processes

    def __post_init__(self) -> None:
        rows = read_rows(self.path).items()
        self.before = {key: row for key, row in rows if row["section"] == self.section and row.get("failed") != CUT}

    def write(self, row: Row) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"section": self.section} | row, default=str) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def note(self, name: str, make: Callable[[], Row]) -> None:
        """A row that is not timed: what `make` gives."""
        key = {"cell": "", "peer": name}
        if key_of({"section": self.section} | key) in self.before:
            return
        if time.time() > self.until:
            self.write(key | {"failed": CUT})
            return
        self.write(key | {"failed": LOST})
        found, failed = self._attempt(make)
        row = key | ({"failed": failed} if failed else found)
        self.write(row)
        show(row)

    def cell(
        self,
        cell: str,
        runs: dict[str, Run],
        dense: Iterable[str],
        more: dict[str, Row] | None = None,
        less: dict[str, str] | None = None,
    ) -> None:
        """Rows of peers that take turns; ratios are to the fastest of `dense` in the same round.

        Args:
            cell: what the rows have in common.
            runs: by name, what is timed.
            dense: names of peers.
            more: what else is known of a peer.
            less: of which peer the time is left out of a peer's, on both sides, in the ratio "beyond".
        """
        keys = {name: key_of({"section": self.section, "cell": cell, "peer": name}) for name in runs}
        known = {name: self.before[key].get("failed") for name, key in keys.items() if key in self.before}
        if len(known) == len(runs) and not {LOST, READY} <= {*known.values()}:
            return  # measured, or not to be: a process died when all took turns
        rows: dict[str, Row] = {name: {"cell": cell, "peer": name, **(more or {}).get(name, {})} for name in runs}
        timed: dict[str, Run] = {}
        for name, run in runs.items():
            if known.get(name) == LOST:
                failed = LOST
            elif time.time() > self.until:
                failed = CUT
            else:
                self.write(rows[name] | {"failed": LOST})
                _, failed = self._attempt(run)
            self.write(rows[name] | {"failed": failed or READY})
            if failed is None:
                timed[name] = run
        times = self.clock.turns(timed)
        beyond = {
            name: [a - b for a, b in zip(times[name], times[other], strict=True)]
            for name, other in (less or {}).items()
            if name in times and other in times
        }
        for name, taken in times.items():
            row = rows[name] | {"ms": statistics.median(taken), "rounds": len(taken)}
            for kind, found in (("ratio", times), ("beyond", beyond)):
                fastest = [
                    min(round_) for round_ in zip(*(found[base] for base in dense if base in found), strict=True)
                ]
                if name in found and fastest:
                    row[kind] = spread(a / b for a, b in zip(found[name], fastest, strict=True))
            self.write(row)
            show(row)
        for name in runs.keys() - times.keys():
            show(rows[name] | {"failed": read_rows(self.path)[keys[name]]["failed"]})

    def _attempt(self, run: Callable[[], Any]) -> tuple[Any, str | None]:
        """What a call gives, and why it failed, if it did. Raises `Lost` where the device is in no state to go on."""
        device = self.clock.device
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a backend that cannot, says why before it raises
                found = run()
            synchronize(device)
        except Exception as error:
            failed = reason(error)
        else:
            return found, None
        try:
            synchronize(device)
            if device.type == "cuda":
                torch.cuda.empty_cache()
        except RuntimeError as error:
            raise Lost(failed) from error
        return None, failed


def key_of(row: Row) -> str:
    return "; ".join((row["section"], row.get("cell", ""), row.get("peer", "")))


def read_rows(path: Path) -> dict[str, Row]:
    """Rows by what they are of; a line that was cut off is left out."""
    found: dict[str, Row] = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                row = json.loads(line)
                found[key_of(row)] = row
    return found


def spread(ratios: Iterable[float]) -> list[float]:
    """Median, least and most."""
    ratios = list(ratios)
    return [statistics.median(ratios), min(ratios), max(ratios)]


def words(ratio: list[float] | None) -> str:
    return "" if ratio is None else "{:.3f} ({:.3f} to {:.3f})".format(*ratio)


LINE = "{:<44} {:<20}{:>10}{:>25}{:>25}  {}"


def show(row: Row) -> None:
    """Print a row."""
    ms = f"{row['ms']:.4g}" if "ms" in row else ""
    rest = [f"keys {row['keys']:.2g}"] if "keys" in row else []
    rest += [f"{row['us']} us in {len(row['kernels'])} kernels"] if "us" in row else []
    rest += [str(row[name]) for name in ("backend", "failed") if row.get(name)]
    ratios = words(row.get("ratio")), words(row.get("beyond"))
    print(LINE.format(row["cell"], row["peer"], ms, *ratios, "; ".join(rest)), flush=True)


def device_of() -> tuple[torch.device, torch.dtype]:
    """The device and the dtype of what is measured."""
    device = choose_device()
    return device, torch.float32 if device.type == "cpu" else torch.bfloat16
