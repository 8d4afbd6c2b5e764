"""Suites: frozen lists of benchmarks with their shots, metrics and the paper's figures.

A suite is a YAML file, one of the package's (``suites/*.yaml``; ``paper.yaml`` explains the keys) or any other. An
entry ``{from: paper, name: MMLU}`` takes a benchmark of the package's suite. Reading needs neither lm-eval nor torch.
"""

import dataclasses
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, NonNegativeInt, PositiveInt, StringConstraints
from pydantic.dataclasses import dataclass

from moh_llm.errors import UserError
from moh_llm.reading import read_yaml
from moh_llm.records.base import validating

SUITES = Path(__file__).resolve().parent / "suites"
HAYSTACK = "python_topics"  # the built-in text that prompts are made in if no other is given
SCRIPT_DATASETS = SUITES / "sources" / "converted.yaml"
"""Datasets that the Hub serves by script: converter, commit, addresses and hashes of each."""
_STRICT = ConfigDict(strict=True, extra="forbid")
Name = Annotated[str, StringConstraints(min_length=1, max_length=120)]  # part of file names, which may have 255 bytes


@dataclasses.dataclass(frozen=True)
class Part:
    """One lm-eval task of a benchmark: its name, its definition file and the dataset config it reads."""

    task: str
    definition: str
    config: str


@dataclass(frozen=True, config=_STRICT)
class Benchmark:
    """One row of the report: one lm-eval task, or several read as one. Keys as in ``suites/paper.yaml``."""

    name: Name
    shots: NonNegativeInt
    metric: str
    task: Name
    dataset: str
    config: str
    eval_split: str
    items: PositiveInt
    revision: str | None = None
    fewshot_split: str | None = None
    stock: str | None = None
    definition: str | None = None
    filter: str = "none"
    parts: list[str] = field(default_factory=list)
    average: Literal["items", "parts"] = "items"
    published: dict[str, float] = field(default_factory=dict)
    note: str = ""
    chance: Annotated[float, Field(ge=0, lt=1)] | Literal["choices", "words"] | None = None
    lengths: list[PositiveInt] = field(default_factory=list)

    def __post_init__(self) -> None:
        if (self.stock is None) == (self.definition is None):
            raise UserError(f"benchmark {self.name}: give one of `stock` (a file of lm-eval) and `definition`")
        if (self.shots > 0) != (self.fewshot_split is not None):
            raise UserError(f"benchmark {self.name}: shots={self.shots} excludes fewshot_split={self.fewshot_split}")
        # These become paths of files, which `fetch` writes.
        for text in (self.task, self.dataset, self.config, *self.parts, *self.splits()):
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


@dataclass(frozen=True, config=_STRICT)
class Suite:
    """A named list of benchmarks; its score is the plain mean over them."""

    name: str
    title: str
    benchmarks: list[Benchmark]
    columns: list[str] = field(default_factory=list)
    data: str | None = None
    tokenizer: str = ""
    """Counts the tokens of prompts that are made. Default: the base's, or the first model's."""
    folder: Path = SUITES
    """Where the suite's file lies: `data` and `definition` are read relative to it."""

    def __post_init__(self) -> None:
        names = [benchmark.name for benchmark in self.benchmarks]
        if not names or len(set(names)) < len(names):
            raise UserError(f"suite {self.name}: benchmarks must be one or more, each with its own name")
        tasks = [part.task for benchmark in self.benchmarks for part in benchmark.expand()]  # names of files
        if twice := next((task for task in tasks if tasks.count(task) > 1), None):
            raise UserError(f"suite {self.name}: task {twice} is there twice; give one another `task`, any name")
        for benchmark in self.benchmarks:
            for column in benchmark.published:
                if column not in self.columns:
                    raise UserError(f"benchmark {benchmark.name}: published column {column!r} is not in `columns`")

    def within(self, context: int) -> "Suite":
        """The suite without prompts that are longer than a context. Raises UserError where none is left."""
        kept = [benchmark for benchmark in self.benchmarks if max(benchmark.lengths, default=0) <= context]
        if not kept:
            raise UserError(f"suite {self.name}: every prompt is longer than a model's context, {context:,} tokens")
        return dataclasses.replace(self, benchmarks=kept)

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
            benchmark
            for number, entry in enumerate(document["benchmarks"], start=1)
            for benchmark in _read_benchmarks(entry, columns, f"suite {path}, benchmark {number}")
        ]
    suite = _build(Suite, document, f"suite {path}")
    return dataclasses.replace(suite, folder=path.resolve().parent)


def _read_benchmarks(entry: Any, columns: Any, where: str) -> list[Benchmark]:
    """One entry at each of its lengths, or what it names of another suite with the published figures of ``columns``."""
    if not isinstance(entry, dict) or "from" not in entry:
        one = _build(Benchmark, entry, where)
        return [
            dataclasses.replace(one, name=f"{one.name} {length}", task=f"{one.task}_{length}", lengths=[length])
            for length in one.lengths
        ] or [one]
    if set(entry) != {"from", "name"}:
        raise UserError(f"{where}: beside `from` only `name` is read; to change a benchmark write it out")
    if entry["from"] not in known_suites():
        raise UserError(f"{where}: from={entry['from']!r} must be one of {', '.join(known_suites())}")
    others = {benchmark.name: benchmark for benchmark in load_suite(entry["from"]).benchmarks if benchmark.stock}
    if entry["name"] not in others:
        raise UserError(f"{where}: name={entry['name']!r} must be one of {', '.join(others) or 'none'}")
    found = others[entry["name"]]
    return [dataclasses.replace(found, published={c: v for c, v in found.published.items() if c in columns})]


def _build(cls: Any, entry: Any, where: str) -> Any:
    """Make the dataclass ``cls`` from a YAML mapping; unknown or missing keys and wrong types raise UserError."""
    if not isinstance(entry, dict):
        raise UserError(f"{where}: expected keys and values, found {type(entry).__name__}")
    with validating(where, [field.name for field in dataclasses.fields(cls)]):
        return cls(**{str(key): value for key, value in entry.items()})


def data_file(data_dir: Path, benchmark: Benchmark, part: Part, split: str) -> Path:
    """Where a local data folder holds one split: ``<dataset, / as __>/<config>/<split>.jsonl``."""
    return data_dir / benchmark.dataset.replace("/", "__") / part.config / f"{split}.jsonl"
