"""Downloading the data of a suite into the folder that ``--data-dir`` reads, with a manifest of what it holds.

DIR/<dataset, / as __>/<config>/<split>.jsonl
DIR/MANIFEST.json    by file: dataset, config, split, commit, rows, SHA-256, and where it came from
"""

import hashlib
import http.client
import json
import os
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moh_llm.errors import UserError
from moh_llm.evaluation.converters import CONVERTERS
from moh_llm.evaluation.suite import Suite
from moh_llm.evaluation.tasks import data_file, quiet_data
from moh_llm.files import sha256, write_json
from moh_llm.reading import read_json

MANIFEST = "MANIFEST.json"


@dataclass(frozen=True)
class Wanted:
    """The splits of one config of one dataset that a suite reads, with the file of each."""

    dataset: str
    config: str
    revision: str | None
    files: dict[str, Path]


def fetch(suite: Suite, folder: Path, sources: dict[str, Any], say: Callable[[str], None] = print) -> list[str]:
    """Download what ``suite`` reads and ``folder`` lacks; returns what could not be had, one line each.

    ``sources`` says where datasets come from that the Hub does not serve as files (see `load_sources`). Each
    file is written in one step, and one whose bytes and commit are those of the manifest is kept. Raises
    UserError when the folder cannot be used, or when nothing can be reached.
    """
    if suite.data:
        raise UserError(f"suite {suite.name} carries its own data; there is nothing to fetch")
    manifest = _Manifest(folder)
    problems: list[str] = []
    wanted = wanted_by(suite, folder)
    with tempfile.TemporaryDirectory(prefix="moh-fetch-") as temporary:
        downloads = _Downloads(Path(temporary))
        commits = _Commits()
        for number, item in enumerate(wanted, start=1):
            source = sources.get(item.dataset)
            name = f"[{number}/{len(wanted)}] {item.dataset} {item.config}"
            revision = source["revision"] if source else item.revision
            missing = [split for split, file in item.files.items() if not manifest.holds(file, revision)]
            if not missing:
                say(f"{name}: already here")
                continue
            try:
                if source:
                    found = _convert(item, source, missing, downloads)
                else:
                    revision = revision or commits.of(item.dataset)
                    found = _from_hub(item, missing, revision)
                for split, (rows, where) in found.items():
                    about = {"dataset": item.dataset, "config": item.config, "split": split, "revision": revision}
                    manifest.write(item.files[split], rows, about | {"source": where})
            except _Refused as error:
                say(f"{name}: failed")
                problems.append(f"{item.dataset} {item.config}: {error}")
                continue
            counts = ", ".join(f"{manifest.rows(item.files[split])} {split}" for split in missing)
            say(f"{name}: {counts}")
    return problems + _wrong_counts(suite, folder, manifest)


def wanted_by(suite: Suite, folder: Path) -> list[Wanted]:
    """All files that a suite reads, by dataset and config, in the suite's order."""
    found: dict[tuple[str, str], Wanted] = {}
    for benchmark in suite.benchmarks:
        for part in benchmark.expand():
            item = Wanted(benchmark.dataset, part.config, benchmark.revision, {})
            item = found.setdefault((benchmark.dataset, part.config), item)
            for split in benchmark.splits():
                item.files[split] = data_file(folder, benchmark, part, split)
    return list(found.values())


class _Refused(Exception):
    """One dataset could not be had; others may."""


class _Manifest:
    """The folder's record, written before each file, so that a file it does not name is someone else's."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._path = folder, folder / MANIFEST
        record = read_json(self._path) if self._path.is_file() else {"files": {}}
        if not isinstance(record, dict) or not isinstance(record.get("files"), dict):
            raise UserError(f"{self._path} was not made by moh-llm data fetch-benchmarks; name another folder")
        self._files: dict[str, dict[str, Any]] = record["files"]

    def rows(self, file: Path) -> int:
        """Number of rows of a file that the folder holds."""
        return self._files[self._name(file)]["rows"]

    def holds(self, file: Path, revision: str | None) -> bool:
        """Whether ``file`` is whole and of that commit (None: of any). Raises UserError for a file of other origin."""
        entry = self._files.get(self._name(file))
        if entry is None and file.exists():
            raise UserError(f"{file} was not made by this command; move it away or name another folder")
        if entry is None or not file.is_file() or revision not in (None, entry["revision"]):
            return False
        return sha256(file) == entry["sha256"]

    def write(self, file: Path, rows: Iterable[dict[str, Any]], about: dict[str, Any]) -> None:
        """Write one file and its entry. Raises UserError when the disk refuses."""
        temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
        digest, count = hashlib.sha256(), 0
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as out:
                for row in rows:
                    line = (json.dumps(row, ensure_ascii=False) + "\n").encode()
                    digest.update(line)
                    out.write(line)
                    count += 1
            if count == 0:
                raise _Refused(f"{about['split']} has no rows")
            self._files[self._name(file)] = about | {"rows": count, "sha256": digest.hexdigest()}
            write_json(self._path, {"files": dict(sorted(self._files.items()))})
            os.replace(temporary, file)
        except OSError as error:
            raise UserError(
                f"cannot write {file}: {error.strerror or error}; free some space or name another"
            ) from error
        finally:
            temporary.unlink(missing_ok=True)

    def _name(self, file: Path) -> str:
        return file.relative_to(self._folder).as_posix()


class _Commits:
    """The commit that the Hub serves now, asked once for each dataset that a suite does not pin."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}

    def of(self, dataset: str) -> str:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError

        if dataset not in self._known:
            try:
                self._known[dataset] = HfApi().dataset_info(dataset).sha or ""
            except HfHubHTTPError as error:
                raise _Refused(" ".join(str(error).split())[:200]) from error
            except Exception as error:  # of whichever library carries the request
                raise UserError(f"the Hub cannot be reached ({error}); run this where there is a network") from error
        return self._known[dataset]


class _Downloads:
    """Files from plain addresses, each taken once and compared with its hash."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._have: dict[str, Path] = {}

    def get(self, address: str, expected: str) -> Path:
        if address not in self._have:
            file = self._folder / f"{len(self._have)}-{address.rsplit('/', 1)[-1]}"
            try:
                with urllib.request.urlopen(address, timeout=60) as answer, file.open("wb") as out:
                    while chunk := answer.read(1 << 20):
                        out.write(chunk)
            except (OSError, http.client.HTTPException) as error:
                raise _Refused(f"{address}: {error}") from error
            if (found := sha256(file)) != expected:
                raise _Refused(f"{address} is not the file that the suite goes with: SHA-256 {found}, not {expected}")
            self._have[address] = file
        return self._have[address]


def _convert(
    item: Wanted, source: dict[str, Any], splits: list[str], downloads: _Downloads
) -> dict[str, tuple[Iterable[dict[str, Any]], str]]:
    found: dict[str, tuple[Iterable[dict[str, Any]], str]] = {}
    for split in splits:
        if split not in source["files"]:
            raise _Refused(f"its source has no split {split}, only {', '.join(source['files'])}")
        file = source["files"][split]
        path = downloads.get(file["address"], file["sha256"])
        try:
            found[split] = (CONVERTERS[source["converter"]](path, item.config, split), file["address"])
        except UserError as error:
            raise _Refused(str(error)) from error
    return found


def _from_hub(item: Wanted, splits: list[str], revision: str) -> dict[str, tuple[Iterable[dict[str, Any]], str]]:
    """Rows by split, from the Hub. A config named "default" is the dataset's own default, as for lm-eval."""
    import datasets

    config = None if item.config == "default" else item.config
    try:
        with quiet_data():
            loaded = datasets.load_dataset(item.dataset, config, split=list(splits), revision=revision)
    except ConnectionError as error:
        # All others would wait for the network as long as this one did.
        raise UserError(f"the Hub cannot be reached ({error}); run this where there is a network") from error
    except (OSError, ValueError, RuntimeError, KeyError, datasets.exceptions.DatasetsError) as error:
        raise _Refused(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from error
    return {split: (rows, f"hub:{item.dataset}@{revision}") for split, rows in zip(splits, loaded, strict=True)}


def _wrong_counts(suite: Suite, folder: Path, manifest: _Manifest) -> list[str]:
    """Benchmarks whose number of items is not the suite's; those that are not all there are passed over."""
    problems = []
    for benchmark in suite.benchmarks:
        files = [data_file(folder, benchmark, part, benchmark.eval_split) for part in benchmark.expand()]
        # Several readings of the same items share a file.
        files = list(dict.fromkeys(files))
        if all(manifest.holds(file, None) for file in files):
            items = sum(manifest.rows(file) for file in files)
            if items != benchmark.items:
                problems.append(f"{benchmark.name}: {items} items came, the suite says {benchmark.items}")
    return problems
