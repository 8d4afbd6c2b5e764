"""Reading untrusted JSON and YAML: regular files only, within bounds, plain values only.

A file that is a pipe or a device, too large, nested too deep or, by YAML's aliases, much larger than it looks is
refused in one line before any of it is used.
"""

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

import yaml

from moh_llm.errors import UserError

JSON_BYTES = 1 << 28  # the largest tokenizer.json has some 40 MB, a report with all items of a suite some 100
YAML_BYTES = 1 << 22
YAML_NODES, YAML_DEPTH = 100_000, 64  # with every alias written out
_NUMBER = re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$")


def read_text(path: Path, limit: int = JSON_BYTES) -> str:
    """The text of a regular file of at most ``limit`` bytes, in UTF-8.

    Raises:
        UserError: it is missing, something else than a file, larger, or no text.
    """
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise UserError(f"{path} is no regular file; name a file")
        if found.st_size > limit:
            raise UserError(f"{path} has {found.st_size:,} bytes, more than the {limit:,} that are read of such a file")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def read_json(path: Path) -> Any:
    """Read a JSON file. Raises UserError when it cannot be read (`read_text`) or is not JSON."""
    return parse_json(read_text(path), str(path))


def parse_json(text: str | bytes, where: str) -> Any:
    """Read JSON from a text. Raises UserError, which names ``where``, when it is not JSON or nested too deep."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise UserError(f"{where} cannot be read as JSON: it is nested too deep") from error
    except ValueError as error:
        raise UserError(f"{where} cannot be read as JSON: {error}") from error


class Loader(yaml.SafeLoader):
    """YAML of plain values: 1e-5 is a number, a date is a text, and a key given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        # Of two entries of one name the first would be lost.
        if twice := next((key for number, key in enumerate(keys) if key in keys[:number]), None):
            raise yaml.constructor.ConstructorError(None, None, f"the key {twice!r} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)

    def refuse(self, node: yaml.Node) -> None:
        """Raise the error of a tag that stands for more than a plain value."""
        raise yaml.constructor.ConstructorError(None, None, f"the tag {node.tag} is not read", node.start_mark)


Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
Loader.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+0123456789"))
for _tag in ("binary", "timestamp", "omap", "pairs", "set"):
    Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", Loader.refuse)


def read_yaml(path: Path) -> Any:
    """Read a YAML file. Raises UserError when it cannot be read (`read_text`) or parsed (`parse_yaml`)."""
    return parse_yaml(read_text(path, YAML_BYTES), str(path))


def parse_yaml(text: str, where: str) -> Any:
    """Read YAML from a text.

    Raises:
        UserError: which names ``where``: it is not YAML, holds other than plain values, refers to itself, is nested
            deeper than `YAML_DEPTH`, or has, with every alias written out, more than `YAML_NODES` values.
    """
    reader = Loader(text)
    try:
        node = reader.get_single_node()
        if node is None:
            return None
        _count(node, 0, {}, where)
        return reader.construct_document(node)
    except RecursionError as error:
        raise UserError(f"{where} cannot be read as YAML: it is nested too deep") from error
    except (yaml.YAMLError, ValueError) as error:  # a number of too many digits is a ValueError
        raise UserError(f"{where} cannot be read as YAML: {' '.join(str(error).split())}") from error
    finally:
        reader.dispose()


def _count(node: yaml.Node, depth: int, known: dict[int, int | None], where: str) -> int:
    """The number of values below a node, aliases written out."""
    if depth > YAML_DEPTH:
        raise UserError(f"{where} cannot be read as YAML: it is nested deeper than {YAML_DEPTH} levels")
    if id(node) in known:
        if (found := known[id(node)]) is None:
            raise UserError(f"{where} cannot be read as YAML: an alias refers to what it is part of")
        return found
    known[id(node)] = None
    total = 1
    if isinstance(node, yaml.MappingNode):
        children = [part for pair in node.value for part in pair]
    else:
        children = node.value if isinstance(node, yaml.SequenceNode) else []
        if isinstance(node.value, str) and "\0" in node.value:
            raise UserError(f"{where} cannot be read as YAML: a text holds a NUL character")
    for child in children:
        total += _count(child, depth + 1, known, where)
        if total > YAML_NODES:
            raise UserError(
                f"{where} cannot be read as YAML: it has more than {YAML_NODES:,} values with every alias written out"
            )
    known[id(node)] = total
    return total


def check_path(path: str, where: str) -> None:
    """Raise UserError, which names ``where``, for a path that no file system takes."""
    if "\0" in path:
        raise UserError(f"{where}: a path holds a NUL character")
    if len(os.fsencode(path)) > 4000 or any(len(os.fsencode(part)) > 255 for part in path.split("/")):
        raise UserError(f"{where}: the path {path[:40]}... is too long for a file")


def expand_home(path: str | os.PathLike[str]) -> str:
    """A path or Hub id whose leading ``~`` or ``~NAME`` is a home folder; all others are as they were.

    A folder that is itself named ``~`` is given as ``./~``. It becomes absolute, because `pathlib` drops the ``./``.

    Raises:
        UserError: there is no such user.
    """
    text = os.fspath(path)
    if text.startswith("~"):
        expanded = os.path.expanduser(text)
        if expanded.startswith("~"):
            user = text.partition("/")[0]
            raise UserError(f"{text}: there is no home folder {user}; if it is a file or folder here, write ./{user}")
        return expanded
    return os.path.abspath(text) if os.path.normpath(text).startswith("~") else text
