"""From a suite to lm-eval tasks whose data is read and checked.

A task is a small YAML file that includes lm-eval's own and changes shots and data. lm-eval checks the first row only: a
null in another one becomes the word "None" in a prompt, and a label that names no choice counts as a wrong answer. So
every row that is scored is tried here, before a model is loaded.
"""

import contextlib
import functools
import hashlib
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from moh_llm.errors import UserError
from moh_llm.evaluation.statistics import Strata, chance_scores, rows_of
from moh_llm.evaluation.suite import Benchmark, Suite, data_file
from moh_llm.files import sha256
from moh_llm.reading import parse_json, read_text

if TYPE_CHECKING:
    from datasets import Dataset
    from lm_eval.api.task import ConfigurableTask

# lm-eval's own defaults, written out so that the report can state them.
SEEDS = {"python": 0, "numpy": 1234, "torch": 1234, "fewshot": 1234}
_TAKE_FILES = "give the data as files with --data-dir (moh-llm data fetch-benchmarks makes them)"
_READER = "custom_dataset: !function moh_llm.evaluation.tasks.read_splits\n"
_MAKER = """custom_dataset: !function moh_llm.evaluation.ruler.make_prompts
process_results: !function moh_llm.evaluation.ruler.recall
"""


@dataclass
class Loaded:
    """A benchmark with its lm-eval tasks, data read."""

    benchmark: Benchmark
    tasks: "list[ConfigurableTask]"
    data: str
    """SHA-256 of what was read: of the local files, or of the Hub's dataset by name, commit and contents."""
    chances: Strata | None = None
    """Chance score of each scored item; None where the suite names no chance rule."""


def require_lm_eval() -> None:
    """Raise UserError with the install command when lm-eval is absent."""
    try:
        import lm_eval  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "lm_eval":
            raise
        raise UserError('evaluation needs lm-eval: pip install "moh-llm[eval]"') from error


def load_tasks(suite: Suite, folder: Path, data_dir: Path | None, limit: int | None = None) -> list[Loaded]:
    """Make the suite's lm-eval tasks, read their data, and try the first ``limit`` rows of each.

    ``folder`` (temporary) must outlive their use. Raises UserError naming every benchmark whose data cannot be used.
    """
    require_lm_eval()
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import env

    write_task_files(suite, folder, data_dir, limit)
    # lm-eval's full index takes about ten seconds to read.
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    loaded: list[Loaded] = []
    failures = []
    # lm-eval would compile a template for every row, which takes a hundred times as long as filling it in.
    with quiet(), patch.object(env, "from_string", functools.cache(env.from_string)):
        for benchmark in suite.benchmarks:
            try:
                tasks = list(manager.load([part.task for part in benchmark.expand()])["tasks"].values())
                one = Loaded(benchmark, tasks, _hash_data(suite.data_folder(data_dir), benchmark, tasks))
                loaded.append(one)
                if problem := _bad_data(one, limit):
                    failures.append(f"{benchmark.name} ({problem})")
                else:
                    one.chances = chance_scores(benchmark, one.tasks, limit)
            except UserError as error:
                failures.append(f"{benchmark.name} ({error})")
            except ConnectionError as error:
                # The other requests would time out as well.
                raise UserError(f"{one_line(error)}; {_TAKE_FILES}") from error
            except Exception as error:  # templates and functions of tasks read rows here, and may raise anything
                failures.append(f"{benchmark.name} ({benchmark.dataset}: {one_line(error)})")
    if failures:
        way_out = "fix the files, or fetch them anew" if suite.data_folder(data_dir) else _TAKE_FILES
        raise UserError(f"data of {len(failures)} benchmark(s) cannot be used; {way_out}: {', '.join(failures)}")
    return loaded


def write_task_files(suite: Suite, folder: Path, data_dir: Path | None, limit: int | None = None) -> None:
    """Write an lm-eval YAML file into ``folder`` for every task of the suite.

    It includes the stock file by its absolute path, because lm-eval does not find a relative one of its own files.
    """
    import lm_eval.tasks
    import yaml

    stock_folder = Path(lm_eval.tasks.__file__).parent
    data_folder = suite.data_folder(data_dir)
    folder.mkdir(parents=True, exist_ok=True)
    for benchmark in suite.benchmarks:
        root = stock_folder if benchmark.stock else suite.folder
        for part in benchmark.expand():
            if not (root / part.definition).is_file():
                raise UserError(
                    f"{benchmark.name}: task file {part.definition} is not in {root}; "
                    "the suites need the lm-eval named in constraints.txt"
                )
            task: dict[str, Any] = {"include": str(root / part.definition), "task": part.task}
            task |= {"num_fewshot": benchmark.shots}
            if benchmark.fewshot_split is None:
                # lm-eval reads the training split even when no example is shown; this spares the file.
                task |= {"training_split": None, "validation_split": None, "fewshot_split": None}
                task |= {"test_split": benchmark.eval_split}
            functions = "" if data_folder is None else _READER
            if data_folder is not None:
                splits = {s: str(data_file(data_folder, benchmark, part, s).resolve()) for s in benchmark.splits()}
                task |= {"dataset_kwargs": {"data_files": splits}}
            elif benchmark.revision is not None:
                task |= {"dataset_kwargs": {"revision": benchmark.revision}}
            if benchmark.lengths:
                functions = _MAKER
                how = {"stock": task["include"], "tokenizer": suite.tokenizer, "lengths": benchmark.lengths}
                how |= {"items": min(limit or benchmark.items, benchmark.items), "split": benchmark.eval_split}
                task["dataset_kwargs"] = task.get("dataset_kwargs", {}) | how
                task["metric_list"] = [{"metric": benchmark.metric, "aggregation": "mean", "higher_is_better": True}]
            text = functions + yaml.safe_dump(task, allow_unicode=True)
            (folder / f"{part.task}.yaml").write_text(text, encoding="utf-8")


def read_splits(data_files: dict[str, str], **_: Any) -> "dict[str, Dataset]":
    """The splits of one dataset, each from a file of JSON lines. lm-eval calls this for `datasets.load_dataset`.

    That takes a tenth of a second for each of some two hundred small files. Raises UserError for a file that cannot be
    read.
    """
    return {split: _read_lines(Path(file)) for split, file in data_files.items()}


def _read_lines(file: Path) -> "Dataset":
    from datasets import Dataset

    where = f"{file.parent.name}/{file.name}"
    # Not `splitlines`, which also splits at characters that JSON leaves in its strings.
    lines = enumerate(read_text(file).split("\n"), start=1)
    rows = [parse_json(line, f"{where}, line {number}") for number, line in lines if line.strip()]
    if not rows:
        raise UserError(f"{where} holds no rows")
    try:
        # A field that only some rows have is null elsewhere.
        fields = dict.fromkeys(field for row in rows for field in row)
        return Dataset.from_dict({field: [row.get(field) for row in rows] for field in fields})
    except (AttributeError, TypeError, ValueError) as error:  # pyarrow's errors are ValueErrors
        raise UserError(f"{where} does not hold rows of the same fields: {one_line(error)}") from error


def _hash_data(folder: Path | None, benchmark: Benchmark, tasks: "list[ConfigurableTask]") -> str:
    """SHA-256 of the local files of a benchmark, of what `datasets` knows of those from the Hub, or of made prompts."""
    if benchmark.lengths:
        seen: list[Any] = [task.dataset[benchmark.eval_split].to_list() for task in tasks]
    elif folder is None:
        splits = benchmark.splits()
        contents = [[task.config.task, split, task.dataset[split]._fingerprint] for task in tasks for split in splits]
        seen = [benchmark.dataset, benchmark.revision, contents]
    else:
        files = [
            data_file(folder, benchmark, part, split) for part in benchmark.expand() for split in benchmark.splits()
        ]
        seen = [[str(file.relative_to(folder)), sha256(file)] for file in files]
    return hashlib.sha256(json.dumps(seen).encode()).hexdigest()


def hash_definition(suite: Suite, benchmark: Benchmark) -> str | None:
    """SHA-256 of the files beside a benchmark's task files; None for lm-eval's own, which go with its version."""
    if benchmark.stock:
        return None
    folders = {(suite.folder / part.definition).parent for part in benchmark.expand()}
    files = sorted(file for folder in folders for file in folder.iterdir() if file.suffix in (".yaml", ".py"))
    return hashlib.sha256("".join(map(sha256, files)).encode()).hexdigest()


def _bad_data(loaded: Loaded, limit: int | None) -> str | None:
    """The fault of the first row or example that cannot be scored or shown, or None."""
    benchmark, shots = loaded.benchmark, loaded.benchmark.shots
    for part, task in zip(benchmark.expand(), loaded.tasks, strict=True):
        if problem := _bad_row(task, task.task_docs[:limit], task.config):
            return f"{part.config}/{benchmark.eval_split}: {problem}"
        examples = task.sampler.df if shots else []
        if len(examples) < shots:
            return f"{task.config.task} has {len(examples)} examples in {benchmark.fewshot_split}, {shots} are shown"
        if problem := _bad_row(task, examples[:], task.fewshot_cfg):
            return f"{part.config}/{benchmark.fewshot_split}: {problem}"
    return None


def _bad_row(task: "ConfigurableTask", rows: Any, config: Any) -> str | None:
    """The fault of the first of ``rows``, dicts or a dict of columns, that a task's ``config`` cannot read; or None."""
    for number, values in enumerate(rows_of(rows) if isinstance(rows, dict) else rows, start=1):
        # A prompt that needs a null cannot be built from a row without its nulls.
        row = {
            field: value
            for field, value in values.items()
            if value is not None and not (isinstance(value, list) and None in value)
        }
        try:
            problem = _unscorable(task, row, config)
        except Exception as error:  # templates and functions of tasks may raise anything
            problem = one_line(error)
        if problem:
            return f"row {number}: {problem}"
    return None


def _unscorable(task: "ConfigurableTask", row: dict[str, Any], config: Any) -> str | None:
    """Why lm-eval would score one row as wrong, whatever a model says; or None. Raises what lm-eval would raise."""
    text = task.doc_to_text(row, config.doc_to_text)
    label = text if task.multiple_input else task.doc_to_target(row, config.doc_to_target)
    if not task.multiple_input and not isinstance(text, str):
        return f"its question is {text!r}, which lm-eval does not take for text"
    if task.OUTPUT_TYPE != "multiple_choice" or not config.doc_to_choice:
        return None
    choices = task.doc_to_choice(row, config.doc_to_choice)
    if not choices or not all(isinstance(choice, str) for choice in choices):
        return f"its choices are {str(choices)[:80]}, not one text or more"
    labels = label if isinstance(label, list) else [label]
    if not labels or not all(0 <= one < len(choices) if isinstance(one, int) else one in choices for one in labels):
        return f"the answer {label!r} is none of the {len(choices)} choices"
    return None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the progress bars of data, and lm-eval's advice and warnings, such as one for every cut prompt."""
    import datasets

    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        logger.setLevel(level)
        datasets.enable_progress_bars()


def one_line(error: BaseException) -> str:
    """The kind of an error and the beginning of its message."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
