"""Tokenise a mixture once, into shards that training maps into memory.

The record, OUTPUT/mixture.json, holds per source the counts, text and shards; `moh_llm.data.tasks` has the layout of
the folder and resuming. It is written last.
"""

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from functools import partial
from math import ceil
from pathlib import Path

from tqdm import tqdm

from moh_llm import __version__
from moh_llm.data.executors import WriteShards, new_log_folder, run_local, run_ray, submit_slurm
from moh_llm.data.filters import merge, unmet
from moh_llm.data.mixture import Mixture, Source
from moh_llm.data.notes import note
from moh_llm.data.tasks import TOKENIZER, Task, is_done, make_tasks, prepare_sources
from moh_llm.data.tokenizer import TextTokenizer
from moh_llm.errors import UserError
from moh_llm.files import check_place, follow, write_json, write_text
from moh_llm.locking import INSIDE, lock_folder
from moh_llm.records.tokens import (
    RECORD,
    SPLITS,
    ShardRecord,
    SourceRecord,
    TaskRecord,
    TokenizerRecord,
    TokensRecord,
)

_RECORDED = ("weight", "max_epochs", "hub", "revision", "match", "builtin", "format", "text_field", "filters")
_BYTES_PER_WORKER = 4 << 20  # less is done before a process more has started
# Threads of one process share the vocabulary's place in the caches, which two processes do not; one process's Python
# keeps about this many busy.
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
    output, executor_args = Path(os.path.realpath(follow(output))), executor_args or {}
    with lock_folder(output):
        try:
            _check_output(output)
        except OSError as error:
            raise UserError(f"--output {output} cannot be read: {error.strerror}; name another folder") from error
        tasks = make_tasks(mixture, output)
        prepare_sources(tasks, tokenizer, mixture.validation_share, overwrite)
        write_text(output / TOKENIZER, tokenizer.backend.to_str())
        chats = any(source.type != "text" for source in mixture.sources)
        finish = partial(write_record, mixture, tasks, output, tokenizer.record(chats))
        # The largest first, so that none is left to the end alone.
        if left := sorted((task for task in tasks if not is_done(task)), key=lambda task: -task.work):
            write_json(output / RECORD, {"status": "running"})
            workers, threads = count_workers(left, workers, executor, executor_args)
            own = (tokenizer.end, tokenizer.name, tokenizer.chat, tokenizer.rows)
            step = WriteShards(left, output / TOKENIZER, *own, mixture.validation_share, skip_bad, threads)
            logs = new_log_folder(output)
            if executor == "slurm":
                submit_slurm(step, finish, workers, logs, executor_args)
                return None
            with _progress_bar(tasks):
                if executor == "ray":
                    run_ray(step, workers, logs, executor_args)
                else:
                    run_local(step, workers, logs)
        return finish(time.perf_counter() - started)


def write_record(
    mixture: Mixture, tasks: Sequence[Task], output: Path, tokenizer: TokenizerRecord, seconds: float | None = None
) -> TokensRecord:
    """Write `OUTPUT/mixture.json` from the tasks' records.

    Raises:
        UserError: a task is not done, with its error; or a source holds no text.
    """
    for task in tasks:
        if not is_done(task):
            why = task.error.read_text(encoding="utf-8") if task.error.exists() else f"see {output / 'logs'}"
            raise UserError(f"source {task.source.name}, part {task.number} was not tokenised: {why}")
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
    record.write(output / RECORD)
    return record


def _source_record(source: Source, tasks: Sequence[Task]) -> SourceRecord:
    done = [TaskRecord.read(task.record) for task in tasks]
    sums = {
        name: sum(getattr(record, name) for record in done)
        for name in ("documents", "tokens", "bytes", "empty", "filtered", "bad")
    }
    met = [record.filters for record in done if record.filters.keys() == source.filters.keys()]
    lines = unmet(source.filters, merge(met)) if len(met) == len(done) else []
    if not sums["tokens"]:
        why = f" ({sums['filtered']} records were filtered out, {sums['bad']} bad)" if any(sums.values()) else ""
        raise UserError(": ".join([f"source {source.name} holds no text{why}", *lines[:1]]))
    for line in lines:
        note(f"source {source.name}: {line}")
    # The location of the text is in `text`, by names that may be shown; addresses themselves can hold a password.
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


@contextmanager
def _progress_bar(tasks: Sequence[Task]) -> Iterator[None]:
    """A bar over the stored bytes of all tasks, from the files that they leave, whichever process does them."""
    stop = threading.Event()
    thread = threading.Thread(target=_follow, args=(tasks, stop), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _follow(tasks: Sequence[Task], stop: threading.Event) -> None:
    known = [task.bytes for task in tasks if task.bytes is not None]
    mean = sum(known) / len(known) if known else 1  # for those whose size is not known
    sizes = [mean if task.bytes is None else task.bytes for task in tasks]
    done: dict[int, int] = {}  # task -> tokens
    began, at_start = time.perf_counter(), sum(_state(task)[1] for task in tasks)
    style = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"
    with tqdm(total=sum(sizes), desc="tokenize", bar_format=style) as bar:
        last = False
        while not last:
            last = stop.wait(_SECONDS)
            share = tokens = 0.0
            for number, task in enumerate(tasks):
                part, found = (1.0, done[number]) if number in done else _state(task)
                if part == 1.0:
                    done[number] = found
                share, tokens = share + part * sizes[number], tokens + found
            rate = (tokens - at_start) / (time.perf_counter() - began)
            bar.set_postfix_str(f"{tokens / 1e6:.2f}M tokens, {rate / 1e3:.0f}k tokens/s", refresh=False)
            bar.update(max(0.0, share - bar.n))


def _state(task: Task) -> tuple[float, int]:
    """Share of the task that is done, and its tokens so far."""
    try:
        return 1.0, TaskRecord.read(task.record).tokens
    except UserError:
        pass
    try:
        stored, tokens = map(int, task.progress.read_text().split())
    except (OSError, ValueError):
        return 0.0, 0
    return min(0.99, stored / task.bytes) if task.bytes else 0.0, tokens
