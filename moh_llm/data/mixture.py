"""A mixture: named sources of text, each with its share of the tokens.

A mixture file is YAML::

    name: mine
    validation_share: 0.01          # of each source's documents, chosen by a hash of the document
    sources:
      web:
        weight: 3                   # share of tokens; weights are normalised
        files: web/*.jsonl.zst      # or: hub + data_files, urls, url_list, builtin
        text_field: body            # default: the first known name in a file's first record
        filters: {meta.language: [en, de], score: {min: 0.5}}
        max_epochs: 4
"""

import difflib
import glob
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from moh_llm.addresses import shown, shown_in, without_passwords
from moh_llm.errors import UserError
from moh_llm.reading import check_path, expand_home, read_yaml

# Text that every Python carries, so that everything runs with no download: see data/opening.py.
BUILTIN_SOURCES = ("python_topics", "python_docstrings", "python_sources")
FORMATS = ("jsonl", "parquet", "text")
_LOCATIONS = ("files", "hub", "urls", "url_list", "builtin")


@dataclass(frozen=True)
class Source:
    """One source: `weight` is its share of the tokens; one of five fields says where it lies.

    Attributes:
        files: local paths or globs.
        hub: a Hub dataset's id; `data_files` are paths or globs in it, at `revision`.
        urls: the files' addresses.
        url_list: path or address of a text with one address a line; `match` is a glob that keeps some.
        builtin: one of `BUILTIN_SOURCES`.
        format: one of `FORMATS`; None: by the files' endings.
        text_field: dotted name of the field that holds the text; None: a known name.
        filters: dotted field name -> the value, the values (list), or the range (``{min:, max:}``)
            of the records to keep.
        max_epochs: how often training may go through the source; None: no bound.
    """

    name: str
    weight: float
    files: tuple[str, ...] = ()
    hub: str | None = None
    data_files: tuple[str, ...] = ()
    revision: str | None = None
    urls: tuple[str, ...] = ()
    url_list: str | None = None
    match: str | None = None
    builtin: str | None = None
    format: str | None = None
    text_field: str | None = None
    filters: dict[str, Any] = field(default_factory=dict)
    max_epochs: float | None = None


@dataclass(frozen=True)
class Mixture:
    """Sources whose weights sum to 1, and the share of each one's documents held out for validation.

    `weight_sum` is what the weights summed to before they were normalised.
    """

    name: str
    sources: tuple[Source, ...]
    validation_share: float = 0.05
    weight_sum: float = field(default=1.0, compare=False)

    def describe(self) -> str:
        """One line: the sources, and whether their weights were normalised."""
        text = f"mixture {self.name}: {len(self.sources)} source{'s' if len(self.sources) > 1 else ''}"
        if math.isclose(self.weight_sum, 1, abs_tol=1e-9):
            return text
        return f"{text}; weights sum to {self.weight_sum:.6g} and were normalised to shares of 1"


EMBEDDED = Mixture(
    name="embedded",
    sources=(
        Source("python_topics", 0.4, builtin="python_topics"),
        Source("python_docstrings", 0.3, builtin="python_docstrings"),
        Source("python_sources", 0.3, builtin="python_sources"),
    ),
    validation_share=0.1,
)


def load_mixture(path_or_name: str | Path) -> Mixture:
    """Read a mixture file, or the built-in mixture ``embedded``. Weights are normalised to sum to 1.

    Local paths are relative to the mixture file, and ``$NAME`` in them is replaced by the environment
    variable. Whether the files exist is asked when they are needed (`locate`).

    Raises:
        UserError: the file is missing or not YAML, a key is unknown, or a value cannot be used.
    """
    path = Path(path_or_name)
    if not path.is_file() and str(path_or_name) == EMBEDDED.name:
        return EMBEDDED
    try:
        record = read_yaml(path)
    except UserError as error:
        raise UserError(f"mixture {error}" + ("" if path.exists() else "; name a YAML file, or 'embedded'")) from error
    if not isinstance(record, dict):
        raise UserError(f"mixture {path} must be a map with the keys name, sources and validation_share")
    _check_keys(record, ("name", "sources", "validation_share"), f"mixture {path}")
    share = record.get("validation_share", Mixture.validation_share)
    if not _is_number(share) or not 0 < share < 1:
        raise UserError(f"mixture {path}: validation_share={share} must lie between 0 and 1")
    sources = record.get("sources")
    if not isinstance(sources, dict) or not sources:
        raise UserError(f"mixture {path}: sources must name at least one source")
    parsed = [_source(str(name), values, path) for name, values in sources.items()]
    return _normalised(str(record.get("name") or path.stem), parsed, float(share))


def mixture_from_files(files: Sequence[str], validation_share: float = Mixture.validation_share) -> Mixture:
    """A mixture of the given text files (paths or globs), each argument an equal share of the tokens."""
    sources = [Source(file, 1.0, (_expanded(file, Path(), f"text file {file}"),)) for file in files]
    return _normalised("files", sources, validation_share)


def mixture_from_arguments(arguments: Sequence[str]) -> Mixture:
    """What ``--calibration`` takes: one mixture (a ``.yaml`` file or a name) or any number of text files."""
    if len(arguments) == 1 and (arguments[0].endswith((".yaml", ".yml")) or arguments[0] == EMBEDDED.name):
        return load_mixture(arguments[0])
    return mixture_from_files(arguments)


def _source(name: str, values: Any, path: Path) -> Source:
    where = f"mixture {path}, source {name}"
    if not isinstance(values, dict):
        raise UserError(f"{where}: must be a map with weight and one of {', '.join(_LOCATIONS)}")
    _check_keys(values, tuple(f.name for f in fields(Source) if f.name != "name"), where)
    values = {key: value for key, value in values.items() if value is not None}  # a key left blank
    if not _is_number(values.get("weight")) or not 0 < values["weight"] < 1e100:
        raise UserError(f"{where}: weight={values.get('weight')} must be a positive number")
    if sum(key in values for key in _LOCATIONS) != 1:
        raise UserError(f"{where}: give exactly one of {', '.join(_LOCATIONS)}")
    for key, needs in (("data_files", "hub"), ("revision", "hub"), ("match", "url_list")):
        if key in values and needs not in values:
            raise UserError(f"{where}: {key} goes with {needs}, which is not given")
    found: dict[str, Any] = {"weight": float(values["weight"])}
    for key in ("files", "data_files", "urls"):
        if key in values:
            found[key] = _texts(values[key], f"{where}: {key}")
    for key in ("hub", "revision", "url_list", "match", "builtin", "format", "text_field"):
        if key in values:
            (found[key],) = _texts(values[key], f"{where}: {key}", several=False)
    if "files" in found:
        found["files"] = tuple(_expanded(pattern, path.parent, where) for pattern in found["files"])
    if "url_list" in found and "://" not in found["url_list"]:
        found["url_list"] = _expanded(found["url_list"], path.parent, where)
    for address in (*found.get("urls", ()), found.get("url_list", "")):
        _check_address(address, where)
    if "hub" in found and "data_files" not in found:
        raise UserError(f"{where}: hub={found['hub']} needs data_files, for example data/*.parquet")
    if found.get("builtin", BUILTIN_SOURCES[0]) not in BUILTIN_SOURCES:
        raise UserError(f"{where}: builtin={found['builtin']} must be one of {', '.join(BUILTIN_SOURCES)}")
    if found.get("format", FORMATS[0]) not in FORMATS:
        raise UserError(f"{where}: format={found['format']} must be one of {', '.join(FORMATS)}")
    if (epochs := values.get("max_epochs")) is not None:
        if not _is_number(epochs) or not 0 < epochs < 1e9:
            raise UserError(f"{where}: max_epochs={shown_in(str(epochs)[:40])} must be above 0 and below 1e9")
        found["max_epochs"] = float(epochs)
    found["filters"] = _filters(values.get("filters", {}), where)
    return Source(name, **found)


def _filters(filters: Any, where: str) -> dict[str, Any]:
    if not isinstance(filters, dict):
        raise UserError(f"{where}: filters must map a field's name to a value, a list of values or {{min:, max:}}")
    for name, accepted in filters.items():
        if isinstance(accepted, dict):
            _check_keys(accepted, ("min", "max"), f"{where}, filter {name}")
            low, high = accepted.get("min", -math.inf), accepted.get("max", math.inf)
            if not accepted or not (_is_number(low) and _is_number(high) and low <= high):
                raise UserError(f"{where}, filter {name}: min and max must be numbers, the first not above the second")
            if not all(map(_is_finite, accepted.values())):
                raise UserError(f"{where}, filter {name}: min and max must be finite; leave out what is not meant")
        elif accepted is None or accepted == []:
            raise UserError(f"{where}, filter {name}: no value is given, so nothing would be kept")
        elif not all(map(_is_finite, accepted if isinstance(accepted, list) else [accepted])):
            raise UserError(f"{where}, filter {name}: a value must be a text, a finite number, true or false")
    return {str(name): accepted for name, accepted in filters.items()}


def _texts(value: Any, where: str, several: bool = True) -> tuple[str, ...]:
    values = value if several and isinstance(value, list) else [value]
    if not values or not all(isinstance(text, str) and text for text in values):
        raise UserError(f"{where}={shown_in(str(value))} must be a text" + (" or a list of texts" if several else ""))
    return tuple(values)


def _check_address(address: str, where: str) -> None:
    try:
        urlsplit(address)
    except ValueError as error:
        raise UserError(f"{where}: {shown(address)} is not an address: {error}") from error


def _expanded(pattern: str, root: Path, where: str) -> str:
    expanded = os.path.expandvars(pattern)
    if unset := re.search(r"\$\{?(\w+)", expanded):
        raise UserError(f"{where}: {pattern} needs the environment variable {unset[1]}; set it to a folder")
    # Absolute, so that a record means the same files wherever it is read.
    check_path(expanded, where)
    home = expand_home(expanded)
    path = os.path.abspath(root / home)
    if glob.has_magic(expanded) and not os.path.isfile(path) and not home.is_absolute():
        return os.path.join(glob.escape(os.path.abspath(root)), expanded)  # brackets of the folder are no pattern
    return path


def _normalised(name: str, sources: Sequence[Source], validation_share: float) -> Mixture:
    total = math.fsum(source.weight for source in sources)
    # A name is shown and recorded; on the command line a file's name is what was typed.
    shares = [
        Source(**{**vars(source), "name": without_passwords(source.name), "weight": source.weight / total})
        for source in sources
    ]
    return Mixture(without_passwords(name), tuple(shares), validation_share, total)


def _is_finite(value: Any) -> bool:
    """Whether a filter's value is one that JSON can hold, and no list or map."""
    return isinstance(value, str | bool) or (_is_number(value) and -1e300 < value < 1e300)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_keys(record: dict[str, Any], known: tuple[str, ...], where: str) -> None:
    for key in record:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            raise UserError(f"{where}: unknown key {key!r}" + (f"; did you mean {close[0]!r}?" if close else ""))
