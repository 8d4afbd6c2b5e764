"""A mixture: named sources of text, each with its share of the tokens.

A mixture file is YAML::

    name: mine
    validation_share: 0.01          # of each source's documents, a hash of the document chooses them
    sources:
      web:
        weight: 3                   # share of tokens; weights are normalised
        files: web/*.jsonl.zst      # or: hub + data_files, urls, url_list, builtin
        text_field: body            # default: the first known name that a file's records have
        filters: {meta.language: [en, de], score: {min: 0.5}}
        max_epochs: 4
"""

import difflib
import glob
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WrapValidator
from pydantic.dataclasses import dataclass as checked_dataclass

from moh_llm.data.notes import note
from moh_llm.data.patterns import matching
from moh_llm.errors import UserError, in_unicode, shown, shown_in, without_passwords
from moh_llm.reading import check_path, expand_home, read_yaml

_STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
_LOCATIONS = ("files", "hub", "urls", "url_list", "builtin")
_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument", "multiple_argument_values")  # pydantic's types of error
_Made = TypeVar("_Made")
CHAT_DATE = "2024-07-26"  # what the templates of Llama 3 write where no clock is at hand


def _check_filter(accepted: Any) -> Any:
    """Raise ValueError for what is no filter: a value, a list of values, or a range."""
    if isinstance(accepted, dict):
        if not accepted or not accepted.keys() <= {"min", "max"}:
            raise ValueError("a range has the keys min and max, or one of them")
        low, high = accepted.get("min", -math.inf), accepted.get("max", math.inf)
        if any(isinstance(v, bool) or not _is_number(v) for v in accepted.values()) or low > high:
            raise ValueError("min and max must be finite numbers, the first not above the second")
    elif accepted is None or accepted == []:
        raise ValueError("no value is given, so no record would be kept")
    elif not all(isinstance(v, str) or _is_number(v) for v in (accepted if isinstance(accepted, list) else [accepted])):
        raise ValueError("a value must be a text, a finite number, true or false")
    return accepted


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and -1e300 < value < 1e300


def _check_address(address: str) -> str:
    try:
        urlsplit(address)
    except ValueError as error:
        raise ValueError(f"{shown(address)} is not an address: {error}") from error
    return address


def _listed(value: Any) -> Any:
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


def _check_date(text: str) -> str:
    """A date as it is recorded: 2024-07-26."""
    try:
        return date.fromisoformat(text).isoformat()
    except ValueError as error:
        raise ValueError("a date must be written as 2024-07-26") from error


def _bytes_too(path: Any, check: Callable[[Any], Any]) -> Any:
    """A path may hold bytes that are not UTF-8, which no other text may."""
    return path if isinstance(path, str) and in_unicode(path) != path else check(path)


_Text = Annotated[str, Field(min_length=1)]
_Texts = Annotated[tuple[_Text, ...], BeforeValidator(_listed)]
_Paths = Annotated[tuple[Annotated[_Text, WrapValidator(_bytes_too)], ...], BeforeValidator(_listed)]
_Address = Annotated[_Text, AfterValidator(_check_address)]


@checked_dataclass(frozen=True, config=_STRICT)
class Source:
    """One source: `weight` is its share of the tokens; one of five fields gives its location.

    Attributes:
        files: local paths or globs.
        hub: a Hub dataset's id; `data_files` are paths or globs in it, at `revision`.
        urls: the files' addresses.
        url_list: path or address of a text with one address a line; `match` is a glob that keeps some.
        builtin: text that every Python carries, so that everything runs with no download: see data/opening.py.
        format: of the files; None: by their endings.
        type: what a record is: a text, a conversation (`messages`), or `prompt` and `completion` (data/chat.py).
        chat_date: the date that a chat template writes which asks for today's; text does not depend on the day.
        text_field: dotted name of the field that holds the text; None: a known name.
        filters: dotted field name -> the value, the values (list), or the range (``{min:, max:}``)
            of the records to keep.
        max_epochs: how often training may go through the source; None: no bound.
    """

    name: str
    weight: Annotated[float, Field(gt=0, lt=1e100)]
    files: _Paths = ()
    hub: _Text | None = None
    data_files: _Texts = ()
    revision: _Text | None = None
    urls: Annotated[tuple[_Address, ...], BeforeValidator(_listed)] = ()
    url_list: _Address | None = None
    match: _Text | None = None
    builtin: Literal["python_topics", "python_docstrings", "python_sources"] | None = None
    format: Literal["jsonl", "parquet", "text"] | None = None
    type: Literal["text", "messages", "prompt_completion"] = "text"
    chat_date: Annotated[str, AfterValidator(_check_date)] = CHAT_DATE
    text_field: _Text | None = None
    filters: dict[str, Annotated[Any, AfterValidator(_check_filter)]] = field(default_factory=dict)
    max_epochs: Annotated[float, Field(gt=0, lt=1e9)] | None = None


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


class _File(BaseModel):
    """A mixture file, the values of its sources not yet checked."""

    model_config = _STRICT
    name: str | None = None
    validation_share: float = Field(default=Mixture.validation_share, gt=0, lt=1)
    sources: dict[Any, dict[str, Any]] = Field(min_length=1)


def load_mixture(path_or_name: str | Path) -> Mixture:
    """Read a mixture file, or the built-in mixture ``embedded``. Weights are normalised to sum to 1.

    Local paths are relative to the mixture file, and ``$NAME`` in them is replaced by the environment
    variable. Whether the files exist is checked when they are needed (`locate`).

    Raises:
        UserError: the file is missing or not YAML, a key is unknown, or a value cannot be used.
    """
    path = Path(path_or_name)
    if not path.is_file() and str(path_or_name) == EMBEDDED.name:
        return EMBEDDED
    try:
        content = read_yaml(path)
    except UserError as error:
        raise UserError(f"mixture {error}" + ("" if path.exists() else "; name a YAML file, or 'embedded'")) from error
    file = _made(lambda: _File.model_validate(content), f"mixture {path}", _File.model_fields)
    sources = [_source(str(name), values, path) for name, values in file.sources.items()]
    return _normalised(file.name or path.stem, sources, file.validation_share)


def mixture_from_files(files: Sequence[str], validation_share: float = Mixture.validation_share) -> Mixture:
    """A mixture of the given text files (paths or globs), each an equal share; a file given twice is read once."""
    sources: list[Source] = []
    read: dict[str, str] = {}
    for file in files:
        where = f"text file {file}"
        pattern = _expanded(file, Path(), where)
        source = Source(in_unicode(file), 1.0, (pattern,))
        try:
            paths = [path for path in matching(pattern, where) if not os.path.isdir(path)]
        except OSError:  # `locate` says which
            paths = []
        found = {path: os.path.realpath(path) for path in paths or [pattern]}
        new = [path for path, real in found.items() if real not in read]
        if again := [path for path in found if path not in new]:
            more = f", and {len(again) - 1:,} more like it" if len(again) > 1 else ""
            note(f"text file {again[0]} is {read[found[again[0]]]}, which is given, too{more}; it is read once")
        if new:
            sources.append(replace(source, files=tuple(new)) if again else source)
        read |= {found[path]: path for path in new}
    return _normalised("files", sources, validation_share)


def mixture_from_arguments(arguments: Sequence[str]) -> Mixture:
    """The mixture of ``--calibration``: one mixture (a ``.yaml`` file or a name) or any number of text files."""
    if len(arguments) == 1 and (arguments[0].endswith((".yaml", ".yml")) or arguments[0] == EMBEDDED.name):
        return load_mixture(arguments[0])
    return mixture_from_files(arguments)


def _made(make: Callable[[], _Made], where: str, known: Sequence[str]) -> _Made:
    """Call ``make``; a fault that pydantic finds, an unknown key first, becomes a UserError of one line."""
    try:
        return make()
    except ValidationError as error:
        faults = error.errors(include_url=False)
    fault = next((fault for fault in faults if fault["type"] in _UNKNOWN), faults[0])
    key, kind = ".".join(map(str, fault["loc"])), fault["type"]
    if kind in _UNKNOWN:
        close = difflib.get_close_matches(key, known, n=1)
        raise UserError(f"{where}: unknown key {key!r}" + (f"; did you mean {close[0]!r}?" if close else ""))
    if kind == "missing":
        raise UserError(f"{where}: {key} is missing")
    if not key:
        raise UserError(f"{where} must be a map with the keys {', '.join(known)}")
    given = shown_in(repr(fault["input"]))
    given = given if len(given) <= 60 else f"{given[:57]}..."
    message = fault["ctx"]["error"] if kind == "value_error" else fault["msg"]
    raise UserError(f"{where}: {key}={given}: {message}")


def _source(name: str, values: dict[str, Any], path: Path) -> Source:
    where = f"mixture {path}, source {name}"
    values = {key: value for key, value in values.items() if value is not None}  # without keys left blank
    source = _made(lambda: Source(name, **values), where, [f.name for f in fields(Source) if f.name != "name"])
    if sum(bool(getattr(source, key)) for key in _LOCATIONS) != 1:
        raise UserError(f"{where}: give exactly one of {', '.join(_LOCATIONS)}")
    for key, needs in (("data_files", "hub"), ("revision", "hub"), ("match", "url_list")):
        if getattr(source, key) and not getattr(source, needs):
            raise UserError(f"{where}: {key} goes with {needs}, which is not given")
    if source.type == "text" and "chat_date" in values:
        raise UserError(f"{where}: chat_date goes with type: messages or prompt_completion; remove it")
    if source.type != "text" and (source.text_field or source.builtin or source.format == "text"):
        wrong = next(key for key in ("text_field", "builtin", "format") if getattr(source, key))
        raise UserError(f"{where}: {wrong} goes with type: text, and its type is {source.type}; remove one of them")
    if source.filters and source.builtin:
        raise UserError(f"{where}: filters are of records, which the text of builtin is not; remove them")
    if source.hub and not source.data_files:
        raise UserError(f"{where}: hub={source.hub} needs data_files, for example data/*.parquet")
    url_list = source.url_list
    if url_list and "://" not in url_list:
        url_list = _expanded(url_list, path.parent, where)
    files = tuple(_expanded(pattern, path.parent, where) for pattern in source.files)
    return replace(source, files=files, url_list=url_list)


def _expanded(pattern: str, root: Path, where: str) -> str:
    expanded = os.path.expandvars(pattern)
    if unset := re.search(r"\$\{?(\w+)", expanded):
        raise UserError(f"{where}: {pattern} needs the environment variable {unset[1]}; set it to a folder")
    # Absolute, so that a record means the same files wherever it is read.
    check_path(expanded, where)
    home = Path(expand_home(expanded) if expanded.startswith("~") else expanded)
    path = os.path.abspath(root / home)
    if glob.has_magic(expanded) and not os.path.isfile(path) and not home.is_absolute():
        return os.path.join(glob.escape(os.path.abspath(root)), expanded)  # brackets of the folder are no pattern
    return path


def _normalised(name: str, sources: Sequence[Source], validation_share: float) -> Mixture:
    total = math.fsum(source.weight for source in sources)
    # A name is shown and recorded; on the command line a file's name is what was typed.
    shares = [
        replace(
            source,
            name=without_passwords(source.name),
            weight=max(source.weight / total, sys.float_info.min),  # no share is so small that it is 0
        )
        for source in sources
    ]
    return Mixture(without_passwords(name), tuple(shares), validation_share, total)
