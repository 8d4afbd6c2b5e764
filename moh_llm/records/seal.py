"""The seal of a model's folder, `seal.json`: sizes and hashes of its files when they were written.

    write_seal(folder, hash_model(folder))                  # after the folder was written
    changes = find_changes(folder, read_seal(folder))       # {"model.safetensors": "was changed (...)"}

Steps check it before they compute anything from the files. Files that people edit (`EDITABLE`, licences) may change.
"""

import os
from collections.abc import Container, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pydantic import NonNegativeInt

from moh_llm.files import once_per_file, sha256
from moh_llm.records.base import Record
from moh_llm.records.model import CONFIG, INDEX_NAME, LICENCE_NAMES, TOKENIZERS

SEAL = "seal.json"
EDITABLE = ("README.md", "chat_template.jinja", "chat_template.json", "generation_config.json")
_THREADS = min(8, os.cpu_count() or 1)
_sha256 = once_per_file(sha256)
# What transformers would read from a folder that did not have it when it was sealed.
_LOADED = {CONFIG, INDEX_NAME, *TOKENIZERS, "added_tokens.json", "special_tokens_map.json", "adapter_config.json"}
_LOADED |= {"preprocessor_config.json", "diffusion_pytorch_model.safetensors.index.json"}


class FileMark(Record):
    """Size in bytes and SHA-256 of a file, by which it is known again."""

    bytes: NonNegativeInt
    sha256: str


class WeightHashes(Record):
    """Hashes of a model that do not depend on how its tensors are laid out in files.

    Attributes:
        dense: SHA-256 over name, dtype, shape and bytes of each tensor of the dense model, ordered by name.
        routing: the same over the tensors of routers and fallbacks.
        plan: hash of the config's fields that decide what a layer computes (`moh_llm.records.identity.hash_plan`);
            None for a dense model.
    """

    dense: str
    routing: str
    plan: str | None = None

    def difference(self, other: "WeightHashes") -> str | None:
        """What differs, in words; None where nothing does. An unknown plan equals every plan."""
        if self.dense != other.dense:
            return "weights of the dense part"
        if self.routing != other.routing:
            return "weights of routers and fallbacks"
        if None not in (self.plan, other.plan) and self.plan != other.plan:
            return "a head plan or architecture (config.json)"
        return None


class Seal(Record):
    """`seal.json`: the marks of a folder's files by name, and the hashes of its model."""

    files: dict[str, FileMark]
    model: WeightHashes


def write_seal(folder: Path, model: WeightHashes) -> None:
    """Seal a model's folder, all files of which are written; ``model`` are its hashes."""
    (folder / SEAL).unlink(missing_ok=True)
    Seal(files=mark_files(folder), model=model).write(folder / SEAL)


def add_to_seal(folder: Path, name: str) -> None:
    """Take a file that was written later into the folder's seal, if it has one."""
    if (seal := read_seal(folder)) is not None:
        (folder / SEAL).unlink()  # it may be linked to another folder's
        Seal(files=seal.files | mark_files(folder, [name]), model=seal.model).write(folder / SEAL)


def read_seal(folder: Path) -> Seal | None:
    """The folder's seal; None where it has none. Raises UserError for a malformed one."""
    path = folder / SEAL
    return Seal.read(path) if path.is_file() else None


def find_changes(folder: Path, seal: Seal) -> dict[str, str]:
    """Files that differ from the seal, and how: ``{"config.json": "was changed (1,595 bytes instead of 1,596)"}``.

    Files that people edit may differ, and so may code: this package runs its own, and `moh_llm.hub.checks.check_files`
    compares the two.
    """
    names = [name for name in seal.files if name not in EDITABLE and not name.startswith(LICENCE_NAMES)]
    names = [name for name in names if not name.endswith(".py")]
    with ThreadPoolExecutor(_THREADS) as threads:  # hashlib computes beside other threads
        faults = zip(names, threads.map(lambda name: _fault(folder / name, seal.files[name]), names), strict=True)
        found = {name: fault for name, fault in faults if fault}
    loaded = (path.name for path in folder.iterdir() if path.name in _LOADED or path.suffix == ".safetensors")
    return found | {name: "was added later" for name in loaded if name not in seal.files}


def mark_files(folder: Path, names: Container[str] | None = None) -> dict[str, FileMark]:
    """Size and SHA-256 of each file of a folder, or of those that are named, by name."""
    paths = sorted(path for path in folder.iterdir() if path.is_file() and (names is None or path.name in names))
    with ThreadPoolExecutor(_THREADS) as threads:
        hashes = list(threads.map(_sha256, paths))
    return {path.name: FileMark(bytes=path.stat().st_size, sha256=of) for path, of in zip(paths, hashes, strict=True)}


def find_fault(folder: Path, files: Mapping[str, FileMark]) -> str | None:
    """The first of ``files`` that is missing or differs from its mark, and how; None where all are as marked."""
    return next((f"{name} {fault}" for name, mark in files.items() if (fault := _fault(folder / name, mark))), None)


def describe_changes(changes: Mapping[str, str]) -> str:
    """The first of the changed files and how it changed, and the number of the others."""
    (name, how), *others = changes.items()
    return f"{name} {how}" + (f" (and {len(others)} more files changed)" if others else "")


def _fault(path: Path, mark: FileMark) -> str | None:
    if not path.is_file():
        return "is missing"
    if (size := path.stat().st_size) != mark.bytes:
        return f"was changed ({size:,} bytes instead of {mark.bytes:,})"
    return None if _sha256(path) == mark.sha256 else "was changed (other bytes than when it was written)"
