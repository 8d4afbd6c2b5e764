"""Executors of tokenising: this process, several processes, Slurm or Ray, through datatrove."""

import contextlib
import inspect
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import multiprocess
from datatrove.executor.local import LocalPipelineExecutor
from datatrove.pipeline.base import PipelineStep
from datatrove.utils.stats import PipelineStats
from loguru import logger
from tokenizers import Tokenizer

from moh_llm.data.chat import ChatTemplate
from moh_llm.data.tasks import Task, write_task
from moh_llm.data.tokenizer import TextTokenizer
from moh_llm.errors import UserError


@lru_cache(maxsize=1)
def _tokenizer(
    path: str, written: int, end: int | None, name: str, chat: ChatTemplate | None, rows: int | None
) -> TextTokenizer:
    """Read once for all tasks of a process, and again when the file changes."""
    return TextTokenizer(Tokenizer.from_file(path), end, name, chat, rows)


class WriteShards(PipelineStep):
    """The pipeline: rank r carries out task r.

    Args:
        tasks: those to do.
        tokenizer: file of the tokenizer; `end`, `tokenizer_name`, `chat` and `rows` go with it (see `TextTokenizer`).
        validation_share: share of held-out documents.
        skip_bad: whether bad records are left out and counted.
        threads: of the tokenizer in each process; None: this process's own setting.
    """

    type, name = "TOKENIZER", "shards of token ids"

    def __init__(
        self,
        tasks: Sequence[Task],
        tokenizer: Path,
        end: int | None,
        tokenizer_name: str,
        chat: ChatTemplate | None,
        rows: int | None,
        validation_share: float,
        skip_bad: bool,
        threads: int | None,
    ):
        super().__init__()
        self.tasks, self.tokenizer, self.end, self.tokenizer_name = list(tasks), tokenizer, end, tokenizer_name
        self.chat, self.rows = chat, rows
        self.validation_share, self.skip_bad, self.threads = validation_share, skip_bad, threads

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        """Carry out task `rank`."""
        if self.threads is not None:
            # Even for one: without its thread pool the library is a fifth slower.
            os.environ |= {"TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": str(self.threads)}
        written = self.tokenizer.stat().st_mtime_ns
        tokenizer = _tokenizer(str(self.tokenizer), written, self.end, self.tokenizer_name, self.chat, self.rows)
        write_task(self.tasks[rank], tokenizer, self.validation_share, self.skip_bad)


class Call(PipelineStep):
    """A step of one task that calls a function, after all shards are written."""

    type, name = "TOKENIZER", "record"

    def __init__(self, function: Callable[[], Any]):
        super().__init__()
        self.function = function

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        """Call it."""
        self.function()


class _QuietExecutor(LocalPipelineExecutor):
    """Processes of this machine, without datatrove's log on the terminal."""

    def _run_for_rank(self, rank: int, local_rank: int = 0, node_rank: int = -1) -> PipelineStats:
        logger.disable("datatrove")
        return super()._run_for_rank(rank, local_rank, node_rank)


def run_local(step: WriteShards, workers: int, logs: Path) -> None:
    """Carry out all tasks in `workers` processes, or in this one."""
    if workers == 1:
        for rank in range(len(step.tasks)):
            step.run(rank=rank, world_size=len(step.tasks))
        return
    # The processes are forked from a server that has imported what they need.
    multiprocess.get_context("forkserver").set_forkserver_preload([__name__, "datatrove.pipeline.tokens.tokenizer"])
    with _quiet():
        _QuietExecutor([step], tasks=len(step.tasks), workers=workers, logging_dir=str(logs)).run()
    # Nothing is in the logs that the tasks' records lack.
    shutil.rmtree(logs, ignore_errors=True)
    with contextlib.suppress(OSError):
        logs.parent.rmdir()


def run_ray(step: WriteShards, workers: int, logs: Path, options: Mapping[str, Any]) -> None:
    """Carry out all tasks on a Ray cluster, and wait for it."""
    try:
        import ray
    except ImportError as error:
        raise UserError("--executor ray needs Ray; pip install ray") from error
    from datatrove.executor.ray import RayPipelineExecutor

    checked = check_options(RayPipelineExecutor, options)
    if not ray.is_initialized():
        ray.init(log_to_driver=False)  # RAY_ADDRESS names the cluster; without it, this machine
    with _quiet():
        RayPipelineExecutor([step], tasks=len(step.tasks), workers=workers, logging_dir=str(logs), **checked).run()


def submit_slurm(
    step: WriteShards, finish: Callable[[], Any], workers: int, logs: Path, options: Mapping[str, Any]
) -> None:
    """Submit all tasks to Slurm as an array job, and `finish` as a job that waits for it."""
    from datatrove.executor.slurm import SlurmPipelineExecutor

    checked = check_options(SlurmPipelineExecutor, options)
    if missing := {"time", "partition"} - checked.keys():
        raise UserError(
            f"--executor slurm needs {' and '.join(f'{m}=...' for m in sorted(missing))} in --executor-args"
        )
    if shutil.which("sbatch") is None:
        raise UserError("--executor slurm: no sbatch here; start it on a machine that submits Slurm jobs")
    common = {"job_name": "moh-llm-tokenize"} | checked
    shards = SlurmPipelineExecutor(
        [step], tasks=len(step.tasks), workers=workers, logging_dir=str(logs / "shards"), **common
    )
    record = SlurmPipelineExecutor([Call(finish)], tasks=1, logging_dir=str(logs / "record"), depends=shards, **common)
    try:
        record.run()
    except subprocess.CalledProcessError as error:
        raise UserError(
            "--executor slurm: sbatch refused a job and says above why; change --executor-args (mem_per_cpu_gb and "
            "cpus_per_task say what a task asks for)"
        ) from error


def new_log_folder(output: Path) -> Path:
    """A new folder for datatrove's logs and its records of finished tasks."""
    return output / "logs" / datetime.now().strftime("%Y%m%d-%H%M%S-%f")


def check_options(executor: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """``--executor-args`` as keywords of a datatrove executor, each of the type that it declares."""
    ours = {"self", "pipeline", "tasks", "workers", "logging_dir", "depends", "skip_completed"}
    known = {name: p for name, p in inspect.signature(executor.__init__).parameters.items() if name not in ours}
    checked: dict[str, Any] = {}
    for name, text in options.items():
        if name not in known:
            raise UserError(f"--executor-args: unknown {name!r}; known are {', '.join(sorted(known))}")
        default = known[name].default
        kind = type(default) if isinstance(default, bool | int | float) else str
        if known[name].annotation in (float, "float"):  # 2 is a default of some
            kind = float
        try:
            checked[name] = text.lower() in ("1", "true", "yes") if kind is bool else kind(text)
        except ValueError as error:
            raise UserError(f"--executor-args: {name}={text} must be a number") from error
    return checked


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    logger.disable("datatrove")
    try:
        yield
    finally:
        logger.enable("datatrove")
