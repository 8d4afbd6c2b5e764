"""The folder that is uploaded: beside the model's, with its weights linked and local paths taken out of its texts."""

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from moh_llm.errors import UserError
from moh_llm.files import scratch_folder, sha256, write_text
from moh_llm.hub.listing import CARD, RECORDS, VOCABULARIES, is_text
from moh_llm.hub.texts import parse_json, scrub, scrub_json
from moh_llm.locking import lock_folder


@dataclass
class Stage:
    """What is uploaded.

    Attributes:
        folder: where it lies, as long as the block of `staged` runs.
        scrubbed: file -> place in it -> the local path that was cut to its last component.
    """

    folder: Path
    scrubbed: dict[str, dict[str, str]] = field(default_factory=dict)

    def write_card(self, text: str) -> None:
        """Write README.md, without paths of this machine."""
        write_text(self.folder / CARD, scrub(text))


@dataclass(frozen=True)
class StagedFile:
    """One file of a stage: its size in bytes and the SHA-256 of its content in hex."""

    name: str
    size: int
    sha256: str


@contextlib.contextmanager
def staged(folder: Path, files: list[str], records: Mapping[str, Path]) -> Iterator[Stage]:
    """Yield a copy of a model's folder to publish; it is removed at the end, and the model's own stays as it was.

    The card is missing yet (`Stage.write_card`). Nothing in the copy may be written in place, since
    its files are links where the text is unchanged.

    Args:
        folder: the model.
        files: names of its files that are published; a card among them is left out.
        records: more records to put in, by the name they get: where they lie.

    Raises:
        UserError: a record cannot be read; the model is being written or published by another process; the disk
            refuses.
    """
    sources = {name: folder / name for name in files if name != CARD} | dict(records)
    with lock_folder(folder), scratch_folder(folder.resolve()) as temporary:
        stage = Stage(temporary)
        for name, source in sources.items():
            (temporary / name).parent.mkdir(exist_ok=True)
            text, changed = _scrubbed(name, source)
            if changed:
                stage.scrubbed[name] = changed
                write_text(temporary / name, text)
            else:
                _link(source, temporary / name)
        yield stage


def describe(folder: Path) -> list[StagedFile]:
    """Every file of a stage, by name. Raises FileNotFoundError where the folder is gone."""
    if not folder.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return [StagedFile(path.relative_to(folder).as_posix(), path.stat().st_size, sha256(path)) for path in paths]


def _scrubbed(name: str, source: Path) -> tuple[str, dict[str, str]]:
    """A JSON file's text without local paths, and what was changed; other files stay as they are."""
    if not is_text(name) or name in VOCABULARIES or not name.endswith(".json"):
        return "", {}
    try:
        content = parse_json(source.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{source} cannot be read: {error}") from error
    if isinstance(content, str):  # not JSON after all
        return "", {}
    scrubbed, changed = scrub_json(content, whole=name not in RECORDS)
    return json.dumps(scrubbed, indent=2, ensure_ascii=False) + "\n", changed


def _link(source: Path, target: Path) -> None:
    real = source.resolve()  # a Hub snapshot holds symbolic links
    try:
        os.link(real, target)
    except OSError:  # not on every file system, nor for everybody's files
        try:
            target.symlink_to(real)
        except OSError:
            shutil.copyfile(real, target)
