"""Tokenise a mixture once, into shards that training maps into memory; `moh_llm.data.tasks` has the layout."""

import contextlib
import multiprocessing
import os
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from datetime import datetime
from functools import partial
from math import ceil
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tqdm import tqdm

from moh_llm.data.mixture import Mixture
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
    Split,
    TaskRecord,
    TokenizerRecord,
    TokensRecord,
)


def tokenize_mixture(
    mixture: Mixture,
    tokenizer: TextTokenizer,
    output: Path,
    *,
    workers: int | None = None,
    executor: str = "local",
    executor_args: Mapping[str, Any] | None = None,
) -> TokensRecord | None:
    """Write the mixture's shards, or what is left of them, and return the record (`OUTPUT/mixture.json`).

    Args:
        mixture, tokenizer, output: a change of the mixture's weights alone writes the record and no shard.
        workers: processes at once; None: one per four cores, or all of a cluster's.
        executor: ``local``, ``slurm`` or ``ray``.
        executor_args: keywords of datatrove's executor (for Slurm at least time and partition).

    Returns None where the jobs were submitted to Slurm.

    Raises:
        UserError: unreadable text, a folder that holds something else or is being written, or an error of the disk.
    """
    check_place(output)
    output = Path(os.path.realpath(output))
    options = executor_args or {}
    with lock_folder(output):
        held = [path for path in output.iterdir() if path.name != INSIDE] if output.exists() else []
        # The record is written last: a run that was killed left sources without it.
        if held and not (output / MIXTURE_RECORD).exists() and not any(output.glob("*/source.json")):
            raise UserError(f"--output-dir {output} is not empty and holds no {MIXTURE_RECORD}; name another folder")
        tasks = make_tasks(mixture, output)
        prepare_sources(tasks, tokenizer, mixture.validation_share)
        chats = any(source.type != "text" for source in mixture.sources)
        finish = partial(write_record, mixture, tasks, output, tokenizer.record(chats))
        # The largest first, so that none is left to the end alone.
        if left := sorted((task for task in tasks if not is_done(task)), key=lambda task: -task.bytes):
            write_json(output / MIXTURE_RECORD, {"status": "running"})
            write = TaskWriter(tokenizer, mixture.validation_share)
            if executor == "local":
                # The tokenizer has threads; the Python of one process keeps about four busy.
                cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
                _run_here(write, left, min(workers or ceil(cores / 4), len(left)))
            else:
                # -1: as many processes as the cluster gives.
                _run_on_cluster(executor, write, left, finish, workers or -1, output / "logs", options)
            if executor == "slurm":
                return None
        return finish()


def _run_here(write: TaskWriter, tasks: Sequence[Task], workers: int) -> None:
    """Do the tasks in this process or in several.

    datatrove's local executor does not serve: it waits for ever if the system kills a process, as when memory is short.
    """
    bar = partial(tqdm, total=len(tasks), desc="tokenize", unit="task", disable=None)
    if workers == 1:
        for task in bar(tasks):
            write(task)
        return
    # The processes are forked from a server that has imported what they need.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "datatrove.pipeline.tokens.tokenizer"])
    alive, parent = context.Pipe(duplex=False)
    with ProcessPoolExecutor(workers, context, _start_worker, (write, alive)) as pool:
        try:
            for done in bar(as_completed([pool.submit(_do, task) for task in tasks])):
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
    """A step of a datatrove pipeline: rank r makes call r."""

    def __init__(self, calls: Sequence[Callable[[], Any]]):
        self.calls = calls

    def __call__(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        self.calls[rank]()


def _run_on_cluster(
    executor: str,
    write: TaskWriter,
    tasks: Sequence[Task],
    finish: Callable[[], TokensRecord],
    workers: int,
    logs: Path,
    options: Mapping[str, Any],
) -> None:
    """Run the tasks by a datatrove executor: wait for Ray, or submit them, and then `finish`, as jobs of Slurm."""
    from datatrove.executor import RayPipelineExecutor, SlurmPipelineExecutor

    logs = logs / datetime.now().strftime("%Y%m%d-%H%M%S-%f")  # datatrove skips tasks that its logs call done
    steps = [_Step([partial(write, task) for task in tasks])]
    given = {"tasks": len(tasks), "workers": workers, "logging_dir": f"{logs}/shards"}
    try:
        if executor == "slurm":
            options = {"job_name": "moh-llm-tokenize", **options}
            shards = SlurmPipelineExecutor(steps, **given, **options)
            record = [_Step([finish])]
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


def write_record(mixture: Mixture, tasks: Sequence[Task], output: Path, tokenizer: TokenizerRecord) -> TokensRecord:
    """Write `OUTPUT/mixture.json` from the tasks' records.

    Raises:
        UserError: a task is not done, or a source holds no text.
    """
    sources = {}
    for source in mixture.sources:
        own = [task for task in tasks if task.source.name == source.name]
        if missing := next((task for task in own if not is_done(task)), None):
            raise UserError(
                f"source {source.name}, part {missing.number} was not tokenised; {output / 'logs'} says why; give the "
                "same command again when that is corrected"
            )
        shards: dict[Split, list[ShardRecord]] = {split: [] for split in SPLITS}
        for task in own:
            for split, entry in TaskRecord.read(task.record).splits.items():
                shards[split].append(ShardRecord(file=task.shard(split).name, **entry.content()))
        every = [shard for found in shards.values() for shard in found]
        if not every:
            raise UserError(f"source {source.name} holds no text")
        sources[source.name] = SourceRecord(
            weight=source.weight,
            documents=sum(shard.documents for shard in every),
            tokens=sum(shard.tokens for shard in every),
            text=[file.record() for task in own for file in task.files],
            shards=shards,
        )
    record = TokensRecord(
        status="finished",
        name=mixture.name,
        validation_share=mixture.validation_share,
        tokenizer=tokenizer,
        tokens=sum(source.tokens for source in sources.values()),
        sources=sources,
    )
    record.write(output / MIXTURE_RECORD)
    return record
