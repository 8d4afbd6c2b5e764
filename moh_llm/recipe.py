"""From a recipe, flags or keyword arguments to options: `read_options`.

    config = read_options(TrainConfig, [*recipe_values("recipe.yaml"), ("command line", "max_steps", "20")])

A recipe is a YAML file. Its values are words until the option's type is known, as on the command line: a commit's hash
of digits stays a text. Later values replace earlier ones; a map given for a group is laid over what the group holds. A
group that may be null (``lora``, ``hub``) is switched on by naming it or any option in it.
"""

import contextlib
import dataclasses
import difflib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from moh_llm.errors import UserError
from moh_llm.options import Option, OptionError, options_of
from moh_llm.reading import BLANK, expand_home, parse_yaml, read_yaml

_Config = TypeVar("_Config")
Given = tuple[str, str, Any]  # where a value is from, for errors; the option's dotted name; the value


def recipe_values(path: str | Path) -> list[Given]:
    """The values of a YAML recipe (`shipped`). Raises UserError when it cannot be read or is no map."""
    place = shipped(path)
    try:
        content = read_yaml(place, words=True)
    except UserError as error:
        raise UserError(f"recipe {error}") from error
    if not isinstance(content, dict | None):
        raise UserError(f"recipe {place} must hold `option: value` lines, not a {type(content).__name__}")
    return [(f"recipe {place}", name, value) for name, value in (content or {}).items()]


def shipped(name: str | Path) -> Path:
    """The file, or the recipe, architecture or mixture of that name that comes with this package."""
    place = Path(expand_home(name))
    return place if place.exists() else shipped_files().get(place.as_posix(), place)


def shipped_files() -> dict[str, Path]:
    """Recipes and mixtures by name, their path below the folder that holds both: the package's, or the checkout's."""
    package = Path(__file__).parent
    root = package if (package / "recipes").is_dir() else package.parent  # a wheel holds copies (setup.py)
    found = [path for folder in ("recipes", "data_mixtures") for path in sorted((root / folder).rglob("*"))]
    return {path.relative_to(root).as_posix(): path for path in found if path.is_file()}


def keyword_options(kind: type[_Config], where: str, **given: Any) -> _Config:
    """The options with the values of keyword arguments. Raises UserError, which names ``where``, as `read_options`."""
    return read_options(kind, [(where, name, value) for name, value in given.items()])


def read_options(kind: type[_Config], given: Iterable[Given]) -> _Config:
    """The options with these values.

    Raises:
        UserError: an option is unknown (the nearest one is named), a value has the wrong type or breaks a rule, or one
            that is required is missing.
    """
    options, merged, sources = options_of(kind), {}, {}
    for where, name, value in given:
        for option, part in _flatten(kind, options, where, name, value):
            sources[option] = where
            _merge(merged, option, part)
    try:
        return _build(kind, merged)
    except OptionError as error:
        where = sources.get(error.option)
        meaning = options[error.option].summary.replace("`", "")
        raise UserError(f"{where}: {error}" if where else f"{error}: {meaning}") from error


def _flatten(kind: Any, options: dict[str, Option], where: str, name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Dotted names and values of an option; a group is an empty map before its members."""
    check_name(kind, name, where)
    option = options[name]
    value = _typed(option, value, f"{where}: {name}")
    if not option.is_group or value is None or isinstance(value, option.kind):
        yield name, value
    elif isinstance(value, dict):
        yield name, {}
        for part, child in value.items():
            yield from _flatten(kind, options, where, f"{name}.{part}", child)
    else:
        given = str(value) if len(str(value)) <= 60 else f"{str(value)[:57]}..."
        raise UserError(f"{where}: {name}={given} must be a group of options")


def check_name(kind: Any, name: str, where: str) -> None:
    """Raise UserError with the nearest name where there is no such option."""
    options = list(options_of(kind))
    if name not in options:
        close = difflib.get_close_matches(name, options, n=1, cutoff=0.0)
        # A member that is given without its group is a likelier slip than a similar spelling.
        nearest = next((known for known in options if known.endswith(f".{name}")), close[0])
        raise UserError(f"{where}: unknown option {name!r}; the nearest one is {nearest!r}")


def _typed(option: Option, value: Any, where: str) -> Any:
    """A word as what it stands for, where the option takes more than texts."""
    if value is BLANK:
        return {} if option.is_group else None
    if isinstance(value, list) and not option.takes_text:
        return [_number(part, where) for part in value]
    if not isinstance(value, str):
        return value
    if option.nullable and value == "null":
        return None
    if option.is_group or (option.is_list and value.startswith("[")):
        with contextlib.suppress(UserError):
            value = parse_yaml(value, where, words=True)
        return _typed(option, value, where) if isinstance(value, list) else value
    return value if option.takes_text else _number(value, where)


def _number(word: Any, where: str) -> Any:
    """The number or switch that a word stands for in YAML 1.2, or else the word."""
    if isinstance(word, str):
        with contextlib.suppress(UserError):
            word = parse_yaml(word, where)
    return word


def _merge(merged: dict[str, Any], name: str, value: Any) -> None:
    """Put a value into nested maps by its dotted name; an empty map adds to what is there."""
    *groups, last = name.split(".")
    for group in groups:
        if not isinstance(merged.get(group), dict):
            merged[group] = {}
        merged = merged[group]
    if value != {} or not isinstance(merged.get(last), dict):
        merged[last] = value


def _build(kind: Any, values: dict[str, Any]) -> Any:
    groups = {name: option.kind for name, option in options_of(kind).items() if option.is_group}
    made = {
        name: _build(groups[name], value) if name in groups and isinstance(value, dict) else value
        for name, value in values.items()
    }
    return kind(**made)


def differing(config: Any) -> dict[str, Any]:
    """The options that differ from their defaults, as nested maps."""
    found = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            value = differing(value) or ({} if field.default is None else field.default)
        if value != field.default:
            found[field.name] = value
    return found
