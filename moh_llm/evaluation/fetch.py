"""Downloading the data of a suite into the folder that ``--data-dir`` reads, with a manifest of its files.

DIR/<dataset, / as __>/<config>/<split>.jsonl
DIR/MANIFEST.json    by file: dataset, config, split, commit, source, number of rows, SHA-256

Datasets that the Hub serves by script are downloaded from the script's own sources (``suites/sources/converted.yaml``)
and converted to the rows that the script makes.
"""

import csv
import functools
import hashlib
import http.client
import io
import json
import shutil
import tempfile
import urllib.request
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moh_llm.errors import UserError
from moh_llm.evaluation.suite import SCRIPT_DATASETS, Suite, data_file
from moh_llm.evaluation.tasks import one_line, quiet
from moh_llm.files import sha256, write_text
from moh_llm.reading import read_yaml
from moh_llm.records.base import Record
from moh_llm.terminal import say

MANIFEST = "MANIFEST.json"
Rows = Iterable[dict[str, Any]]


class Entry(Record):
    """One file of the folder."""

    dataset: str
    config: str
    split: str
    revision: str
    source: str
    rows: int
    sha256: str


class Manifest(Record):
    """The files of the folder, by their path in it; written before each file."""

    files: dict[str, Entry]


@dataclass(frozen=True)
class _Wanted:
    """The splits of one config of one dataset that a suite reads, with the file of each."""

    dataset: str
    config: str
    revision: str | None
    files: dict[str, Path] = field(default_factory=dict)


class _Refused(Exception):
    """A dataset cannot be fetched; the others are still tried."""


def fetch(suite: Suite, folder: Path, say: Callable[[str], None] = say) -> list[str]:
    """Download the files of ``suite`` that ``folder`` lacks; returns a line for each that cannot be fetched.

    A file is written in one step, and kept if its bytes and commit are those of the manifest. Raises UserError when the
    folder cannot be used, or when there is no network.
    """
    if suite.data:
        raise UserError(f"suite {suite.name} carries its own data; there is nothing to fetch")
    held = _Held(folder)
    sources = read_yaml(SCRIPT_DATASETS)
    wanted = _wanted_by(suite, folder)
    problems: list[str] = []
    with tempfile.TemporaryDirectory(prefix="moh-fetch-") as temporary:
        download = functools.cache(functools.partial(_download, Path(temporary)))
        current_commit = functools.cache(_current_commit)
        for number, item in enumerate(wanted, start=1):
            name = f"[{number}/{len(wanted)}] {item.dataset} {item.config}"
            source = sources.get(item.dataset)
            revision = source["revision"] if source else item.revision
            missing = [split for split, file in item.files.items() if not held.whole(file, revision)]
            if not missing:
                say(f"{name}: already here")
                continue
            try:
                revision = revision or current_commit(item.dataset)
                found = _convert(item, source, missing, download) if source else _from_hub(item, missing, revision)
                for split, (rows, where) in found.items():
                    about = {"dataset": item.dataset, "config": item.config, "split": split, "revision": revision}
                    held.write(item.files[split], rows, about | {"source": where})
            except _Refused as error:
                say(f"{name}: failed")
                problems.append(f"{item.dataset} {item.config}: {error}")
                continue
            say(f"{name}: {', '.join(f'{held.rows(item.files[split])} {split}' for split in missing)}")
    return problems


def _wanted_by(suite: Suite, folder: Path) -> list[_Wanted]:
    """All files that a suite reads, by dataset and config, in the suite's order."""
    found: dict[tuple[str, str], _Wanted] = {}
    for benchmark in suite.benchmarks:
        for part in benchmark.expand():
            item = _Wanted(benchmark.dataset, part.config, benchmark.revision)
            item = found.setdefault((benchmark.dataset, part.config), item)
            for split in benchmark.splits():
                item.files[split] = data_file(folder, benchmark, part, split)
    return list(found.values())


class _Held:
    """Content of the folder according to its manifest."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._path = folder, folder / MANIFEST
        try:
            self._manifest = Manifest.read(self._path) if self._path.is_file() else Manifest(files={})
        except UserError as error:
            message = f"{self._path} was not made by moh-llm data fetch-benchmarks; name another folder"
            raise UserError(message) from error

    def rows(self, file: Path) -> int:
        """Number of rows of a file that the folder holds."""
        return self._manifest.files[self._name(file)].rows

    def whole(self, file: Path, revision: str | None) -> bool:
        """Whether ``file`` is complete and of that commit (None: of any). Raises UserError if others made it."""
        entry = self._manifest.files.get(self._name(file))
        if entry is None and file.exists():
            raise UserError(f"{file} was not made by this command; move it away or name another folder")
        if entry is None or not file.is_file() or revision not in (None, entry.revision):
            return False
        return sha256(file) == entry.sha256

    def write(self, file: Path, rows: Rows, about: dict[str, str]) -> None:
        """Write one file and, before it, its entry. Raises UserError if the disk refuses."""
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        if not lines:
            raise _Refused(f"{about['split']} has no rows")
        text = "".join(lines)
        digest = hashlib.sha256(text.encode()).hexdigest()
        self._manifest.files[self._name(file)] = Entry(**about, rows=len(lines), sha256=digest)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot make {file.parent}: {error.strerror}; name another folder") from error
        Manifest(files=dict(sorted(self._manifest.files.items()))).write(self._path)
        write_text(file, text)

    def _name(self, file: Path) -> str:
        return file.relative_to(self._folder).as_posix()


def _current_commit(dataset: str) -> str:
    """The commit that the Hub serves now, for a dataset that a suite does not pin."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return HfApi().dataset_info(dataset).sha or ""
    except HfHubHTTPError as error:
        raise _Refused(one_line(error)) from error
    except Exception as error:  # of whichever library carries the request
        raise UserError(f"the Hub cannot be reached ({error}); run this where there is a network") from error


def _from_hub(item: _Wanted, splits: list[str], revision: str) -> dict[str, tuple[Rows, str]]:
    """Rows by split, from the Hub. A config named "default" is the dataset's own default, as for lm-eval."""
    import datasets

    config = None if item.config == "default" else item.config
    try:
        with quiet():
            loaded = datasets.load_dataset(item.dataset, config, split=list(splits), revision=revision)
    except ConnectionError as error:
        # The other requests would time out as well.
        raise UserError(f"the Hub cannot be reached ({error}); run this where there is a network") from error
    except (OSError, ValueError, RuntimeError, KeyError, datasets.exceptions.DatasetsError) as error:
        raise _Refused(one_line(error)) from error
    return {split: (rows, f"hub:{item.dataset}@{revision}") for split, rows in zip(splits, loaded, strict=True)}


def _download(folder: Path, address: str, expected: str) -> Path:
    """A file from a plain address, compared with its hash."""
    file = folder / f"{hashlib.sha256(address.encode()).hexdigest()[:8]}-{address.rsplit('/', 1)[-1]}"
    try:
        with urllib.request.urlopen(address, timeout=60) as answer, file.open("wb") as out:
            shutil.copyfileobj(answer, out, 1 << 20)
    except (OSError, http.client.HTTPException) as error:
        raise _Refused(f"{address}: {error}") from error
    if (found := sha256(file)) != expected:
        raise _Refused(f"{address} is not the file that the suite goes with: SHA-256 {found}, not {expected}")
    return file


def _convert(
    item: _Wanted, source: dict[str, Any], splits: list[str], download: Callable[[str, str], Path]
) -> dict[str, tuple[Rows, str]]:
    converters = {"logiqa": _convert_logiqa, "cmmlu": _convert_cmmlu}
    found: dict[str, tuple[Rows, str]] = {}
    for split in splits:
        if split not in source["files"]:
            raise _Refused(f"its source has no split {split}, only {', '.join(source['files'])}")
        file = source["files"][split]
        path = download(file["address"], file["sha256"])
        found[split] = (converters[source["converter"]](path, item.config, split), file["address"])
    return found


# The sources' hashes are checked, so their contents are not.
def _convert_logiqa(file: Path, config: str, split: str) -> Rows:
    """LogiQA's text: blocks of label, passage, question and four options, separated by empty lines.

    Like the script, which published scores used, it puts a blank behind every full stop, also in numbers.
    """

    def spaced(line: str) -> str:
        return line.replace(".", ". ").strip()

    for block in file.read_text(encoding="utf-8").strip().split("\n\n"):
        label, passage, question, *options = block.split("\n")
        texts = [spaced(option[2:]) for option in options]  # less the "A."
        yield {"label": label.strip(), "context": spaced(passage), "question": spaced(question), "options": texts}


def _convert_cmmlu(file: Path, config: str, split: str) -> Rows:
    """One subject of CMMLU's archive: ``<split>/<config>.csv`` without its first column, a row number."""
    member = f"{split}/{config}.csv"
    with zipfile.ZipFile(file) as archive:
        names = [name for name in archive.namelist() if name == member or name.endswith(f"/{member}")]
        if len(names) != 1:
            raise _Refused(f"CMMLU's {file.name} holds {len(names)} files {member}, not one")
        text = archive.read(names[0]).decode("utf-8-sig")
    for row in csv.DictReader(io.StringIO(text, newline="")):
        yield {field: row[field] for field in ("Question", "A", "B", "C", "D", "Answer")}
