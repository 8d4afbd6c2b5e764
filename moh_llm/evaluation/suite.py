"""Suites: frozen lists of benchmarks with their shots, metrics and the paper's figures.

A suite is a YAML file, either one of the package's own (``suites/*.yaml``; ``paper.yaml`` explains the
keys) or a path. Reading one needs neither lm-eval nor torch. An entry ``{from: paper, name: MMLU}`` takes
a benchmark as the package's own suite has it.
"""

import dataclasses
import difflib
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moh_llm.errors import UserError
from moh_llm.reading import read_yaml

SUITES = Path(__file__).resolve().parent / "suites"
_LONGEST = 120  # of a benchmark's name: files bear it, with endings and marks, and take 255 bytes


@dataclass(frozen=True)
class Part:
    """One lm-eval task of a benchmark: its name, its definition file and the dataset config it reads."""

    task: str
    definition: str
    config: str


@dataclass(frozen=True)
class Benchmark:
    """One row of the report: one lm-eval task, or several read as one. Keys as in ``suites/paper.yaml``."""

    name: str
    shots: int
    metric: str
    task: str
    dataset: str
    config: str
    eval_split: str
    items: int
    revision: str | None = None
    fewshot_split: str | None = None
    stock: str | None = None
    definition: str | None = None
    filter: str = "none"
    parts: list[str] = field(default_factory=list)
    average: str = "items"
    published: dict[str, float] = field(default_factory=dict)
    note: str = ""
    chance: float | str | None = None

    def __post_init__(self) -> None:
        if (self.stock is None) == (self.definition is None):
            raise UserError(f"benchmark {self.name}: give one of `stock` (a file of lm-eval) and `definition`")
        if self.shots < 0 or self.items < 1:
            raise UserError(f"benchmark {self.name}: shots={self.shots} and items={self.items} must not be negative")
        if (self.shots > 0) != (self.fewshot_split is not None):
            raise UserError(f"benchmark {self.name}: shots={self.shots} does not go with {self.fewshot_split=!s}")
        if self.average not in ("items", "parts"):
            raise UserError(f"benchmark {self.name}: average={self.average!r} must be 'items' or 'parts'")
        if self.chance is not None and self.chance != "choices" and not _is_share(self.chance):
            raise UserError(
                f"benchmark {self.name}: chance={self.chance!r} must be 'choices', or what guessing scores: a number "
                "from 0 to below 1"
            )
        for key, text in (("name", self.name), ("task", self.task)):
            if not 0 < len(text) <= _LONGEST or not text.isprintable():
                raise UserError(f"benchmark {key}={text[:40]!r} must have 1 to {_LONGEST} printable characters")
        # They become paths, of files that are also written (`fetch`).
        for text in (self.dataset, self.config, *self.parts, *self.splits()):
            if text.startswith("/") or ".." in text.split("/"):
                raise UserError(f"benchmark {self.name}: {text!r} would leave the data folder; give a plain name")

    def expand(self) -> list[Part]:
        """The lm-eval tasks behind this benchmark, in the order of `parts`."""
        definition = self.stock or self.definition or ""
        return [
            Part(*(text.replace("{part}", part) for text in (self.task, definition, self.config)))
            for part in self.parts or [""]
        ]

    def splits(self) -> list[str]:
        """The dataset splits that scoring this benchmark reads."""
        return list(dict.fromkeys(split for split in (self.eval_split, self.fewshot_split) if split))


@dataclass(frozen=True)
class Suite:
    """A named list of benchmarks; its score is the plain mean over them."""

    name: str
    title: str
    benchmarks: list[Benchmark]
    columns: list[str] = field(default_factory=list)
    data: str | None = None
    folder: Path = SUITES
    """Where the suite's file lies: `data` and `definition` are read relative to it."""

    def __post_init__(self) -> None:
        names = [benchmark.name for benchmark in self.benchmarks]
        if not names or len(set(names)) < len(names):
            raise UserError(f"suite {self.name}: benchmarks must be one or more, each with its own name")
        for benchmark in self.benchmarks:
            for column in benchmark.published:
                if column not in self.columns:
                    raise UserError(f"benchmark {benchmark.name}: published column {column!r} is not in `columns`")

    def data_folder(self, data_dir: Path | None) -> Path | None:
        """Where this suite's data lies: the data it carries, else ``data_dir``, else None (the Hub)."""
        return self.folder / self.data if self.data else data_dir


def known_suites() -> list[str]:
    """Names of the suites that come with the package."""
    return sorted(path.stem for path in SUITES.glob("*.yaml"))


def load_suite(name_or_path: str) -> Suite:
    """Read one of the package's suites by name, or any suite by the path of its YAML file.

    Raises UserError for an unknown name, a file that is not YAML, and keys or values that do not fit.
    """
    path = SUITES / f"{name_or_path}.yaml" if name_or_path in known_suites() else Path(name_or_path)
    if not path.is_file():
        raise UserError(f"--suite {name_or_path}: unknown; known are {', '.join(known_suites())}, or give a YAML file")
    try:
        document = read_yaml(path)
    except UserError as error:
        raise UserError(f"suite {error}") from error
    if isinstance(document, dict) and isinstance(document.get("benchmarks"), list):
        columns = document.get("columns") or []
        document["benchmarks"] = [
            _read_benchmark(entry, columns, f"suite {path}, benchmark {number}")
            for number, entry in enumerate(document["benchmarks"], start=1)
        ]
    suite = _build(Suite, document, f"suite {path}", set_here=("folder",))
    return dataclasses.replace(suite, folder=path.resolve().parent)


def _read_benchmark(entry: Any, columns: Any, where: str) -> Benchmark:
    """One entry, or the benchmark of another suite that it names, with the published figures of ``columns``."""
    if not isinstance(entry, dict) or "from" not in entry:
        return _build(Benchmark, entry, where)
    if set(entry) != {"from", "name"}:
        raise UserError(f"{where}: beside `from` only `name` is read; to change a benchmark write it out")
    if entry["from"] not in known_suites():
        raise UserError(f"{where}: from={entry['from']!r} must be one of {', '.join(known_suites())}")
    others = {benchmark.name: benchmark for benchmark in load_suite(entry["from"]).benchmarks if benchmark.stock}
    if entry["name"] not in others:
        raise UserError(f"{where}: name={entry['name']!r} must be one of {', '.join(others) or 'none'}")
    found = others[entry["name"]]
    return dataclasses.replace(found, published={c: v for c, v in found.published.items() if c in columns})


def _build(cls: type, entry: Any, where: str, set_here: tuple[str, ...] = ()) -> Any:
    """Make the dataclass ``cls`` from a YAML mapping; unknown or missing keys and wrong types raise UserError."""
    if not isinstance(entry, dict):
        raise UserError(f"{where}: expected keys and values, found {type(entry).__name__}")
    hints = typing.get_type_hints(cls)
    fields = {item.name: item for item in dataclasses.fields(cls) if item.name not in set_here}
    for key, value in entry.items():
        if key not in fields:
            near = difflib.get_close_matches(str(key), fields, n=1)
            raise UserError(f"{where}: unknown key {key!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        if not _fits(value, hints[key]):
            raise UserError(f"{where}: {key}={value!r} must be {_spell(hints[key])}")
    for name, item in fields.items():
        required = item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
        if required and name not in entry:
            raise UserError(f"{where}: key {name!r} is missing")
    return cls(**entry)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a YAML value has the type that a field declares (an int also serves as a float)."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, option) for option in arguments)
    if origin is list:
        return isinstance(value, list) and all(_fits(item, arguments[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(
            _fits(k, arguments[0]) and _fits(v, arguments[1]) for k, v in value.items()
        )
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, hint) and not (isinstance(value, bool) and hint is int)


def _is_share(value: float | str) -> bool:
    return not isinstance(value, str) and 0 <= value < 1


def _spell(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)
