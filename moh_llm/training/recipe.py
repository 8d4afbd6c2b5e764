"""From a YAML recipe and ``--key value`` overrides to a `TrainConfig`; strict about keys and types.

Keys are dotted (``optimizer.learning_rate``), on the command line with ``-`` or ``_``. A group
that may be null (``lora``) is switched on by naming it or any key in it, and off by ``--lora null``.
"""

import difflib
import types
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from moh_llm.errors import UserError
from moh_llm.training.config import TrainConfig


@dataclass(frozen=True)
class Key:
    """One key of a recipe: its type, meaning and default (`MISSING` where it must be given)."""

    type: Any
    meaning: str
    default: Any

    @property
    def group(self) -> type | None:
        """The dataclass of a group of keys, None for a plain key."""
        return next((kind for kind in _options(self.type) if is_dataclass(kind)), None)


@dataclass(frozen=True)
class Given:
    """A value that the user gave, and where: a recipe's path or ``command line``."""

    value: Any
    where: str


def recipe_keys(config: type = TrainConfig, prefix: str = "") -> dict[str, Key]:
    """All keys of a recipe by dotted name, groups before their members, in the order of `config`."""
    hints, keys = get_type_hints(config), {}
    for entry in fields(config):
        default = entry.default_factory() if entry.default_factory is not MISSING else entry.default
        found = Key(hints[entry.name], entry.metadata["meaning"], default)
        keys[prefix + entry.name] = found
        if found.group is not None:
            keys |= recipe_keys(found.group, f"{prefix}{entry.name}.")
    return keys


def load_config(recipe: str | Path, overrides: list[str] | None = None) -> TrainConfig:
    """Read a YAML recipe, lay command-line overrides over it, and check every key and type.

    Args:
        recipe: path of the YAML file.
        overrides: ``["--max_steps", "20", "--optimizer.learning_rate=1e-4", ...]``.

    Raises:
        UserError: the file cannot be read, a key is unknown (the nearest known one is named), a
            value has the wrong type or breaks a rule, a required key is missing.
    """
    keys = recipe_keys()
    given: dict[str, Given] = {}
    _flatten(_read_yaml(Path(recipe)), "", str(recipe), keys, given)
    for name, text in _split_overrides(overrides or []):
        _check_known(name, "command line", keys)
        # A later `lora.rank=8` switches on a group that was null, `lora=null` drops its keys.
        for other in [other for other in given if other.startswith(f"{name}.") or name.startswith(f"{other}.")]:
            del given[other]
        value = _parse_text(text, keys[name], name)
        if isinstance(value, dict):
            _flatten(value, f"{name}.", "command line", keys, given)
        else:
            given[name] = Given(value, "command line")
    return _build(TrainConfig, "", given, keys)


def describe_keys() -> str:
    """The keys of a recipe as help text: name, type, default, meaning."""
    lines = []
    for name, found in recipe_keys().items():
        if found.group is not None:
            lines += ["", f"  {name}: {found.meaning}"]
            continue
        default = "" if found.default is MISSING else f", default {_show(found.default)}"
        lines.append(f"    --{name} ({_type_name(found.type)}{default})\n        {found.meaning}")
    return "\n".join(lines)


def _read_yaml(path: Path) -> dict[str, Any]:
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"recipe {path} does not exist") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"recipe {path} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise UserError(f"recipe {path} is not YAML: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UserError(f"recipe {path} must hold `key: value` lines, not a {type(content).__name__}")
    return content


def _split_overrides(arguments: list[str]) -> list[tuple[str, str]]:
    """``["--a-b", "1", "--c=2"]`` -> ``[("a_b", "1"), ("c", "2")]``."""
    pairs, rest = [], list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--") or argument == "--":
            raise UserError(f"command line: {argument!r} follows no --key; overrides are written --key value")
        name, equals, text = argument[2:].partition("=")
        if not equals:
            if not rest:
                raise UserError(f"command line: --{name} has no value; overrides are written --key value")
            text = rest.pop(0)
        pairs.append((name.replace("-", "_"), text))
    return pairs


def _flatten(content: dict, prefix: str, where: str, keys: dict[str, Key], given: dict[str, Given]) -> None:
    for part, value in content.items():
        name = f"{prefix}{part}"
        _check_known(name, where, keys)
        if keys[name].group is not None and isinstance(value, dict):
            given[name] = Given(value, where)
            _flatten(value, f"{name}.", where, keys, given)
        else:
            given[name] = Given(value, where)


def _check_known(name: str, where: str, keys: dict[str, Key]) -> None:
    if name in keys:
        return
    nearest = difflib.get_close_matches(name, keys, n=1, cutoff=0.0)[0]
    # A bare key that lives in a group is a likelier slip than a similar spelling.
    nearest = next((known for known in keys if known.endswith(f".{name}")), nearest)
    raise UserError(f"{where}: unknown key {name!r}; the nearest known key is {nearest!r}")


def _parse_text(text: str, found: Key, name: str) -> Any:
    """A command-line value: YAML, except that a text key takes its argument letter by letter."""
    import yaml

    if str in _options(found.type) and text not in ("null", "~"):
        return text
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"command line: {name}={text!r} is not a YAML value") from error


def _build(config: type, prefix: str, given: dict[str, Given], keys: dict[str, Key]) -> Any:
    values = {}
    for entry in fields(config):
        name = prefix + entry.name
        found = keys[name]
        if found.group is not None:
            values[entry.name] = _build_group(name, found, given, keys)
        elif name in given:
            values[entry.name] = _typed(given[name], found.type, name)
        elif found.default is MISSING:
            raise UserError(f"{name} is missing: {found.meaning}; give it in the recipe or as --{name}")
    return config(**values)


def _build_group(name: str, found: Key, given: dict[str, Given], keys: dict[str, Key]) -> Any:
    if name in given and not isinstance(given[name].value, dict):
        if given[name].value is None and type(None) in _options(found.type):
            return None
        raise UserError(f"{given[name].where}: {name}={_show(given[name].value)} must be a group of keys ({name}.*)")
    if name in given or any(other.startswith(f"{name}.") for other in given):
        return _build(found.group, f"{name}.", given, keys)
    return found.default


def _options(kind: Any) -> tuple[Any, ...]:
    """The members of a union, or the type alone."""
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _typed(given: Given, kind: Any, name: str) -> Any:
    """`given.value` as `kind`, or a `UserError` that says what was expected."""
    for option in _options(kind):
        value = _convert(given.value, option)
        if value is not MISSING:
            return value
    raise UserError(f"{given.where}: {name}={_show(given.value)} must be {_type_name(kind)}")


def _convert(value: Any, kind: Any) -> Any:
    """`value` as the plain type `kind`, or `MISSING` where it does not fit."""
    if kind is type(None):
        return None if value is None else MISSING
    if get_origin(kind) is Literal:
        # An unquoted `no` is the boolean false in YAML 1.1.
        value = "no" if value is False else value
        return value if value in get_args(kind) else MISSING
    if get_origin(kind) is tuple:
        members = get_args(kind)
        if not isinstance(value, (list, tuple)):
            return MISSING
        if members[-1] is Ellipsis:
            members = (members[0],) * len(value)
        converted = [_convert(item, member) for item, member in zip(value, members, strict=False)]
        return MISSING if len(value) != len(members) or MISSING in converted else tuple(converted)
    if kind is float and isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            return float(value)  # YAML 1.1 reads 1e-4, without a dot, as text
        except ValueError:
            return MISSING
    return value if type(value) is kind else MISSING


def _type_name(kind: Any) -> str:
    names = {str: "text", int: "a whole number", float: "a number", bool: "true or false", type(None): "null"}
    if len(_options(kind)) > 1:
        return " or ".join(_type_name(option) for option in _options(kind))
    if get_origin(kind) is Literal:
        return " or ".join(get_args(kind))
    if get_origin(kind) is tuple:
        return "a list of names" if get_args(kind)[-1] is Ellipsis else f"a list of {len(get_args(kind))} numbers"
    return names[kind]


def _show(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"[{', '.join(map(_show, value))}]" if isinstance(value, (list, tuple)) else str(value)
