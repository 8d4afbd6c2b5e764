"""From a suite to lm-eval tasks: small YAML files that include lm-eval's own and change shots and data.

lm-eval's full index takes about ten seconds to read, so only the files of the suite are indexed.
"""

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moh_llm.errors import UserError
from moh_llm.evaluation.suite import Benchmark, Part, Suite

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask


@dataclass
class Loaded:
    """A benchmark with its lm-eval tasks, data read."""

    benchmark: Benchmark
    tasks: "list[ConfigurableTask]"


def require_lm_eval() -> None:
    """Raise UserError with the install command when lm-eval is absent."""
    try:
        import lm_eval  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "lm_eval":
            raise
        raise UserError('evaluation needs lm-eval: pip install "moh-llm[eval]"') from error


def data_file(data_dir: Path, benchmark: Benchmark, part: Part, split: str) -> Path:
    """Where a local data folder holds one split: ``<dataset, / as __>/<config>/<split>.jsonl``."""
    return data_dir / benchmark.dataset.replace("/", "__") / part.config / f"{split}.jsonl"


def check_data(suite: Suite, data_dir: Path | None) -> None:
    """Raise one UserError that names every benchmark whose local data is missing or empty.

    Nothing is checked when the suite reads from the Hub (no ``data_dir``, no data of its own).
    """
    folder = suite.data_folder(data_dir)
    if folder is None:
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
        raise UserError(f"data folder {folder} lacks {', '.join(lacking)}")


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
            if data_folder is not None:
                splits = {s: str(data_file(data_folder, benchmark, part, s).resolve()) for s in benchmark.splits()}
                # The cache lies with the task files: nothing stale is read, nothing is left behind.
                kwargs = {"data_files": splits, "cache_dir": str(folder / "cache")}
                task |= {"dataset_path": "json", "dataset_kwargs": kwargs}
            (folder / f"{part.task}.yaml").write_text(yaml.safe_dump(task, allow_unicode=True), encoding="utf-8")


def load_tasks(suite: Suite, folder: Path, data_dir: Path | None) -> list[Loaded]:
    """Make the suite's lm-eval tasks and read their data; ``folder`` (temporary) must outlive their use.

    Raises one UserError that names every benchmark whose data cannot be read.
    """
    require_lm_eval()
    check_data(suite, data_dir)
    import datasets
    from jinja2 import TemplateError
    from lm_eval.tasks import TaskManager

    write_task_files(suite, folder, data_dir)
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    loaded, failures = [], []
    unreadable = (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        RuntimeError,
        TemplateError,
        datasets.exceptions.DatasetsError,
    )
    with _quiet_data():
        for benchmark in suite.benchmarks:
            try:
                tasks = manager.load([part.task for part in benchmark.expand()])["tasks"]
            except unreadable as error:
                if isinstance(error, ConnectionError):
                    # The next thirteen would each wait for the network as long as this one did.
                    raise UserError(f"{_first_line(error)}; give the data as files with --data-dir") from error
                failures.append(f"{benchmark.name} ({benchmark.dataset}: {_first_line(error)})")
                continue
            loaded.append(Loaded(benchmark, list(tasks.values())))
            failures += [f"{benchmark.name} ({problem})" for problem in _too_few_examples(loaded[-1])]
    if failures:
        way_out = "mend the files" if suite.data_folder(data_dir) else "give the data as files with --data-dir"
        raise UserError(f"data of {len(failures)} benchmark(s) cannot be used; {way_out}: {', '.join(failures)}")
    return loaded


def _too_few_examples(loaded: Loaded) -> list[str]:
    """What is wrong with the few-shot pools, task by task."""
    shots = loaded.benchmark.shots
    return [
        f"{task.config.task} has {len(task.sampler.df)} examples in {loaded.benchmark.fewshot_split}, {shots} are shown"
        for task in loaded.tasks
        if shots > 0 and len(task.sampler.df) < shots
    ]


@contextlib.contextmanager
def _quiet_data() -> Iterator[None]:
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
