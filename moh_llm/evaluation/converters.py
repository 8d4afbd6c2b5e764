"""Datasets that the Hub serves by script: where their files come from, and the rows that the script made of them."""

import csv
import io
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moh_llm.errors import UserError
from moh_llm.evaluation.suite import SUITES
from moh_llm.reading import read_yaml

SOURCES = SUITES / "sources" / "converted.yaml"

Row = dict[str, Any]


def load_sources(path: Path = SOURCES) -> dict[str, Any]:
    """Converter, commit, addresses and hashes by dataset, as ``suites/sources/converted.yaml`` says."""
    return read_yaml(path)


def convert_logiqa(file: Path, config: str, split: str) -> list[Row]:
    """LogiQA's text: blocks of label, passage, question and four options, with an empty line between.

    A blank follows every full stop, inside numbers too, as in the script's rows and so in published scores.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"LogiQA's {file.name} is not text in UTF-8 ({error})") from error
    rows = []
    for number, block in enumerate(text.strip().split("\n\n"), start=1):
        lines = block.split("\n")
        label = lines[0].strip()
        if len(lines) != 7 or label not in ("a", "b", "c", "d"):
            raise UserError(f"LogiQA's {file.name}: item {number} is not a label from a to d and six lines")
        passage, question, *options = lines[1:]
        rows.append(
            {
                "label": label,
                "context": _space_stops(passage),
                "question": _space_stops(question),
                "options": [_space_stops(option[2:]) for option in options],  # less the "A."
            }
        )
    return rows


def convert_cmmlu(file: Path, config: str, split: str) -> list[Row]:
    """One subject of CMMLU's zip: ``<split>/<config>.csv``, with a number of no use in the first column."""
    fields = ("Question", "A", "B", "C", "D", "Answer")
    member = f"{split}/{config}.csv"
    try:
        with zipfile.ZipFile(file) as archive:
            names = [name for name in archive.namelist() if name == member or name.endswith(f"/{member}")]
            if len(names) != 1:
                raise UserError(f"CMMLU's {file.name} holds {len(names)} files {member}, not one")
            text = archive.read(names[0]).decode("utf-8-sig")
    except (zipfile.BadZipFile, UnicodeDecodeError, OSError) as error:
        raise UserError(f"CMMLU's {file.name} cannot be read as a zip of CSV files ({error})") from error
    rows = []
    for number, line in enumerate(csv.DictReader(io.StringIO(text, newline="")), start=1):
        row = {field: line.get(field) for field in fields}
        if None in row.values() or row["Answer"] not in ("A", "B", "C", "D"):
            raise UserError(
                f"CMMLU's {member}: row {number} lacks one of {', '.join(fields)}, or an answer from A to D"
            )
        rows.append(row)
    return rows


CONVERTERS: dict[str, Callable[[Path, str, str], list[Row]]] = {"logiqa": convert_logiqa, "cmmlu": convert_cmmlu}


def _space_stops(text: str) -> str:
    return text.replace(".", ". ").strip()
