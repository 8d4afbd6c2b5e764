"""The result cache: finished benchmarks of an evaluation, kept beside its output until the report is written.

OUTPUT.partial/MODEL/BENCHMARK.json            key, item scores, and how the model was run
OUTPUT.partial/MODEL/BENCHMARK.samples.jsonl   with --log-samples

A cached result is used only where its key is that of the new run: the model's files, the benchmark's definition and
data, limit, dtype, kind of device, seeds, versions, and whether prefixes are shared. Batch size and number of processes
are not in it: they change a score by rounding alone.
"""

import contextlib
import dataclasses
import hashlib
import json
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from moh_llm import __version__
from moh_llm.errors import UserError
from moh_llm.evaluation.scoring import SEEDS, Sample, Score
from moh_llm.evaluation.tasks import Loaded
from moh_llm.files import write_json, write_text
from moh_llm.reading import read_json

Key = dict[str, Any]


class CachedResult(BaseModel, extra="forbid"):
    """One benchmark on one model, as its file holds it."""

    key: Key
    score: Score
    context: int
    """Longest input of the model, in tokens."""
    hardware: str


def installed_versions() -> dict[str, str]:
    """The versions that scores depend on."""
    names = {"torch": "torch", "transformers": "transformers", "lm_eval": "lm-eval", "datasets": "datasets"}
    return {
        "moh_llm": __version__,
        **{name: metadata.version(package) for name, package in names.items()},
        "python": platform.python_version(),
    }


def make_key(
    model: str, loaded: Loaded, limit: int | None, dtype: str, device: str, share_prefixes: bool = False
) -> Key:
    """All that a result depends on. ``model``: SHA-256 of its files; ``device``: a torch device (its kind counts)."""
    benchmark = dataclasses.asdict(loaded.benchmark)
    about = {name: value for name, value in benchmark.items() if name not in ("published", "note", "items", "chance")}
    return {
        "model": model,
        "benchmark": about,
        "definition": loaded.definition,
        "data": loaded.data,
        "limit": limit,
        "dtype": dtype,
        "device": device.partition(":")[0],
        "share_prefixes": share_prefixes,
        "seeds": dict(SEEDS),
        "versions": installed_versions(),
    }


def file_name(name: str) -> str:
    """A benchmark's or model's name as part of a path: neither hidden nor the folder above.

    A name that has to be changed gets a part of its hash, so that two names never become one.
    """
    plain = re.sub(r"^\.+|[^\w.-]+", "_", name)
    return plain if plain == name else f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


class ResultCache:
    """The folder of finished benchmarks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def beside(cls, output: Path) -> "ResultCache":
        """The cache that belongs to a report's folder."""
        return cls(output.with_name(f"{output.name}.partial"))

    def load(self, label: str, benchmark: str, key: Key, samples: bool) -> CachedResult | str | None:
        """A cached result; or why it cannot be used; or None where there is none.

        ``samples``: whether the log of its items must be there too.
        """
        path = self._path(label, benchmark)
        if not path.is_file():
            return None
        try:
            found = CachedResult.model_validate(read_json(path))
            different = _differences(found.key, json.loads(json.dumps(key)))
        except (UserError, ValidationError, KeyError, AttributeError):
            return f"{path} is damaged"
        if different:
            return ", ".join(different)
        if samples and not self.samples_file(label, benchmark).is_file():
            return "its items were not logged"
        return found

    def store(self, label: str, benchmark: str, result: CachedResult, samples: list[Sample] | None) -> None:
        """Write one finished benchmark, in one step. Raises UserError when the disk refuses."""
        path = self._path(label, benchmark)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot make {path.parent}: {error.strerror}; name another --output") from error
        if samples is not None:
            lines = (json.dumps(sample, ensure_ascii=False, default=str) + "\n" for sample in samples)
            write_text(self.samples_file(label, benchmark), "".join(lines))
        write_json(path, result.model_dump())

    def samples_file(self, label: str, benchmark: str) -> Path:
        """Where the log of a benchmark's items lies."""
        return self._path(label, benchmark).with_suffix(".samples.jsonl")

    def remove(self) -> None:
        """Remove every result, of earlier runs too, and the folders that this empties; other files stay."""
        results = [path for path in self.folder.glob("*/*.json") if _is_result(path)]
        with contextlib.suppress(OSError):
            for path in results:
                # A killed process may have left a temporary file.
                for file in (path, path.with_suffix(".samples.jsonl"), *path.parent.glob(f".{path.stem}.*.tmp")):
                    file.unlink(missing_ok=True)
        for folder in (*{path.parent for path in results}, self.folder):
            with contextlib.suppress(OSError):
                folder.rmdir()

    def _path(self, label: str, benchmark: str) -> Path:
        return self.folder / file_name(label) / f"{file_name(benchmark)}.json"


def _is_result(path: Path) -> bool:
    """Whether `ResultCache.store` wrote this JSON file."""
    try:
        CachedResult.model_validate(read_json(path))
    except (UserError, ValidationError):
        return False
    return True


def _differences(old: Key, new: Key) -> list[str]:
    """Differences between two keys, in words."""
    reasons = {
        "model": "the model's files differ",
        "benchmark": "the benchmark is defined otherwise",
        "definition": "the files of its task differ",
        "data": "its data differ",
    }
    different = []
    for name, value in new.items():
        if old.get(name) == value:
            continue
        if isinstance(value, dict) and name not in reasons:
            different += [f"{k} was {old[name].get(k)}, is {v}" for k, v in value.items() if old[name].get(k) != v]
        else:
            different.append(reasons.get(name) or f"{name} was {old.get(name)}, is {value}")
    return different
