"""The rows of benchmarks: reading them from JSON lines, and looking at all of them before a model is loaded.

lm-eval itself looks at the first row only. A null in another one becomes the word "None" in a prompt, and a
label that names no choice counts as a wrong answer.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moh_llm.errors import UserError
from moh_llm.files import sha256

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
    config = task.config
    gold = config.doc_to_text if task.multiple_input else config.doc_to_target
    shown = _fields(task, config.doc_to_text, config.doc_to_choice, config.doc_to_target)
    columns = task.task_docs[:limit]
    for field in shown:
        if (row := _first_null(columns[field])) is not None:
            return f"row {row} has no {field!r}"
    for field in shown if config.num_fewshot else ():
        if (row := _first_null([example.get(field) for example in task.sampler.df])) is not None:
            return f"row {row} of the examples has no {field!r}"
    if task.OUTPUT_TYPE != "multiple_choice":
        return None
    # Labels repeat: one row for each value that the label is made of stands for all of them.
    parts = [columns[field] for field in sorted(_fields(task, gold))]
    values = [repr(value) for value in zip(*parts, strict=True)] if parts else ["constant"]
    for value, row in {value: row for row, value in reversed(list(enumerate(values)))}.items():
        if problem := _bad_label(task, task.task_docs[row]):
            return f"row {row + 1}: {problem} (label made of {value[:80]})"
    return None


def _bad_label(task: "ConfigurableTask", doc: dict[str, Any]) -> str | None:
    """What is wrong with the right answer of one multiple-choice item, or None."""
    try:
        choices = task.doc_to_choice(doc)
        label = task.doc_to_text(doc) if task.multiple_input else task.doc_to_target(doc)
    except Exception as error:  # templates and functions of tasks may raise anything
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    labels = label if isinstance(label, list) else [label]
    if all(0 <= one < len(choices) if isinstance(one, int) else one in choices for one in labels):
        return None
    return f"the answer {label!r} is none of the {len(choices)} choices"


def _fields(task: "ConfigurableTask", *specifications: Any) -> set[str]:
    """The columns that parts of a task's definition (templates, names of columns, functions) read."""
    from jinja2 import meta
    from lm_eval.utils import env

    used: set[str] = set()
    for specification in specifications:
        if isinstance(specification, str):
            used |= {specification} | meta.find_undeclared_variables(env.parse(specification))
        elif callable(specification):
            noting = _Noting(task.task_docs[0])
            specification(noting)
            used |= noting.read
    return used & set(task.features)


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


def _first_null(values: Any) -> int | None:
    """The number, from 1, of the first null."""
    return next((number for number, value in enumerate(values, start=1) if value is None), None)


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
                    rows.append(json.loads(line))
                    if not isinstance(rows[-1], dict):
                        raise UserError(f"{where}, line {number}: not an object with fields")
    except json.JSONDecodeError as error:
        raise UserError(f"{where}, line {number}: not JSON ({error})") from error
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
