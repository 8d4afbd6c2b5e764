"""A mixture: named sources of text and the share of the tokens that each contributes (docs/data.md has an example)."""

import glob
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass as checked_dataclass

from moh_llm.errors import UserError, without_passwords
from moh_llm.options import as_tuple
from moh_llm.reading import expand_home, is_path, read_yaml
from moh_llm.recipe import shipped
from moh_llm.records.base import validating

_STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
_LOCATIONS = ("files", "hub", "url_list", "builtin")
_Text = Annotated[str, Field(min_length=1)]
_Paths = Annotated[tuple[_Text, ...], BeforeValidator(as_tuple)]  # one path or several


@checked_dataclass(frozen=True, config=_STRICT)
class Source:
    """One source of text. Exactly one of `files`, `hub`, `url_list` and `builtin` says where it is.

    Attributes:
        weight: share of the tokens.
        files: local paths or globs.
        hub: id of a Hub dataset; `data_files` are paths or globs in it, at `revision`.
        url_list: path or address of a text with one address per line; `match` is a glob that selects some of them.
        builtin: text that comes with Python, so that everything runs without a download (`moh_llm.data.embedded`).
        type: what a record is: a text, a conversation (`messages`), or `prompt` and `completion` (`moh_llm.data.chat`).
        text_field: name of the field that holds the text.
    """

    name: str
    weight: Annotated[float, Field(ge=1e-9, le=1e18)]
    files: _Paths = ()
    hub: _Text | None = None
    data_files: _Paths = ()
    revision: _Text | None = None
    url_list: _Text | None = None
    match: _Text | None = None
    builtin: Literal["python_topics", "python_docstrings", "python_sources"] | None = None
    type: Literal["text", "messages", "prompt_completion"] = "text"
    text_field: _Text = "text"


@dataclass(frozen=True)
class Mixture:
    """Sources whose weights sum to 1, and the share of each source's documents held out for validation."""

    name: str
    sources: tuple[Source, ...]
    validation_share: float = 0.05


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
    """A mixture file before its sources are checked."""

    model_config = _STRICT
    name: str | None = None
    validation_share: float = Field(default=Mixture.validation_share, gt=0, lt=1)
    sources: dict[Any, dict[str, Any]] = Field(min_length=1)


def load_mixture(path_or_name: str | Path) -> Mixture:
    """Read a mixture file, or return the built-in mixture ``embedded``.

    Local paths are relative to the mixture file, and ``$NAME`` in them is replaced by the environment
    variable. Whether the files exist is checked when they are needed (`locate`).
    """
    path = shipped(path_or_name)
    if not path.is_file() and str(path_or_name) == EMBEDDED.name:
        return EMBEDDED
    try:
        content = read_yaml(path)
    except UserError as error:
        raise UserError(f"mixture {error}" + ("" if path.exists() else "; name a YAML file, or 'embedded'")) from error
    with validating(f"mixture {path}", _File.model_fields):
        file = _File.model_validate(content)
    sources = [_read_source(str(name), values, path) for name, values in file.sources.items()]
    return _normalised(file.name or path.stem, sources, file.validation_share)


def mixture_from_files(files: Sequence[str], validation_share: float = Mixture.validation_share) -> Mixture:
    """A mixture of text files, an equal share for each argument (a path or glob)."""
    sources = [Source(file, 1.0, (_expand(file, Path(), f"text file {file}"),)) for file in dict.fromkeys(files)]
    return _normalised("files", sources, validation_share)


def mixture_from_arguments(arguments: Sequence[str]) -> Mixture:
    """The mixture of ``--calibration``: one mixture (a ``.yaml`` file or a name) or any number of text files."""
    if len(arguments) == 1 and (arguments[0].endswith((".yaml", ".yml")) or arguments[0] == EMBEDDED.name):
        return load_mixture(arguments[0])
    return mixture_from_files(arguments)


def matching(pattern: str) -> list[str]:
    """The regular files that a path or glob matches, sorted. A path that exists is no glob, whatever its name holds."""
    paths = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
    for path in paths:
        if not is_path(path):
            raise UserError(f"text file {path} must have a name in UTF-8; rename it")
    return [path for path in paths if os.path.isfile(path)]


def _read_source(name: str, values: dict[str, Any], path: Path) -> Source:
    where = f"mixture {path}, source {name}"
    values = {key: value for key, value in values.items() if value is not None}  # without keys left blank
    with validating(where, [field.name for field in fields(Source) if field.name != "name"]):
        source = Source(name, **values)
    if sum(bool(getattr(source, key)) for key in _LOCATIONS) != 1:
        raise UserError(f"{where}: give exactly one of {', '.join(_LOCATIONS)}")
    for key, needs in (("data_files", "hub"), ("revision", "hub"), ("match", "url_list")):
        if getattr(source, key) and not getattr(source, needs):
            raise UserError(f"{where}: {key} needs {needs}, which is not given")
    if source.hub and not source.data_files:
        raise UserError(f"{where}: hub={source.hub} needs data_files, for example data/*.parquet")
    if source.type != "text" and (source.builtin or "text_field" in values):
        wrong = "builtin" if source.builtin else "text_field"
        raise UserError(f"{where}: {wrong} needs type: text, and the type is {source.type}; remove one of them")
    url_list = source.url_list
    if url_list and "://" not in url_list:
        url_list = _expand(url_list, path.parent, where)
    files = tuple(_expand(pattern, path.parent, where) for pattern in source.files)
    return replace(source, files=files, url_list=url_list)


def _expand(pattern: str, root: Path, where: str) -> str:
    """An absolute path or glob, so that a record means the same files wherever it is read."""
    expanded = os.path.expandvars(pattern)
    if unset := re.search(r"\$\{?(\w+)", expanded):
        raise UserError(f"{where}: {pattern} needs the environment variable {unset[1]}; set it to a folder")
    if not is_path(expanded):
        raise UserError(f"{where}: {pattern} must be a path in UTF-8 without NUL characters")
    home = Path(expand_home(expanded) if expanded.startswith("~") else expanded)
    path = os.path.abspath(root / home)
    if glob.has_magic(expanded) and not os.path.isfile(path) and not home.is_absolute():
        return os.path.join(glob.escape(os.path.abspath(root)), expanded)  # brackets in the folder's name are literal
    return path


def _normalised(name: str, sources: Sequence[Source], validation_share: float) -> Mixture:
    total = math.fsum(source.weight for source in sources)
    # A name is shown and recorded, and the name of a file on the command line may be an address with a password.
    shares = [replace(source, name=without_passwords(source.name), weight=source.weight / total) for source in sources]
    return Mixture(without_passwords(name), tuple(shares), validation_share)
