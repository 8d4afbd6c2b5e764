"""Tokenising a mixture as tasks: some files of a source each, which become a shard of each split, all or nothing.

OUTPUT/mixture.json             the record: see `moh_llm.data.tokenize`
       SOURCE/source.json       what the source's shards are made from
              train-00000.ds    tokens of task 0 (with .index and .metadata), validation-00000.ds likewise;
                                with .loss where the loss is taken on a part of them
              tasks/00000.json  counts of task 0; its presence says that the task is done

datatrove writes the files of a shard, and its executors run tasks on clusters (`moh_llm.data.tokenize`). The tasks
themselves are ours, because datatrove divides files by the number of tasks, shuffles documents and has no held-out
split: bytes would depend on the number of workers, and a changed text would not be noticed.
"""

import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from moh_llm.data.locate import SourceFile, locate, source_identity
from moh_llm.data.mixture import Mixture, Source
from moh_llm.data.records import Reading, source_documents
from moh_llm.data.tokenizer import TextTokenizer, is_held_out
from moh_llm.errors import UserError
from moh_llm.files import scratch_folder, sha256
from moh_llm.records.tokens import SPLITS, SourceIdentity, Split, SplitRecord, TaskRecord, loss_of

# Small files share a task, so that a million of them do not become a million shards.
_TASK_BYTES = 8 << 20
_PROGRESS_SECONDS = 0.5  # between two notes of a task's progress


@dataclass(frozen=True)
class Task:
    """Some files of a source, in their order; none for a built-in source."""

    source: Source
    number: int
    files: tuple[SourceFile, ...]
    folder: Path  # of the source's shards

    @property
    def record(self) -> Path:
        """The file of its counts, written when it is done."""
        return self.folder / "tasks" / f"{self.number:05d}.json"

    @property
    def progress(self) -> Path:
        """The file with the number of stored bytes that were read so far."""
        return self.record.with_suffix(".progress")

    @property
    def bytes(self) -> int | None:
        """Stored bytes to read; None where unknown."""
        sizes = [file.size for file in self.files]
        return None if None in sizes or not sizes else sum(size for size in sizes if size is not None)

    def shard(self, split: str) -> Path:
        """The file of a split's tokens."""
        return self.folder / f"{split}-{self.number:05d}.ds"


def make_tasks(mixture: Mixture, output: Path) -> list[Task]:
    """The tasks of all sources. They depend on the sources' files alone, not on the number of workers.

    Raises:
        UserError: a source's files are not there, or its name cannot be the name of a folder.
    """
    return [task for source in mixture.sources for task in _tasks_of(source, output)]


def _tasks_of(source: Source, output: Path) -> Iterator[Task]:
    if not re.fullmatch(r"\w[\w.+-]*", source.name):
        raise UserError(f"source {source.name!r}: a source's name becomes a folder; use letters, digits, _, - and .")
    folder = output / source.name
    number, group, held = 0, [], 0
    for file in locate(source):
        size = _TASK_BYTES if file.size is None else file.size
        if group and held + size > _TASK_BYTES:
            yield Task(source, number, tuple(group), folder)
            number, group, held = number + 1, [], 0
        group.append(file)
        held += size
    yield Task(source, number, tuple(group), folder)


def prepare_sources(tasks: Sequence[Task], tokenizer: TextTokenizer, validation_share: float, overwrite: bool) -> None:
    """Write each source's `source.json`, or check that the one there says the same.

    Args:
        tasks: all tasks.
        tokenizer: the tokenizer.
        validation_share: share of held-out documents.
        overwrite: remove the shards of a source that were made from something else.

    Raises:
        UserError: text, tokenizer or settings of a source differ from those its shards were made from.
    """
    for folder in dict.fromkeys(task.folder for task in tasks):
        own = [task for task in tasks if task.folder == folder]
        identity = source_identity(own[0].source, [f for t in own for f in t.files], tokenizer, validation_share)
        path, held = folder / "source.json", folder.exists() and any(folder.iterdir())
        if held and not path.exists():
            raise UserError(f"{folder} is in the way and holds no source.json; name another --output")
        difference = _difference(path, identity) if held else None
        if difference and not overwrite:
            raise UserError(
                f"{folder} holds tokens made from something else: {difference}; restore it, name another "
                "--output, or pass --overwrite to tokenise this source again"
            )
        try:
            if difference:
                shutil.rmtree(folder)
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot replace {folder}: {error.strerror}; name another --output") from error
        if difference or not held:
            identity.write(path)


def _difference(path: Path, wanted: SourceIdentity) -> str | None:
    """The first thing in which the identity at ``path`` differs, in words."""
    try:
        recorded = SourceIdentity.read(path).content()
    except UserError as error:
        return str(error)
    for name, now in wanted.content().items():
        before = recorded.get(name)
        if json.dumps(before) == json.dumps(now):  # not ==, since 1 equals true in Python
            continue
        if isinstance(before, list) and isinstance(now, list) and name == "text":
            known, found = ({tuple(file.items()) for file in files} for files in (before, now))
            changed = sorted(dict(file)["file"] for file in known ^ found)
            return f"{changed[0]} changed, is new or is gone" if changed else "the order of the files"
        return f"{name} was {before}, now {now}"
    return None


def is_done(task: Task) -> bool:
    """Whether the task's record and the shards that it names are there, in full size."""
    try:
        splits = TaskRecord.read(task.record).splits
    except UserError:
        return False
    return not any(entry.fault(task.shard(split)) for split, entry in splits.items())


@dataclass(frozen=True)
class TaskWriter:
    """Tokenises the documents of a task into its shards, unless that is done.

    Documents keep their order; a hash decides the split of each. The shards come into place by
    renaming, the record of the task last, so that a task that was stopped is done again, with the
    same bytes.

    Attributes:
        tokenizer: the tokenizer.
        validation_share: share of held-out documents.
        skip_bad: whether bad records are left out and counted.
        threads: of the tokenizer; None: what this process has.
    """

    tokenizer: TextTokenizer
    validation_share: float
    skip_bad: bool
    threads: int | None = None

    def __call__(self, task: Task) -> None:
        """Write the shards. Raises UserError for text that cannot be read and for an error of the disk."""
        if is_done(task):
            return
        if self.threads is not None:
            # Also for one thread: without its pool the library is a fifth slower.
            os.environ |= {"TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": str(self.threads)}
        started = time.perf_counter()
        reading = Reading(self.skip_bad)
        with scratch_folder(task.record.with_suffix("")) as scratch:
            splits = self._write_shards(task, reading, scratch)
            for path in sorted(scratch.iterdir()):
                os.replace(path, task.folder / path.name)
        TaskRecord(
            files=[file.name for file in task.files],
            documents=reading.documents,
            bytes=reading.bytes,
            tokens=sum(split.tokens for split in splits.values()),
            empty=reading.empty,
            filtered=reading.filtered,
            bad=reading.bad,
            bad_examples=reading.examples,
            seconds=round(time.perf_counter() - started, 3),
            splits=splits,
        ).write(task.record)
        task.progress.unlink(missing_ok=True)

    def _write_shards(self, task: Task, reading: Reading, scratch: Path) -> dict[Split, SplitRecord]:
        """Write the task's files into a temporary folder; a split without tokens has none."""
        from datatrove.pipeline.tokens.tokenizer import TokenizedFile

        masked, loss_tokens = task.source.type != "text", dict.fromkeys(SPLITS, 0)
        shards = {
            split: TokenizedFile(
                str(scratch),
                task.shard(split).name,
                tokenizer_name_or_path=self.tokenizer.name,
                save_final_metadata=True,
                token_size=self.tokenizer.dtype.itemsize,
                save_loss_metadata=masked,
            )
            for split in SPLITS
        }
        noted = time.perf_counter()
        documents = source_documents(task.source, task.files, reading, self.tokenizer.chat)
        for group, ids, targets in self.tokenizer.encode(documents, ahead=2):
            split = SPLITS[is_held_out(group, self.validation_share)]
            shards[split].write_bytes(ids.tobytes())
            if targets is not None:
                shards[split].write_loss_bytes(targets.tobytes())
                loss_tokens[split] += int(targets.sum())
            if time.perf_counter() - noted > _PROGRESS_SECONDS:
                noted = time.perf_counter()
                task.progress.write_text(str(reading.stored))
        records: dict[Split, SplitRecord] = {}
        for split, shard in shards.items():
            shard.close()
            if not len(shard):
                shard.cleanup()
                continue
            path = scratch / shard.filename
            records[split] = SplitRecord(
                documents=len(shard.doc_ends),
                tokens=len(shard),
                bytes=path.stat().st_size,
                sha256=sha256(path),
                **({"loss_tokens": loss_tokens[split], "loss_sha256": sha256(loss_of(path))} if masked else {}),
            )
        return records
