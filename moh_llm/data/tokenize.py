"""Tokenise a mixture once, into shards that training maps into memory.

The record, OUTPUT/mixture.json, says per source what was read and what came of it; layout and
resuming are those of `moh_llm.data.tasks`. It is written last.
"""

import os
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

from moh_llm import __version__
from moh_llm.data.executors import WriteShards, new_log_folder, run_local, run_ray, submit_slurm
from moh_llm.data.mixture import Mixture, Source
from moh_llm.data.progress import show_progress
from moh_llm.data.tasks import RECORD, SPLITS, TOKENIZER, Task, make_tasks, prepare_sources
from moh_llm.data.tokenizer import TextTokenizer
from moh_llm.data.write import is_done
from moh_llm.errors import UserError
from moh_llm.files import write_json, write_text
from moh_llm.locking import INSIDE, lock_folder
from moh_llm.reading import read_json

_RECORDED = ("weight", "max_epochs", "hub", "revision", "match", "builtin", "format", "text_field", "filters")
_BYTES_PER_WORKER = 4 << 20  # less is done before a process more has started
# Threads of one process share the vocabulary's place in the caches, which two processes do not; one process's Python
# keeps about this many busy.
_CORES_PER_WORKER = 4


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
) -> dict[str, Any] | None:
    """Write the mixture's shards, or what is left of them, and return the record (`OUTPUT/mixture.json`).

    Args:
        mixture: the sources; a change of weights alone writes the record anew and no shard.
        tokenizer: what text is tokenised with.
        output: folder of the shards.
        workers: processes at once; None: one per four cores, or all of a cluster's.
        executor: ``local``, ``slurm`` or ``ray``.
        executor_args: keywords of datatrove's executor (for Slurm at least time and partition).
        skip_bad: leave bad records out and count them, instead of stopping.
        overwrite: do a source anew that was made from other text or with other settings.

    Returns:
        The record; None where the jobs were handed to Slurm.

    Raises:
        UserError: the text cannot be read, the folder holds something else or is being written, or the disk refuses.
    """
    output = output.resolve()
    with lock_folder(output):
        return _tokenize(
            mixture, tokenizer, output, workers, executor, executor_args or {}, skip_bad=skip_bad, overwrite=overwrite
        )


def _tokenize(
    mixture: Mixture,
    tokenizer: TextTokenizer,
    output: Path,
    workers: int | None,
    executor: str,
    executor_args: Mapping[str, str],
    *,
    skip_bad: bool,
    overwrite: bool,
) -> dict[str, Any] | None:
    started = time.perf_counter()
    try:
        _check_output(output)
    except OSError as error:
        raise UserError(f"--output {output} cannot be looked at: {error.strerror}; name another folder") from error
    tasks = make_tasks(mixture, output)
    prepare_sources(tasks, tokenizer.sha256, mixture.validation_share, overwrite)
    write_text(output / TOKENIZER, tokenizer.backend.to_str())
    finish = partial(write_record, mixture, tasks, output, tokenizer.describe())
    # The largest first, so that none is left to the end alone.
    if left := sorted((task for task in tasks if not is_done(task)), key=lambda task: -task.work):
        write_json(output / RECORD, {"status": "running"})
        workers, threads = count_workers(left, workers, executor, executor_args)
        settings = (tokenizer.end, tokenizer.name, mixture.validation_share, skip_bad, threads)
        step = WriteShards(left, output / TOKENIZER, *settings)
        logs = new_log_folder(output)
        if executor == "slurm":
            submit_slurm(step, finish, workers, logs, executor_args)
            return None
        with show_progress(tasks):
            if executor == "ray":
                run_ray(step, workers, logs, executor_args)
            else:
                run_local(step, workers, logs)
    return finish(time.perf_counter() - started)


def write_record(
    mixture: Mixture, tasks: Sequence[Task], output: Path, tokenizer: dict[str, Any], seconds: float | None = None
) -> dict[str, Any]:
    """Write `OUTPUT/mixture.json` from the tasks' records.

    Raises:
        UserError: a task is not done, with what it said; or a source holds no text.
    """
    for task in tasks:
        if not is_done(task):
            why = task.error.read_text(encoding="utf-8") if task.error.exists() else f"see {output / 'logs'}"
            raise UserError(f"source {task.source.name}, part {task.number} was not tokenised: {why}")
    sources = {
        source.name: _source_record(source, [t for t in tasks if t.source.name == source.name])
        for source in mixture.sources
    }
    record = {
        "status": "finished",
        "name": mixture.name,
        "validation_share": mixture.validation_share,
        "tokenizer": tokenizer,
        "tokens": sum(source["tokens"] for source in sources.values()),
        "sources": sources,
        "seconds": None if seconds is None else round(seconds, 3),
        "written": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "moh_llm": __version__,
    }
    write_json(output / RECORD, record)
    return record


def _source_record(source: Source, tasks: Sequence[Task]) -> dict[str, Any]:
    done = [read_json(task.record) for task in tasks]
    sums = {
        name: sum(record[name] for record in done)
        for name in ("documents", "tokens", "bytes", "empty", "filtered", "bad")
    }
    if not sums["tokens"]:
        why = f" ({sums['filtered']} records were filtered out, {sums['bad']} bad)" if any(sums.values()) else ""
        raise UserError(f"source {source.name} holds no text{why}")
    shards = {
        split: [
            {"file": task.shard(split).name, **record["splits"][split]}
            for task, record in zip(tasks, done, strict=True)
            if split in record["splits"]
        ]
        for split in SPLITS
    }
    # Where the text lies is in `text`, by names that may be shown; addresses themselves can hold a password.
    spec = {name: value for name in _RECORDED if (value := getattr(source, name)) not in (None, (), {})}
    return {
        **spec,
        **sums,
        "tokens_per_byte": round(sums["tokens"] / sums["bytes"], 5),
        "bad_examples": [example for record in done for example in record["bad_examples"]][:5],
        "seconds": round(sum(record["seconds"] for record in done), 3),
        "text": [{"file": file.name, "bytes": file.size, "modified": file.modified} for t in tasks for file in t.files],
        "shards": shards,
    }


def count_workers(
    tasks: Sequence[Task], wanted: int | None, executor: str, executor_args: Mapping[str, str]
) -> tuple[int, int | None]:
    """Processes at once (-1: as many as the cluster gives), and the tokenizer's threads in each (None: all cores)."""
    if executor != "local":
        cores = executor_args.get("cpus_per_task", "1")
        return wanted or -1, int(cores) if cores.isdigit() else 1
    cores = available_cores()
    sizes = [task.bytes for task in tasks]
    worth = len(tasks) if None in sizes else ceil(sum(size or 0 for size in sizes) / _BYTES_PER_WORKER)
    workers = max(1, min(wanted or ceil(cores / _CORES_PER_WORKER), len(tasks), worth))
    return workers, None if workers == 1 else max(1, cores // workers)


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check_output(output: Path) -> None:
    if output.exists() and not output.is_dir():
        raise UserError(f"--output {output} is a file; name a folder")
    held = [path for path in output.iterdir() if path.name != INSIDE] if output.is_dir() else []
    if held and not (output / RECORD).exists():
        ours = (output / TOKENIZER).exists() or any(output.glob("*/source.json"))
        if not ours:
            raise UserError(f"--output {output} is not empty and holds no {RECORD}; name another folder")
