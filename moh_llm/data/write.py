"""One task of tokenising: its files' documents to a shard of each split, all or nothing."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datatrove.pipeline.tokens.tokenizer import TokenizedFile

from moh_llm.data.embedded import embedded_documents
from moh_llm.data.records import Reading, read_documents
from moh_llm.data.shards import index_of
from moh_llm.data.tasks import SPLITS, Task
from moh_llm.data.tokenizer import TextTokenizer, is_held_out
from moh_llm.errors import UserError
from moh_llm.files import scratch_folder, sha256, write_json, write_text

_TELL_SECONDS = 0.5  # between two notes of how far the task is


def write_task(task: Task, tokenizer: TextTokenizer, validation_share: float, skip_bad: bool) -> None:
    """Tokenise a task's documents, unless that is done.

    Documents keep their order; which split one belongs to is decided by its hash. The shards come
    into place by renaming, the record of the task last, so that one that was stopped is simply
    done again, with the same bytes.

    Raises:
        UserError: unreadable text (see `read_documents`) or a disk that refuses. The message is
            also left in the task's ``.error`` file, for whoever started it from afar.
    """
    if is_done(task):
        return
    try:
        _write(task, tokenizer, validation_share, skip_bad)
    except UserError as error:
        write_text(task.error, str(error))
        raise
    finally:
        task.progress.unlink(missing_ok=True)


def is_done(task: Task) -> bool:
    """Whether the task's record and the shards that it names are there, in full size."""
    try:
        splits = json.loads(task.record.read_text(encoding="utf-8"))["splits"]
        for split, entry in splits.items():
            path = task.shard(split)
            if path.stat().st_size != entry["bytes"] or index_of(path).stat().st_size != 8 * entry["documents"]:
                return False
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return True


def _write(task: Task, tokenizer: TextTokenizer, validation_share: float, skip_bad: bool) -> None:
    started = time.perf_counter()
    reading = Reading(skip_bad)
    with scratch_folder(task.record.with_suffix("")) as scratch:
        shards = {split: _shard(scratch, task.shard(split).name, tokenizer) for split in SPLITS}
        told, tokens = started, 0
        for group, ids in tokenizer.encode_grouped(_documents(task, reading, progress := _Position()), ahead=2):
            shards[SPLITS[is_held_out(group, validation_share)]].write_bytes(ids.tobytes())
            tokens += len(ids)
            if time.perf_counter() - told > _TELL_SECONDS:
                told = time.perf_counter()
                task.progress.write_text(f"{progress.stored} {tokens}")
        splits: dict[str, Any] = {}
        for split, shard in shards.items():
            shard.close()
            if len(shard):
                path = scratch / shard.filename
                splits[split] = {
                    "documents": len(shard.doc_ends),
                    "tokens": len(shard),
                    "bytes": path.stat().st_size,
                    "sha256": sha256(path),
                }
                for file in sorted(scratch.glob(f"{shard.filename}*")):
                    os.replace(file, task.folder / file.name)
    write_json(
        task.record,
        {
            "files": [file.name for file in task.files],
            "documents": reading.documents,
            "bytes": reading.bytes,
            "tokens": tokens,
            "empty": reading.empty,
            "filtered": reading.filtered,
            "bad": reading.bad,
            "bad_examples": reading.examples,
            "seconds": round(time.perf_counter() - started, 3),
            "splits": splits,
        },
    )


class _Position:
    """Stored bytes read so far, over a task's files."""

    def __init__(self) -> None:
        self.before = self.stored = 0

    def __call__(self, position: int) -> None:
        self.stored = self.before + position


def _documents(task: Task, reading: Reading, position: _Position) -> Iterator[tuple[str, str]]:
    """Group and text of each document."""
    if task.source.builtin is not None:
        for group, text in embedded_documents(task.source.builtin):
            reading.documents += 1
            reading.bytes += len(text.encode())
            yield group, text
    for file in task.files:
        for text in read_documents(file, task.source, reading, position):
            yield text, text
        position.before += file.size or 0


def _shard(folder: Path, name: str, tokenizer: TextTokenizer) -> TokenizedFile:
    return TokenizedFile(
        str(folder),
        name,
        tokenizer_name_or_path=tokenizer.name,
        save_final_metadata=True,
        token_size=tokenizer.dtype.itemsize,
    )
