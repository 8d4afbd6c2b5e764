"""From a suite to lm-eval tasks: small YAML files that include lm-eval's own and change shots and data.

lm-eval's full index takes about ten seconds to read, so only the files of the suite are indexed.
"""

import contextlib
import hashlib
import importlib.util
import json
import logging
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moh_llm import __version__
from moh_llm.errors import UserError
from moh_llm.evaluation.chance import chances_of
from moh_llm.evaluation.converters import load_sources
from moh_llm.evaluation.definitions import hash_definitions, unknown_names
from moh_llm.evaluation.rows import find_bad_row, find_null, templates_compiled_once
from moh_llm.evaluation.statistics import Strata
from moh_llm.evaluation.suite import Benchmark, Part, Suite
from moh_llm.files import sha256

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks import TaskManager

_TAKE_FILES = "give the data as files with --data-dir (moh-llm data fetch-benchmarks makes them)"
_READER = "custom_dataset: !function moh_llm.evaluation.rows.read_splits\n"


@dataclass
class Loaded:
    """A benchmark with its lm-eval tasks, data read."""

    benchmark: Benchmark
    tasks: "list[ConfigurableTask]"
    data: str
    """SHA-256 of what was read: of the local files, or of the Hub's dataset by name, commit and contents."""
    definition: str | None = None
    """SHA-256 of the files that define a suite's own tasks; None where they are lm-eval's."""
    chances: Strata | None = None
    """What guessing scores on each item that is scored; None where the suite names no chance rule."""

    def items(self, limit: int | None) -> int:
        """How many items are scored, of at most ``limit`` in each task."""
        return sum(items_of(task, limit) for task in self.tasks)


def items_of(task: "ConfigurableTask", limit: int | None) -> int:
    """How many items of one task are scored."""
    return len(task.task_docs) if limit is None else min(limit, len(task.task_docs))


def require_lm_eval() -> None:
    """Raise UserError with the install command when lm-eval is absent."""
    try:
        import lm_eval  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "lm_eval":
            raise
        raise UserError('evaluation needs lm-eval: pip install "moh-llm[eval]"') from error


def installed_versions() -> dict[str, str]:
    """The versions that scores depend on."""
    names = {"torch": "torch", "transformers": "transformers", "lm_eval": "lm-eval", "datasets": "datasets"}
    return {
        "moh_llm": __version__,
        **{name: metadata.version(package) for name, package in names.items()},
        "python": platform.python_version(),
    }


def data_file(data_dir: Path, benchmark: Benchmark, part: Part, split: str) -> Path:
    """Where a local data folder holds one split: ``<dataset, / as __>/<config>/<split>.jsonl``."""
    return data_dir / benchmark.dataset.replace("/", "__") / part.config / f"{split}.jsonl"


def check_data(suite: Suite, data_dir: Path | None) -> None:
    """Raise one UserError that names every benchmark whose local data is missing or empty.

    From the Hub (no ``data_dir``, no data of the suite's own), that names those which it serves by script.
    """
    folder = suite.data_folder(data_dir)
    if folder is None:
        if scripts := [benchmark.name for benchmark in suite.benchmarks if benchmark.dataset in load_sources()]:
            raise UserError(
                f"{', '.join(scripts)} cannot be read from the Hub, where a loading script serves them: "
                "moh-llm data fetch-benchmarks DIR makes files of them and all others; then pass --data-dir DIR"
            )
        return
    if not folder.is_dir():
        raise UserError(f"--data-dir {folder} is not a folder")
    lacking = []
    for benchmark in suite.benchmarks:
        files = [data_file(folder, benchmark, part, s) for part in benchmark.expand() for s in benchmark.splits()]
        missing = [file for file in files if not file.is_file() or file.stat().st_size == 0]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            lacking.append(f"{benchmark.name} ({missing[0].relative_to(folder)}{more})")
    if lacking:
        raise UserError(
            f"data folder {folder} lacks {', '.join(lacking)}; moh-llm data fetch-benchmarks makes such a folder"
        )


def write_task_files(suite: Suite, folder: Path, data_dir: Path | None) -> None:
    """Write one lm-eval YAML into ``folder`` for every task of the suite.

    The stock file is included by its absolute path: lm-eval does not register a relative include of
    its own files.
    """
    import lm_eval.tasks
    import yaml

    stock_folder = Path(lm_eval.tasks.__file__).parent
    data_folder = suite.data_folder(data_dir)
    folder.mkdir(parents=True, exist_ok=True)
    for benchmark in suite.benchmarks:
        for part in benchmark.expand():
            root = stock_folder if benchmark.stock else suite.folder
            if not (root / part.definition).is_file():
                raise UserError(
                    f"{benchmark.name}: task file {part.definition} is not in {root}; "
                    "the suites go with the lm-eval named in constraints.txt"
                )
            task: dict[str, Any] = {
                "include": str(root / part.definition),
                "task": part.task,
                "num_fewshot": benchmark.shots,
            }
            if benchmark.fewshot_split is None:
                # lm-eval reads the training split even when no example is shown; this spares the file.
                task |= {"training_split": None, "validation_split": None, "fewshot_split": None}
                task |= {"test_split": benchmark.eval_split}
            text = ""
            if data_folder is not None:
                splits = {s: str(data_file(data_folder, benchmark, part, s).resolve()) for s in benchmark.splits()}
                task |= {"dataset_kwargs": {"data_files": splits}}
                text = _READER
            elif benchmark.revision is not None:
                task |= {"dataset_kwargs": {"revision": benchmark.revision}}
            text += yaml.safe_dump(task, allow_unicode=True)
            (folder / f"{part.task}.yaml").write_text(text, encoding="utf-8")


def load_tasks(suite: Suite, folder: Path, data_dir: Path | None, limit: int | None = None) -> list[Loaded]:
    """Make the suite's lm-eval tasks, read their data and look at the rows that ``limit`` leaves.

    ``folder`` (temporary) must outlive their use. Raises one UserError that names every benchmark whose metric or
    filter its task lacks, or else whose data cannot be used.
    """
    require_lm_eval()
    check_data(suite, data_dir)
    from lm_eval.tasks import TaskManager

    _defer("rouge_score", "rouge_scorer")
    write_task_files(suite, folder, data_dir)
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    loaded: list[Loaded] = []
    unknown, failures = [], []
    with quiet_data(), templates_compiled_once():
        for benchmark in suite.benchmarks:
            try:
                loaded.append(_load(manager, suite, benchmark, data_dir))
                names = unknown_names(benchmark, loaded[-1].tasks)[:1]
                unknown += [f"{benchmark.name} ({name})" for name in names]
                problems = _too_few_examples(loaded[-1]) or _bad_rows(loaded[-1], limit)
                failures += [f"{benchmark.name} ({problem})" for problem in problems[:1]]
                if not names and not problems:
                    loaded[-1].chances = chances_of(benchmark, loaded[-1].tasks, limit)
            except UserError as error:
                failures.append(f"{benchmark.name} ({error})")
            except ConnectionError as error:
                # The next thirteen would each wait for the network as long as this one did.
                raise UserError(f"{_first_line(error)}; {_TAKE_FILES}") from error
            except Exception as error:
                # Templates and functions of tasks meet rows here, and may raise anything.
                where = _null_row(suite, benchmark, data_dir)
                failures.append(f"{benchmark.name} ({benchmark.dataset}: {_first_line(error)}{where})")
    if unknown:
        raise UserError(f"suite {suite.name} asks for what its tasks do not have; mend the suite: {', '.join(unknown)}")
    if failures:
        way_out = "mend the files" if suite.data_folder(data_dir) else _TAKE_FILES
        raise UserError(f"data of {len(failures)} benchmark(s) cannot be used; {way_out}: {', '.join(failures)}")
    return loaded


def _defer(package: str, name: str) -> None:
    """Have a module imported when something of it is used.

    What lm-eval has beside TruthfulQA's choices scores text by ROUGE; importing that takes a second (nltk, scipy).
    """
    if f"{package}.{name}" in sys.modules:
        return  # a search for its spec would import one that is deferred
    spec = importlib.util.find_spec(f"{package}.{name}") if importlib.util.find_spec(package) else None
    if spec is None or spec.loader is None:
        return
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # An import of a name that its package has already asks for no more of it.
    setattr(sys.modules[package], name, module)


def _load(manager: "TaskManager", suite: Suite, benchmark: Benchmark, data_dir: Path | None) -> Loaded:
    tasks = manager.load([part.task for part in benchmark.expand()])["tasks"]
    own = None if benchmark.stock else hash_definitions(suite.folder / part.definition for part in benchmark.expand())
    return Loaded(benchmark, list(tasks.values()), _digest(suite, benchmark, data_dir, tasks), own)


def _null_row(suite: Suite, benchmark: Benchmark, data_dir: Path | None) -> str:
    """The first null in a benchmark's local files, the likeliest cause of an error that names no row; or nothing."""
    folder = suite.data_folder(data_dir)
    for part in benchmark.expand() if folder else ():
        if null := find_null({s: str(data_file(folder, benchmark, part, s)) for s in benchmark.splits()}):
            return f"; {part.config}: {null}"
    return ""


def _too_few_examples(loaded: Loaded) -> list[str]:
    """What is wrong with the few-shot pools, task by task."""
    shots = loaded.benchmark.shots
    return [
        f"{task.config.task} has {len(task.sampler.df)} examples in {loaded.benchmark.fewshot_split}, {shots} are shown"
        for task in loaded.tasks
        if shots > 0 and len(task.sampler.df) < shots
    ]


def _bad_rows(loaded: Loaded, limit: int | None) -> list[str]:
    """What is wrong with rows, task by task."""
    benchmark = loaded.benchmark
    found = (
        (part.config, find_bad_row(task, limit)) for part, task in zip(benchmark.expand(), loaded.tasks, strict=True)
    )
    return [f"{config}/{benchmark.eval_split}: {problem}" for config, problem in found if problem]


def _digest(suite: Suite, benchmark: Benchmark, data_dir: Path | None, tasks: "dict[str, ConfigurableTask]") -> str:
    """SHA-256 of the local files of a benchmark, or of what `datasets` knows of those from the Hub."""
    folder = suite.data_folder(data_dir)
    if folder is None:
        contents = [
            [task.config.task, split, task.dataset[split]._fingerprint]
            for task in tasks.values()
            for split in benchmark.splits()
        ]
        seen: list[Any] = [benchmark.dataset, benchmark.revision, contents]
    else:
        files = [
            data_file(folder, benchmark, part, split) for part in benchmark.expand() for split in benchmark.splits()
        ]
        seen = [[str(file.relative_to(folder)), sha256(file)] for file in files]
    return hashlib.sha256(json.dumps(seen).encode()).hexdigest()


@contextlib.contextmanager
def quiet_data() -> Iterator[None]:
    """Read data without a sound: no bars, no advice about stock files, no call home for each local file.

    `datasets` counts every load, local ones too, by a request to the Hub: behind a firewall that drops
    packets, a few hundred files would each wait for its time-out.
    """
    import datasets

    logger = logging.getLogger("lm_eval")
    level, bars, counts = logger.level, datasets.is_progress_bar_enabled(), datasets.config.HF_UPDATE_DOWNLOAD_COUNTS
    logger.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    try:
        yield
    finally:
        logger.setLevel(level)
        datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = counts
        if bars:
            datasets.enable_progress_bars()


def _first_line(error: BaseException) -> str:
    """An error as one line. A dataset that needs a loading script is spelt out."""
    text = " ".join(str(error).split())
    if "scripts are no longer supported" in text:
        return "a script dataset, which `datasets` no longer loads from the Hub"
    return f"{type(error).__name__}: {text[:200]}"
