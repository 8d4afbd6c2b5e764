"""The rows of benchmarks: reading them from JSON lines, and looking at all of them before a model is loaded.

lm-eval itself looks at the first row only. A null in another one becomes the word "None" in a prompt, a label that
names no choice counts as a wrong answer, and a choice that is missing stops a benchmark halfway.
"""

import contextlib
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moh_llm.errors import UserError
from moh_llm.files import sha256
from moh_llm.reading import parse_json

if TYPE_CHECKING:
    from datasets import Dataset
    from lm_eval.api.task import ConfigurableTask


def read_splits(data_files: dict[str, str], **_: Any) -> "dict[str, Dataset]":
    """The splits of one dataset, from one file of JSON lines each.

    This is what lm-eval calls in place of `datasets.load_dataset`, whose cache makes each of some two hundred
    little files take a tenth of a second. Raises UserError for a file that cannot be read.
    """
    return {split: _read(Path(file)) for split, file in data_files.items()}


def find_bad_row(task: "ConfigurableTask", limit: int | None) -> str | None:
    """What is wrong with the first row that ``task`` cannot score or show, or None. Of ``limit`` rows, if given."""
    shown = _shown(task, task.task_docs[0], task.config)
    columns = task.task_docs[:limit]
    for number, values in enumerate(zip(*columns.values(), strict=True), start=1):
        row = dict(zip(columns, values, strict=True))
        if field := _null(row, shown):
            return f"row {number} has no {field!r}"
        if problem := _unscorable(task, row):
            return f"row {number}: {problem}"
    return _bad_example(task) if task.config.num_fewshot else None


def _bad_example(task: "ConfigurableTask") -> str | None:
    """What is wrong with the first few-shot example that cannot be shown, or None."""
    from lm_eval.api.samplers import FirstNSampler

    examples, shots = task.sampler.df, task.config.num_fewshot
    first = isinstance(task.sampler, FirstNSampler)
    shown = _shown(task, examples[0], task.fewshot_cfg)
    for number, row in enumerate(examples[:shots] if first else examples, start=1):
        if field := _null(row, shown):
            return f"row {number} of the examples has no {field!r}"
        # Where examples are drawn there may be a hundred thousand, too many to try each.
        if first and (problem := _unshowable(task, row)):
            return f"row {number} of the examples: {problem}"
    return None


def find_null(data_files: dict[str, str]) -> str | None:
    """The first null in files as `read_splits` takes them, or None."""
    for split, rows in read_splits(data_files).items():
        for number, row in enumerate(rows, start=1):
            if field := _null(row, row):
                return f"row {number} of {split} has no {field!r}"
    return None


def _null(row: dict[str, Any], fields: Iterable[str]) -> str | None:
    """The first of ``fields`` that is null or a list with a null."""
    for field in fields:
        value = row.get(field)
        if value is None or (isinstance(value, list) and None in value):
            return field
    return None


def _unscorable(task: "ConfigurableTask", row: dict[str, Any]) -> str | None:
    """Why lm-eval could not score one item, or only as wrong; or None."""
    try:
        text, target = task.doc_to_text(row), task.doc_to_target(row)
        if not task.multiple_input and not isinstance(text, str):
            return f"its question is {text!r}, which lm-eval does not take for text"
        return _bad_choice(task, row, text if task.multiple_input else target)
    except Exception as error:  # templates and functions of tasks may raise anything
        return _in_words(error)


def _unshowable(task: "ConfigurableTask", row: dict[str, Any]) -> str | None:
    """Why lm-eval could not show one example, or None. The steps are those of its `fewshot_context`."""
    config = task.fewshot_cfg
    try:
        text, answer = task.doc_to_text(row, config.doc_to_text), task.doc_to_target(row, config.doc_to_target)
        choices = task.doc_to_choice(row, config.doc_to_choice) if config.doc_to_choice else None
        if task.multiple_input:
            text, choices = choices[text], None
        task.build_qa_turn(q=text, c=choices, a=answer)
    except Exception as error:  # as above
        return _in_words(error)
    return None


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _bad_choice(task: "ConfigurableTask", row: dict[str, Any], label: Any) -> str | None:
    """What is wrong with the choices of one item or with its label; or None, also where there is nothing to choose."""
    if task.OUTPUT_TYPE != "multiple_choice":
        return None
    choices = task.doc_to_choice(row)
    if not choices or not all(isinstance(choice, str) for choice in choices):
        return f"its choices are {str(choices)[:80]}, not one text or more"
    labels = label if isinstance(label, list) else [label]
    if not labels or not all(0 <= one < len(choices) if isinstance(one, int) else one in choices for one in labels):
        return f"the answer {label!r} is none of the {len(choices)} choices"
    if callable(task.config.process_results):
        # What it reads is not known: it is tried on likelihoods as a model might give them.
        requests = task.construct_requests(row, choices if task.multiple_input else "")
        task.process_results(row, [(-1.0, False)] * len(requests))
    return None


@contextlib.contextmanager
def templates_compiled_once() -> Iterator[None]:
    """Spare lm-eval from compiling a template anew for every row, a hundred times the work of filling it in."""
    from lm_eval.utils import env

    env.from_string = functools.cache(env.from_string)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del env.from_string  # the method of its class is back


def _shown(task: "ConfigurableTask", first: dict[str, Any], config: Any) -> list[str]:
    """The columns that a definition reads by its templates, names of columns, or functions, tried on a first row."""
    used: set[str] = set()
    for specification in (config.doc_to_text, config.doc_to_choice, config.doc_to_target):
        if isinstance(specification, str):
            used |= {specification} | _variables(specification)
        elif callable(specification):
            noting = _Noting(first)
            specification(noting)
            used |= noting.read
    return sorted(used & set(task.features))


@functools.cache
def _variables(template: str) -> set[str]:
    from jinja2 import meta
    from lm_eval.utils import env

    return meta.find_undeclared_variables(env.parse(template))


class _Noting(dict):
    """A row that notes which of its fields are read."""

    def __init__(self, row: dict[str, Any]) -> None:
        super().__init__(row)
        self.read: set[str] = set()

    def __getitem__(self, field: str) -> Any:
        self.read.add(field)
        return super().__getitem__(field)

    def get(self, field: str, default: Any = None) -> Any:
        self.read.add(field)
        return super().get(field, default)


def _read(file: Path) -> "Dataset":
    """One file of JSON lines; a field that only some rows have is null in the others."""
    import pyarrow
    from datasets import Dataset
    from datasets.table import InMemoryTable

    where = f"{file.parent.name}/{file.name}"
    rows = []
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    rows.append(parse_json(line, f"{where}, line {number}"))
                    if not isinstance(rows[-1], dict):
                        raise UserError(f"{where}, line {number}: not an object with fields")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{where} cannot be read: {error}") from error
    if not rows:
        raise UserError(f"{where} holds no rows")
    columns = {field: [row.get(field) for row in rows] for field in dict.fromkeys(key for row in rows for key in row)}
    try:
        # Of its own accord `datasets` would take longer to think of a fingerprint than we to read the file.
        return Dataset(InMemoryTable.from_pydict(columns), fingerprint=sha256(file)[:16])
    except (pyarrow.ArrowException, TypeError, ValueError) as error:
        raise UserError(f"{where}: {_odd_row(columns) or ' '.join(str(error).split())[:200]}") from error


def _odd_row(columns: dict[str, list[Any]]) -> str | None:
    """The first value whose type differs from those above it, in words."""
    for field, values in columns.items():
        first: type | None = None
        for number, value in enumerate(values, start=1):
            kind = float if type(value) is int else type(value)
            if value is not None and first is not None and kind is not first:
                return f"row {number}: {field}={str(value)[:40]!r} is of another type than in the rows above it"
            first = first or (None if value is None else kind)
    return None
