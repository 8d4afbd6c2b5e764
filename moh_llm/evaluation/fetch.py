"""Downloading the data of a suite into the folder that ``--data-dir`` reads.

DIR/<dataset, / as __>/<config>/<split>.jsonl

Datasets that the Hub serves by script, which `datasets` does not run, are downloaded from the script's own sources
(``suites/sources/converted.yaml``) and converted to the rows that the script makes.
"""

import csv
import functools
import hashlib
import io
import json
import urllib.request
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from moh_llm.errors import UserError
from moh_llm.evaluation.suite import SCRIPT_DATASETS, Suite, data_file
from moh_llm.evaluation.tasks import one_line, quiet
from moh_llm.files import write_text
from moh_llm.reading import read_yaml
from moh_llm.terminal import say

Rows = Iterable[dict[str, Any]]


def fetch(suite: Suite, folder: Path, say: Callable[[str], None] = say) -> list[str]:
    """Download the files of ``suite`` that ``folder`` lacks; returns a line for each that cannot be fetched.

    A file appears whole or not at all, and one that is there is kept as it is. Raises UserError when the folder cannot
    be used, or when there is no network.
    """
    import datasets

    if suite.data:
        raise UserError(f"suite {suite.name} carries its own data; there is nothing to fetch")
    sources, problems = read_yaml(SCRIPT_DATASETS), []
    download = functools.cache(_download)  # all subjects of CMMLU are in one archive
    wanted = {
        (benchmark.dataset, part.config, split): (data_file(folder, benchmark, part, split), benchmark.revision)
        for benchmark in suite.benchmarks
        for part in benchmark.expand()
        for split in benchmark.splits()
    }
    for number, ((dataset, config, split), (file, revision)) in enumerate(wanted.items(), start=1):
        name = f"[{number}/{len(wanted)}] {dataset} {config} {split}"
        if file.is_file():
            say(f"{name}: already here")
            continue
        try:
            if dataset in sources:
                rows = _convert(sources[dataset], config, split, download)
            else:
                with quiet():  # a config named "default" is the dataset's own default, as for lm-eval
                    own = None if config == "default" else config
                    rows = datasets.load_dataset(dataset, own, split=split, revision=revision)
            lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        except ConnectionError as error:  # every other request would time out, too
            raise UserError(f"the Hub cannot be reached ({error}); run this where there is a network") from error
        except Exception as error:  # of whichever library reads the dataset
            say(f"{name}: failed")
            problems.append(f"{dataset} {config} {split}: {one_line(error)}")
            continue
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot make {file.parent}: {error.strerror}; name another folder") from error
        write_text(file, "".join(lines))
        say(f"{name}: {len(lines)} rows")
    return problems


def _convert(source: dict[str, Any], config: str, split: str, download: Callable[[str, str], bytes]) -> Rows:
    if split not in source["files"]:
        raise ValueError(f"its source has no split {split}, only {', '.join(source['files'])}")
    converters = {"logiqa": convert_logiqa, "cmmlu": convert_cmmlu}
    file = source["files"][split]
    return converters[source["converter"]](download(file["address"], file["sha256"]), config, split)


def _download(address: str, expected: str) -> bytes:
    with urllib.request.urlopen(address, timeout=60) as answer:
        content: bytes = answer.read()
    if (found := hashlib.sha256(content).hexdigest()) != expected:
        raise ValueError(f"{address} has SHA-256 {found}, and the suite goes with {expected}")
    return content


def convert_logiqa(content: bytes, config: str, split: str) -> Rows:
    """LogiQA's text: blocks of label, passage, question and four options, separated by empty lines.

    Like the script, which published scores used, it puts a blank behind every full stop, also in numbers.
    """

    def spaced(line: str) -> str:
        return line.replace(".", ". ").strip()

    for block in content.decode().replace("\r\n", "\n").strip().split("\n\n"):
        label, passage, question, *options = block.split("\n")
        texts = [spaced(option[2:]) for option in options]  # less the "A."
        yield {"label": label.strip(), "context": spaced(passage), "question": spaced(question), "options": texts}


def convert_cmmlu(content: bytes, config: str, split: str) -> Rows:
    """One subject of CMMLU's archive: ``<split>/<config>.csv`` without its first column, a row number."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        text = archive.read(f"{split}/{config}.csv").decode("utf-8-sig")
    for row in csv.DictReader(io.StringIO(text, newline="")):
        yield {field: row[field] for field in ("Question", "A", "B", "C", "D", "Answer")}
