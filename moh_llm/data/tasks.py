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

import multiprocessing
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from moh_llm.data.locate import SourceFile, locate, source_identity
from moh_llm.data.mixture import Mixture, Source
from moh_llm.data.records import source_documents
from moh_llm.data.tokenizer import TextTokenizer, is_held_out
from moh_llm.errors import UserError
from moh_llm.files import scratch_folder, sha256
from moh_llm.records.tokens import SPLITS, SourceIdentity, Split, SplitRecord, TaskRecord, loss_of

# Small files share a task, so that a million of them do not become a million shards.
_TASK_BYTES = 8 << 20


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
    def bytes(self) -> int:
        """Stored bytes to read, as far as they are known."""
        return sum(file.size or 0 for file in self.files)

    def shard(self, split: str) -> Path:
        """The file of a split's tokens."""
        return self.folder / f"{split}-{self.number:05d}.ds"


def make_tasks(mixture: Mixture, output: Path) -> list[Task]:
    """The tasks of all sources. They depend on the sources' files alone, not on the number of workers."""
    tasks = []
    for source in mixture.sources:
        if not re.fullmatch(r"\w[\w.+-]*", source.name):
            raise UserError(f"source {source.name!r}: its name becomes a folder; use letters, digits, _, - and .")
        groups: list[list[SourceFile]] = [[]]
        held = 0
        for file in locate(source):
            size = _TASK_BYTES if file.size is None else file.size
            if groups[-1] and held + size > _TASK_BYTES:
                groups.append([])
                held = 0
            groups[-1].append(file)
            held += size
        tasks += [Task(source, number, tuple(group), output / source.name) for number, group in enumerate(groups)]
    return tasks


def prepare_sources(tasks: Sequence[Task], tokenizer: TextTokenizer, validation_share: float) -> None:
    """Write each source's `source.json`. Raises UserError where the one that is there says something else."""
    for folder in dict.fromkeys(task.folder for task in tasks):
        own = [task for task in tasks if task.folder == folder]
        identity = source_identity(own[0].source, [f for t in own for f in t.files], tokenizer, validation_share)
        path = folder / "source.json"
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            identity.write(path)
        recorded = SourceIdentity.read(path)
        changed = [name for name, now in identity if getattr(recorded, name) != now]
        if changed:
            raise UserError(
                f"{folder} holds tokens made with another {' and '.join(changed)}; restore it, name another "
                "--output-dir, or remove that folder to tokenise the source again"
            )


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
    """

    tokenizer: TextTokenizer
    validation_share: float

    def __call__(self, task: Task) -> None:
        """Write the shards. Raises UserError for text that cannot be read and for an error of the disk."""
        if is_done(task):
            return
        with scratch_folder(task.record.with_suffix("")) as scratch:
            splits = self._write_shards(task, scratch)
            for path in sorted(scratch.iterdir()):
                os.replace(path, task.folder / path.name)
        TaskRecord(splits=splits).write(task.record)

    def _write_shards(self, task: Task, scratch: Path) -> dict[Split, SplitRecord]:
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
        documents = source_documents(task.source, task.files, self.tokenizer.chat)
        # Bars of several processes would overwrite each other; None: only on a terminal.
        quiet = None if multiprocessing.parent_process() is None else True
        what = f"{task.source.name[-40:]} {task.number}"
        with tqdm(desc=what, unit="token", unit_scale=True, leave=False, disable=quiet) as bar:
            for group, ids, targets in self.tokenizer.encode(documents):
                split = SPLITS[is_held_out(group, self.validation_share)]
                shards[split].write_bytes(ids.tobytes())
                bar.update(len(ids))
                if targets is not None:
                    shards[split].write_loss_bytes(targets.tobytes())
                    loss_tokens[split] += int(targets.sum())
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
