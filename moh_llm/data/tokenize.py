"""Tokenise a mixture once, into shards that training maps into memory.

The record, OUTPUT/mixture.json, holds per source the counts, text and shards. It is written last;
`moh_llm.data.tasks` has the layout of the folder and resuming.
"""

import contextlib
import json
import multiprocessing
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from datetime import datetime, timezone
from functools import partial
from math import ceil
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tqdm import tqdm

from moh_llm import __version__
from moh_llm.data.mixture import Mixture, Source
from moh_llm.data.tasks import Task, TaskWriter, is_done, make_tasks, prepare_sources
from moh_llm.data.tokenizer import TextTokenizer
from moh_llm.errors import UserError, reason
from moh_llm.files import check_place, write_json
from moh_llm.locking import INSIDE, lock_folder
from moh_llm.records.tokens import (
    MIXTURE_RECORD,
    SPLITS,
    ShardRecord,
    SourceRecord,
    TaskRecord,
    TokenizerRecord,
    TokensRecord,
)

_RECORDED = ("weight", "max_epochs", "hub", "revision", "match", "builtin", "format", "text_field", "filters")
_BYTES_PER_WORKER = 4 << 20  # a further process takes as long to start as this much text
# Threads of one process share the vocabulary in the caches, which two processes do not; the Python of one process keeps
# about this many busy.
_CORES_PER_WORKER = 4
_SECONDS = 0.5  # between two updates of the progress bar


def tokenize_mixture(
    mixture: Mixture,
    tokenizer: TextTokenizer,
    output: Path,
    *,
    workers: int | None = None,
    executor: str = "local",
    executor_args: Mapping[str, str] | None = None,
    skip_bad: bool = False,
    overwrite: bool = False,
) -> TokensRecord | None:
    """Write the mixture's shards, or what is left of them, and return the record (`OUTPUT/mixture.json`).

    Args:
        mixture: the sources; a change of weights alone writes the record and no shard.
        tokenizer: what text is tokenised with.
        output: folder of the shards.
        workers: processes at once; None: one per four cores, or all of a cluster's.
        executor: ``local``, ``slurm`` or ``ray``.
        executor_args: keywords of datatrove's executor (for Slurm at least time and partition).
        skip_bad: leave bad records out and count them, instead of stopping.
        overwrite: tokenise a source again that was made from other text or with other settings.

    Returns:
        The record; None where the jobs were submitted to Slurm.

    Raises:
        UserError: unreadable text, a folder that holds something else or is being written, or an error of the disk.
    """
    started = time.perf_counter()
    check_place(output)
    output = Path(os.path.realpath(output))
    options = {name: _value(text) for name, text in (executor_args or {}).items()}
    with lock_folder(output):
        _check_output(output)
        tasks = make_tasks(mixture, output)
        prepare_sources(tasks, tokenizer, mixture.validation_share, overwrite)
        chats = any(source.type != "text" for source in mixture.sources)
        finish = partial(write_record, mixture, tasks, output, tokenizer.record(chats))
        # The largest first, so that none is left to the end alone.
        if left := sorted((task for task in tasks if not is_done(task)), key=lambda task: -(task.bytes or 0)):
            write_json(output / MIXTURE_RECORD, {"status": "running"})
            workers, threads = _count_workers(left, workers, executor, options)
            write = TaskWriter(tokenizer, mixture.validation_share, skip_bad, threads)
            with _progress_bar(left):
                if executor == "local":
                    _run_here(write, left, workers)
                else:
                    _run_on_cluster(executor, write, left, finish, workers, output / "logs", options)
            if executor == "slurm":
                return None
        return finish(time.perf_counter() - started)


def _check_output(output: Path) -> None:
    if output.exists() and not output.is_dir():
        raise UserError(f"--output {output} is a file; name a folder")
    try:
        held = [path for path in output.iterdir() if path.name != INSIDE] if output.is_dir() else []
    except OSError as error:
        raise UserError(f"--output {output} cannot be read: {error.strerror}; name another folder") from error
    ours = (output / MIXTURE_RECORD).exists() or any(output.glob("*/source.json"))  # the record may not be written yet
    if held and not ours:
        raise UserError(f"--output {output} is not empty and holds no {MIXTURE_RECORD}; name another folder")


def _count_workers(
    tasks: Sequence[Task], wanted: int | None, executor: str, options: Mapping[str, Any]
) -> tuple[int, int | None]:
    """Processes at once (-1: as many as the cluster gives), and the tokenizer's threads in each (None: all cores)."""
    if executor != "local":
        return wanted or -1, options.get("cpus_per_task", 1)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    sizes = [task.bytes for task in tasks]
    worth = len(tasks) if None in sizes else ceil(sum(size or 0 for size in sizes) / _BYTES_PER_WORKER)
    workers = max(1, min(wanted or ceil(cores / _CORES_PER_WORKER), len(tasks), worth))
    return workers, None if workers == 1 else max(1, cores // workers)


def _run_here(write: TaskWriter, tasks: Sequence[Task], workers: int) -> None:
    """Do the tasks in this process or in several.

    datatrove's local executor does not serve: it waits for ever if the system kills a process, as when memory is short.
    """
    if workers == 1:
        for task in tasks:
            write(task)
        return
    # The processes are forked from a server that has imported what they need.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "datatrove.pipeline.tokens.tokenizer"])
    alive, parent = context.Pipe(duplex=False)
    with ProcessPoolExecutor(workers, context, _start_worker, (write, alive)) as pool:
        try:
            for done in as_completed([pool.submit(_do, task) for task in tasks]):
                done.result()
        except BaseException as error:
            parent.close()  # the others need not go on
            if isinstance(error, BrokenProcessPool):
                raise UserError("the system killed a process; if memory is short, give fewer --workers") from error
            raise


_write: TaskWriter  # of a process of the pool, which gets it once and not with each task


def _start_worker(write: TaskWriter, alive: Connection) -> None:
    global _write
    _write = write
    threading.Thread(target=_end_with_parent, args=(alive,), daemon=True).start()


def _end_with_parent(alive: Connection) -> None:
    """End this process when its parent closes the pipe or is killed; a pool's processes would work on."""
    with contextlib.suppress(EOFError):
        alive.recv()
    os._exit(1)


def _do(task: Task) -> None:
    _write(task)


class _Step:
    """A step of a datatrove pipeline: rank r calls the function with argument r."""

    def __init__(self, function: Callable[[Any], Any], arguments: Sequence[Any]):
        self.function, self.arguments = function, arguments

    def __call__(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        self.function(self.arguments[rank])


def _run_on_cluster(
    executor: str,
    write: TaskWriter,
    tasks: Sequence[Task],
    finish: Callable[[float | None], TokensRecord],
    workers: int,
    logs: Path,
    options: Mapping[str, Any],
) -> None:
    """Run the tasks by a datatrove executor: wait for Ray, or submit them, and then `finish`, as jobs of Slurm."""
    from datatrove.executor import RayPipelineExecutor, SlurmPipelineExecutor

    logs = logs / datetime.now().strftime("%Y%m%d-%H%M%S-%f")  # datatrove skips tasks that its logs call done
    steps = [_Step(write, tasks)]
    given = {"tasks": len(tasks), "workers": workers, "logging_dir": f"{logs}/shards"}
    try:
        if executor == "slurm":
            options = {"job_name": "moh-llm-tokenize", **options}
            shards = SlurmPipelineExecutor(steps, **given, **options)
            record = [_Step(finish, [None])]
            SlurmPipelineExecutor(record, tasks=1, logging_dir=f"{logs}/record", depends=shards, **options).run()
        else:
            import ray

            job = RayPipelineExecutor(steps, **given, **options)
            if not ray.is_initialized():
                ray.init(log_to_driver=False)  # RAY_ADDRESS names the cluster; without it, this machine
            job.run()
    except ImportError as error:
        raise UserError(f"--executor {executor} needs {error.name}; pip install {error.name}") from error
    except (TypeError, OSError, subprocess.CalledProcessError) as error:  # a keyword, no sbatch, what sbatch refuses
        raise UserError(
            f"--executor {executor}: {reason(error)}; --executor-args KEY=VALUE gives keywords of datatrove's executor"
        ) from error


def _value(text: str) -> Any:
    """A value of ``--executor-args``: JSON, or else a text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def write_record(
    mixture: Mixture, tasks: Sequence[Task], output: Path, tokenizer: TokenizerRecord, seconds: float | None = None
) -> TokensRecord:
    """Write `OUTPUT/mixture.json` from the tasks' records.

    Raises:
        UserError: a task is not done, or a source holds no text.
    """
    for task in tasks:
        if not is_done(task):
            raise UserError(
                f"source {task.source.name}, part {task.number} was not tokenised; {output / 'logs'} says why; give "
                "the same command again when that is corrected"
            )
    sources = {
        source.name: _source_record(source, [t for t in tasks if t.source.name == source.name])
        for source in mixture.sources
    }
    record = TokensRecord(
        status="finished",
        name=mixture.name,
        validation_share=mixture.validation_share,
        tokenizer=tokenizer,
        tokens=sum(source.tokens for source in sources.values()),
        sources=sources,
        seconds=None if seconds is None else round(seconds, 3),
        written=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        moh_llm=__version__,
    )
    record.write(output / MIXTURE_RECORD)
    return record


def _source_record(source: Source, tasks: Sequence[Task]) -> SourceRecord:
    done = [TaskRecord.read(task.record) for task in tasks]
    sums = {
        name: sum(getattr(record, name) for record in done)
        for name in ("documents", "tokens", "bytes", "empty", "filtered", "bad")
    }
    if not sums["documents"]:
        left_out = f"{sums['filtered']} records were filtered out, {sums['bad']} bad"
        raise UserError(f"source {source.name} holds no text ({left_out})")
    # The location of the text is in `text`, by names without passwords, which addresses can hold.
    spec = {name: value for name in _RECORDED if (value := getattr(source, name)) not in (None, (), {})}
    if source.type != "text":
        spec |= {"type": source.type, "chat_date": source.chat_date}
    return SourceRecord(
        **spec,
        **sums,
        tokens_per_byte=round(sums["tokens"] / sums["bytes"], 5),
        bad_examples=[example for record in done for example in record.bad_examples][:5],
        seconds=round(sum(record.seconds for record in done), 3),
        text=[file.record() for task in tasks for file in task.files],
        shards={
            split: [
                ShardRecord(file=task.shard(split).name, **record.splits[split].content())
                for task, record in zip(tasks, done, strict=True)
                if split in record.splits
            ]
            for split in SPLITS
        },
    )


@contextlib.contextmanager
def _progress_bar(tasks: Sequence[Task]) -> Iterator[None]:
    """A bar over the stored bytes of the tasks, from the files that they leave, whichever process does them."""
    stop = threading.Event()

    def follow() -> None:
        with tqdm(total=sum(task.bytes or 0 for task in tasks), desc="tokenize", unit="B", unit_scale=True) as bar:
            last = False
            while not last:
                last = stop.wait(_SECONDS)
                bar.update(max(0, sum(map(_bytes_read, tasks)) - bar.n))

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _bytes_read(task: Task) -> int:
    if task.record.exists():
        return task.bytes or 0
    try:
        return int(task.progress.read_text())
    except (OSError, ValueError):
        return 0
