"""What tokenising a mixture consists of: per source the files, cut into tasks, a shard of each split per task.

OUTPUT/mixture.json             the record: see `moh_llm.data.tokenize`
       tokenizer.json           the tokenizer, as `tokenizers` reads it
       SOURCE/source.json       what the source's shards are made from
              train-00000.ds    tokens of task 0 (with .index and .metadata), validation-00000.ds likewise
              tasks/00000.json  counts of task 0; it is done when this is there
"""

import contextlib
import platform
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moh_llm.data.embedded import SPLIT
from moh_llm.data.locate import SourceFile, locate
from moh_llm.data.mixture import Mixture, Source
from moh_llm.errors import UserError, without_passwords_in
from moh_llm.files import write_json
from moh_llm.reading import read_json

SPLITS = ("train", "validation")
RECORD, TOKENIZER = "mixture.json", "tokenizer.json"
# Small files share a task, so that a million of them do not become a million shards.
_TASK_BYTES = 8 << 20


@dataclass(frozen=True)
class Task:
    """Some files of a source, in their order; for a built-in source, none."""

    source: Source
    number: int
    files: tuple[SourceFile, ...]
    folder: Path  # of the source's shards

    @property
    def record(self) -> Path:
        """Where its counts lie once it is done."""
        return self.folder / "tasks" / f"{self.number:05d}.json"

    @property
    def error(self) -> Path:
        """Where it says why it stopped."""
        return self.record.with_suffix(".error")

    @property
    def progress(self) -> Path:
        """Where it says how far it is."""
        return self.record.with_suffix(".progress")

    @property
    def bytes(self) -> int | None:
        """Stored bytes to read; None where not known."""
        sizes = [file.size for file in self.files]
        return None if None in sizes or not sizes else sum(size for size in sizes if size is not None)

    @property
    def work(self) -> int:
        """About how many bytes of text it is: text compresses to a third."""
        packed = (".gz", ".zst", ".zstd", ".parquet")
        return sum((file.size or 0) * (3 if file.name.endswith(packed) else 1) for file in self.files)

    def shard(self, split: str) -> Path:
        """Where the tokens of a split go."""
        return self.folder / f"{split}-{self.number:05d}.ds"


def make_tasks(mixture: Mixture, output: Path) -> list[Task]:
    """The tasks of all sources, which depend on the sources' files and on nothing else.

    Raises:
        UserError: a source's files are not there, or its name is no name for a folder.
    """
    return [task for source in mixture.sources for task in _tasks_of(source, output)]


def _tasks_of(source: Source, output: Path) -> Iterator[Task]:
    if not re.fullmatch(r"\w[\w.+-]*", source.name):
        raise UserError(f"source {source.name!r}: a source's name becomes a folder; use letters, digits, _, - and .")
    folder = output / source.name
    if source.builtin is not None:
        yield Task(source, 0, (), folder)
        return
    number, group, held = 0, [], 0
    for file in locate(source):
        size = _TASK_BYTES if file.size is None else file.size
        if group and held + size > _TASK_BYTES:
            yield Task(source, number, tuple(group), folder)
            number, group, held = number + 1, [], 0
        group.append(file)
        held += size
    yield Task(source, number, tuple(group), folder)


def source_identity(source: Source, files: Sequence[SourceFile], tokenizer: str, validation_share: float) -> Any:
    """All that decides a source's shards, as JSON: text, tokenizer (its hash), what is kept and held out."""
    text: Any = [{"file": file.name, "bytes": file.size, "modified": file.modified} for file in files]
    if source.builtin is not None:
        text = {"builtin": source.builtin, "python": platform.python_version(), "split": SPLIT}
    return {
        "tokenizer": tokenizer,
        "validation_share": validation_share,
        "format": source.format,
        "text_field": source.text_field,
        "filters": without_passwords_in(source.filters),  # as they are recorded, since the two are compared
        "text": text,
    }


def prepare_sources(
    tasks: Sequence[Task], tokenizer: str, validation_share: float, overwrite: bool, write: bool = True
) -> None:
    """Make the sources' folders, or check that those there were made from the same.

    Args:
        tasks: all tasks.
        tokenizer: hash of the tokenizer.
        validation_share: share of held-out documents.
        overwrite: remove the shards of a source that was made from something else.
        write: whether to change anything; without, only what is in the way is reported.

    Raises:
        UserError: text, tokenizer or settings of a source differ from those its shards were made from.
    """
    for folder in dict.fromkeys(task.folder for task in tasks):
        own = [task for task in tasks if task.folder == folder]
        identity = source_identity(own[0].source, [f for t in own for f in t.files], tokenizer, validation_share)
        path = folder / "source.json"
        if path.exists() and (difference := _difference(read_json(path), identity)):
            if not overwrite:
                raise UserError(
                    f"{folder} holds tokens made from something else: {difference}; restore it, name another "
                    "--output, or pass --overwrite to tokenise this source anew"
                )
            if write:
                with _told(f"cannot remove {folder}"):
                    shutil.rmtree(folder)
        elif folder.exists() and not path.exists():
            raise UserError(f"{folder} is in the way and holds no source.json; name another --output")
        if write:
            _make(folder, path, identity)
            with _told(f"cannot write {folder}"):
                for task in own:
                    task.error.unlink(missing_ok=True)
                    task.progress.unlink(missing_ok=True)


def _make(folder: Path, path: Path, identity: Any) -> None:
    with _told(f"cannot make {folder}"):
        (folder / "tasks").mkdir(parents=True, exist_ok=True)
    if not path.exists():
        write_json(path, identity)


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    """Say what the disk refuses in one line."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{what}: {error.strerror}; name another --output") from error


def _difference(recorded: Any, wanted: Any) -> str | None:
    """The first thing in which two identities differ, in words."""
    if recorded == wanted:
        return None
    if not isinstance(recorded, dict) or recorded.keys() != wanted.keys():
        return "source.json is not of this version"
    if recorded["tokenizer"] != wanted["tokenizer"]:
        return f"the tokenizer (its hash was {recorded['tokenizer'][:12]}, now {wanted['tokenizer'][:12]})"
    for name in ("validation_share", "format", "text_field", "filters"):
        if recorded[name] != wanted[name]:
            return f"{name} was {recorded[name]}, now {wanted[name]}"
    if isinstance(recorded["text"], dict) or isinstance(wanted["text"], dict):
        return f"the text was {recorded['text']}, now {wanted['text']}"
    before, now = ({file["file"]: file for file in each["text"]} for each in (recorded, wanted))
    for name, file in before.items():
        if name not in now:
            return f"{name} is gone"
        if file != now[name]:
            return (
                f"{name} changed ({file['bytes']} bytes of {file['modified']}, "
                f"now {now[name]['bytes']} of {now[name]['modified']})"
            )
    new = next((name for name in now if name not in before), None)
    return f"{new} is new" if new else "the order of the files"
