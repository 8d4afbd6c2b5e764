"""A mixture: named sources of text, each with its share of the tokens."""

import difflib
import glob
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from moh_llm.errors import UserError

# Text that every Python carries, so that everything runs with no download: see data/text.py.
BUILTIN_SOURCES = ("python_topics", "python_docstrings", "python_sources")


@dataclass(frozen=True)
class Source:
    """One source: `weight` is its share of the tokens; either `files` or `builtin` says where it lies."""

    name: str
    weight: float
    files: tuple[str, ...] = ()
    builtin: str | None = None
    text_field: str | None = None


@dataclass(frozen=True)
class Mixture:
    """Sources whose weights sum to 1, and the share of each one's documents held out for validation."""

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


def load_mixture(path_or_name: str | Path) -> Mixture:
    """Read a mixture file, or the built-in mixture ``embedded``.

    The file is YAML: ``name``, ``validation_share`` and ``sources``, a map from a source's name to
    ``weight`` and either ``files`` (paths or globs, relative to the mixture file; ``$NAME`` is
    replaced by the environment variable) or ``builtin``
    (one of `BUILTIN_SOURCES`), and optionally ``text_field``. Weights are normalised to sum to 1.

    Raises:
        UserError: the file is missing or not YAML, a key is unknown, a weight is not positive, or
            a source's files do not exist.
    """
    path = Path(path_or_name)
    if not path.exists() and str(path_or_name) == EMBEDDED.name:
        return EMBEDDED
    try:
        record = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"mixture {path} does not exist; name a YAML file, or 'embedded'") from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"mixture {path} cannot be read: {_one_line(error)}") from error
    if not isinstance(record, dict):
        raise UserError(f"mixture {path} must be a map with the keys name, sources and validation_share")
    _check_keys(record, ("name", "sources", "validation_share"), f"mixture {path}")
    share = record.get("validation_share", Mixture.validation_share)
    if not isinstance(share, int | float) or not 0 < share < 1:
        raise UserError(f"mixture {path}: validation_share={share} must lie between 0 and 1")
    sources = record.get("sources")
    if not isinstance(sources, dict) or not sources:
        raise UserError(f"mixture {path}: sources must name at least one source")
    parsed = [_source(name, fields, path) for name, fields in sources.items()]
    return Mixture(str(record.get("name", path.stem)), _normalised(parsed), float(share))


def mixture_from_files(files: Sequence[str], validation_share: float = Mixture.validation_share) -> Mixture:
    """A mixture of the given text files (paths or globs), each argument an equal share of the tokens."""
    sources = [Source(file, 1.0, _existing([file], Path(), f"text file {file}")) for file in files]
    return Mixture("files", _normalised(sources), validation_share)


def mixture_from_arguments(arguments: Sequence[str]) -> Mixture:
    """What ``--calibration`` takes: one mixture (a ``.yaml`` file or a name) or any number of text files."""
    if len(arguments) == 1 and (arguments[0].endswith((".yaml", ".yml")) or arguments[0] == EMBEDDED.name):
        return load_mixture(arguments[0])
    return mixture_from_files(arguments)


def _source(name: str, fields: Any, path: Path) -> Source:
    where = f"mixture {path}, source {name}"
    if not isinstance(fields, dict):
        raise UserError(f"{where}: must be a map with weight and files (or builtin)")
    _check_keys(fields, ("weight", "files", "builtin", "text_field"), where)
    weight, files, builtin = fields.get("weight"), fields.get("files"), fields.get("builtin")
    if not isinstance(weight, int | float) or not weight > 0:
        raise UserError(f"{where}: weight={weight} must be a positive number")
    if (files is None) == (builtin is None):
        raise UserError(f"{where}: give either files or builtin")
    if builtin is not None:
        if builtin not in BUILTIN_SOURCES:
            raise UserError(f"{where}: builtin={builtin} must be one of {', '.join(BUILTIN_SOURCES)}")
        return Source(name, float(weight), builtin=builtin)
    patterns = [files] if isinstance(files, str) else files
    return Source(name, float(weight), _existing(patterns, path.parent, where), text_field=fields.get("text_field"))


def _existing(patterns: Sequence[str], root: Path, where: str) -> tuple[str, ...]:
    found: list[str] = []
    for pattern in patterns:
        expanded = os.path.expandvars(pattern)
        if unset := re.search(r"\$\{?(\w+)", expanded):
            raise UserError(f"{where}: {pattern} needs the environment variable {unset[1]}; set it to a folder")
        absolute = str(root / Path(expanded).expanduser())
        matches = sorted(glob.glob(absolute, recursive=True)) if glob.has_magic(absolute) else [absolute]
        matches = [match for match in matches if Path(match).is_file()]
        if not matches:
            raise UserError(f"{where}: no file at {absolute}")
        found += matches
    return tuple(found)


def _normalised(sources: Sequence[Source]) -> tuple[Source, ...]:
    total = sum(source.weight for source in sources)
    return tuple(Source(s.name, s.weight / total, s.files, s.builtin, s.text_field) for s in sources)


def _check_keys(record: dict[str, Any], known: tuple[str, ...], where: str) -> None:
    for key in record:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            raise UserError(f"{where}: unknown key {key!r}" + (f"; did you mean {close[0]!r}?" if close else ""))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
