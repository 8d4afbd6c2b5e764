"""From a YAML recipe and ``--key value`` overrides to a `TrainConfig`; strict about keys and types.

Keys are dotted (``optimizer.learning_rate``), on the command line with ``-`` or ``_``. A map given
for a group is laid over what the group holds. A group that may be null (``lora``, ``hub``) is switched on by
naming it or any key in it, and off by ``--lora null``. jsonargparse types and merges the values.
"""

import contextlib
import difflib
from argparse import ArgumentError
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from moh_llm.errors import UserError
from moh_llm.reading import parse_yaml, read_yaml
from moh_llm.terminal import say_aside
from moh_llm.training.changed_keys import GONE
from moh_llm.training.config import TrainConfig

# Keys of earlier recipes, by their names today: the error about one says the other.
RENAMED = {
    "output": "output_dir",
    "trackers": "report_to",
    "data.block_length": "data.sequence_length",
    "optimizer.max_gradient_norm": "optimizer.max_grad_norm",
    "evaluation.every": "evaluation.eval_steps",
    "checkpoint.every": "checkpoint.save_steps",
    "checkpoint.keep_last": "checkpoint.save_total_limit",
    "sparse_gate_gradient": "gate_gradient",
}
# Values of earlier recipes: what the key is taken to be, and why.
REPLACED = {
    ("attn_implementation", "moh_sparse"): ("sdpa", "layers with heads off choose their attention by what is there")
}
# Values of earlier recipes that are refused, and what does their work.
REFUSED = {("gate_gradient", "selected"): "sampled costs about as little, and is unbiased"}


@dataclass(frozen=True)
class Key:
    """One key of a recipe: its annotation, meaning and default (`MISSING` where it must be given)."""

    hint: Any
    meaning: str
    default: Any

    @property
    def nullable(self) -> bool:
        """Whether null is a value."""
        return type(None) in get_args(self.hint)

    @property
    def type(self) -> Any:
        """The type of the values other than null; a dataclass for a group of keys."""
        return get_args(self.hint)[0] if self.nullable else self.hint

    @property
    def takes_text(self) -> bool:
        """Whether its values are texts."""
        return self.type is str or get_origin(self.type) is Literal

    @property
    def expected(self) -> str:
        """The type in words."""
        words: dict[Any, str] = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
        words |= {tuple[float, float]: "a list of 2 numbers", tuple[str, ...]: "a list of names"}
        if is_dataclass(self.type):
            words[self.type] = "a group of keys"
        elif get_origin(self.type) is Literal:
            words[self.type] = " or ".join(get_args(self.type))
        return words[self.type] + " or null" * self.nullable


def recipe_keys(config: type = TrainConfig, prefix: str = "") -> dict[str, Key]:
    """All keys of a recipe by dotted name, groups before their members, in the order of `config`."""
    hints, keys = get_type_hints(config), {}
    for entry in fields(config):
        found = Key(hints[entry.name], entry.metadata["meaning"], entry.default)
        keys[prefix + entry.name] = found
        if is_dataclass(found.type):
            keys |= recipe_keys(found.type, f"{prefix}{entry.name}.")
    return keys


def describe_keys() -> str:
    """The keys of a recipe as help text: name, type, default, meaning."""
    lines = []
    for name, found in recipe_keys().items():
        if is_dataclass(found.type):
            lines += ["", f"  {name}: {found.meaning}"]
            continue
        # A required key of a group that may be null is empty by default.
        default = "" if found.default in (MISSING, "") else f", default {_show(found.default)}"
        lines.append(f"    --{name} ({found.expected}{default})\n        {found.meaning}")
    return "\n".join(lines)


def load_config(recipe: str | Path, overrides: list[str] | None = None) -> TrainConfig:
    """Read a YAML recipe, lay command-line overrides over it, and check every key and type.

    Args:
        recipe: path of the YAML file.
        overrides: ``["--max_steps", "20", "--optimizer.learning_rate=1e-4", ...]``.

    Raises:
        UserError: the file cannot be read, a key is unknown (the nearest known one is named), a
            value has the wrong type or breaks a rule, a required key is missing.
    """
    return make_config(_read_yaml(recipe), str(recipe), overrides)


def make_config(content: dict[str, Any], where: str, overrides: list[str] | None = None) -> TrainConfig:
    """Likewise of the recipe's content, which errors say is from ``where``."""
    from jsonargparse import ArgumentParser

    keys = recipe_keys()
    given = list(_flatten(content, keys, where))
    for name, text in _split_overrides(overrides or []):
        given += _flatten({name: text}, keys, "command line")

    parser = ArgumentParser(exit_on_error=False)
    for name, found in keys.items():
        if "." not in name:
            default = None if found.default is MISSING else found.default
            parser.add_argument(f"--{name}", type=found.hint, default=default)
    try:
        values = vars(parser.parse_object(_merged(given), env=False))
    except ArgumentError:
        for where, name, value in given:
            try:
                parser.parse_object(_merged([(where, name, value)]), env=False)
            except ArgumentError as error:
                raise _misfit(where, name, value, keys[name]) from error
        raise
    for name, value in values.items():
        if value is None and not keys[name].nullable:
            raise UserError(f"{name} is missing: {keys[name].meaning}; give it in the recipe or as --{name}")
        if value is not None and is_dataclass(keys[name].type):
            # Not by jsonargparse, which wraps the UserError of a nullable group in an error of its own.
            values[name] = keys[name].type(**vars(value))
    return TrainConfig(**values)


def _read_yaml(recipe: str | Path) -> dict:
    try:
        content = read_yaml(Path(recipe))
    except UserError as error:
        raise UserError(f"recipe {error}") from error
    if not isinstance(content, dict | None):
        raise UserError(f"recipe {recipe} must hold `key: value` lines, not a {type(content).__name__}")
    return content or {}


def _split_overrides(arguments: list[str]) -> Iterator[tuple[str, str]]:
    """``["--a-b", "1", "--c=2"]`` -> ``("a_b", "1"), ("c", "2")``."""
    rest = iter(arguments)
    for argument in rest:
        if not argument.startswith("--") or argument == "--":
            raise UserError(f"command line: {argument!r} follows no --key; overrides are written --key value")
        name, equals, text = argument[2:].partition("=")
        value = text if equals else next(rest, None)
        if value is None:
            raise UserError(f"command line: --{name} has no value; overrides are written --key value")
        _check_override(name, value)
        yield name.replace("-", "_"), value


def _check_override(name: str, text: str) -> None:
    """Refuse YAML values that grow by their aliases; a text that is not YAML is taken as it is."""
    if "\0" in text:
        raise UserError(f"command line: --{name} holds a NUL character")
    if "&" in text:  # no alias without an anchor
        parse_yaml(text, f"command line: --{name}")


def _flatten(content: dict, keys: dict[str, Key], where: str, prefix: str = "") -> Iterator[tuple[str, str, Any]]:
    """Place, dotted name and value of the keys in nested maps; a group is an empty map before its keys."""
    for part, value in content.items():
        name = f"{prefix}{part}"
        if name in GONE:
            raise UserError(f"{where}: the key {name} is gone: {GONE[name][1]}")
        if name not in keys:
            nearest = difflib.get_close_matches(name, keys, n=1, cutoff=0.0)[0]
            # A bare key that lives in a group is a likelier slip than a similar spelling.
            nearest = next((known for known in keys if known.endswith(f".{name}")), nearest)
            nearest = RENAMED.get(name, nearest)
            raise UserError(f"{where}: unknown key {name!r}; the nearest known key is {nearest!r}")
        found = keys[name]
        is_group = is_dataclass(found.type)
        if isinstance(value, str) and not found.takes_text:
            with contextlib.suppress(UserError):
                value = parse_yaml(value, name)
        # jsonargparse would read texts as YAML 1.1 has them, where 1:30 is 90.
        of_numbers = isinstance(value, list) and float in get_args(found.type)
        if any(isinstance(part, str) for part in (value if of_numbers else [value])) and not found.takes_text:
            raise _misfit(where, name, value, found)
        # It would take null for any key, and text for a group as a path.
        if not (found.nullable if value is None else isinstance(value, dict) or not is_group):
            raise _misfit(where, name, value, found)
        if is_group and value:
            yield where, name, {}
            yield from _flatten(value, keys, where, f"{name}.")
            continue
        if isinstance(value, str) and (name, value) in REPLACED:
            old, (value, reason) = value, REPLACED[name, value]
            say_aside(f"{where}: {name}={old} is no more, and {value} is taken: {reason}")
        yield where, name, value


def _merged(given: Iterable[tuple[str, str, Any]]) -> dict[str, Any]:
    """Nested maps of dotted names; a later value replaces an earlier one, and an empty map adds to what is there."""
    merged: dict[str, Any] = {}
    for _, name, value in given:
        *groups, key = name.split(".")
        place = merged
        for group in groups:
            if place.get(group) is None:
                place[group] = {}
            place = place[group]
        if value != {} or place.get(key) is None:
            place[key] = {} if value == {} else value  # not the same map, which is filled
    return merged


def _misfit(where: str, name: str, value: Any, found: Key) -> UserError:
    text = " ".join(f"{where}: {name}={_show(value)} must be {found.expected}".split())
    hint = REFUSED.get((name, value)) if isinstance(value, str) else None
    return UserError(f"{text}; {hint}" if hint else text)


def _show(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"[{', '.join(map(_show, value))}]" if isinstance(value, (list, tuple)) else str(value)
