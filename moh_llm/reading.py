"""Read untrusted JSON and YAML: only regular files, within bounds, with plain values.

A pipe, a device, a file that is too large or nested too deep, and YAML whose aliases expand too far, are refused in one
line before any value is used.
"""

import json
import os
import re
import stat
from pathlib import Path
from typing import Any, ClassVar

import yaml

from moh_llm.errors import UserError

JSON_BYTES = 1 << 28  # the largest tokenizer.json has about 40 MB, a report with every item of a suite about 100
YAML_BYTES = 1 << 22
YAML_NODES, YAML_DEPTH = 100_000, 64  # with aliases expanded


def read_text(path: Path, limit: int = JSON_BYTES) -> str:
    """Read a regular UTF-8 file of at most ``limit`` bytes.

    Raises:
        UserError: the file is missing, not a regular file, too large, or not text.
    """
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise UserError(f"{path} is not a regular file; name a file")
        if found.st_size > limit:
            raise UserError(
                f"{path} has {found.st_size:,} bytes, more than the limit of {limit:,} for this kind of file"
            )
        return path.read_text(encoding="utf-8-sig")  # some editors write a byte order mark
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def read_json(path: Path) -> Any:
    """Read a JSON file. Raises UserError if it cannot be read or is not JSON."""
    return parse_json(read_text(path), str(path))


def parse_json(text: str | bytes, where: str) -> Any:
    """Parse JSON. Raises UserError, which names ``where``, if the text is not JSON or nested too deep."""
    try:
        return json.loads(text.removeprefix("\ufeff") if isinstance(text, str) else text)
    except RecursionError as error:
        raise UserError(f"{where} cannot be read as JSON: it is nested too deep") from error
    except ValueError as error:
        raise UserError(f"{where} cannot be read as JSON: {error}") from error


class Loader(yaml.SafeLoader):
    """YAML with the core schema of YAML 1.2: `no`, `1:30` and dates are strings, 010 is ten.

    Keys are strings as written; duplicate keys are an error.
    """

    yaml_implicit_resolvers: ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build a mapping."""
        made: dict[str, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag not in _SCALARS:
                raise yaml.constructor.ConstructorError(None, None, "a key is not a plain string", key.start_mark)
            if key.value in made:  # else the first of two entries would be lost
                what = f"the key {key.value!r} is given twice"
                raise yaml.constructor.ConstructorError(None, None, what, key.start_mark)
            made[key.value] = self.construct_object(value, deep=deep)
        return made

    def whole_number(self, node: yaml.ScalarNode) -> int:
        """An integer of YAML 1.2: decimal, octal after 0o, or hexadecimal after 0x."""
        base = {"0o": 8, "0x": 16}.get(node.value[:2], 10)
        return int(node.value, base)

    def number(self, node: yaml.ScalarNode) -> float:
        """A number with a point or an exponent, .inf or .nan."""
        return float(node.value.lower().replace(".inf", "inf").replace(".nan", "nan"))

    def refuse(self, node: yaml.Node) -> None:
        """Refuse a tag that is not a plain value."""
        raise yaml.constructor.ConstructorError(None, None, f"the tag {node.tag} is not supported", node.start_mark)


class WordLoader(Loader):
    """The same, with numbers kept as strings."""

    yaml_implicit_resolvers: ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = {}


_TAG = "tag:yaml.org,2002:"
_SCALARS = {_TAG + kind for kind in ("str", "null", "bool", "int", "float")}
_CORE = {  # chapter 10.3.2 of the YAML 1.2 specification, with possible first characters
    "null": (r"(?:~|null|Null|NULL|)", ["~", "n", "N", ""]),
    "bool": (r"(?:true|True|TRUE|false|False|FALSE)", list("tTfF")),
    "int": (r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)", list("-+0123456789")),
    "float": (
        r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))",
        list("-+.0123456789"),
    ),
}
for _kind, (_pattern, _first) in _CORE.items():
    Loader.add_implicit_resolver(_TAG + _kind, re.compile(f"^{_pattern}$"), _first)
    if _kind in ("null", "bool"):
        WordLoader.add_implicit_resolver(_TAG + _kind, re.compile(f"^{_pattern}$"), _first)
Loader.add_constructor(_TAG + "int", Loader.whole_number)
Loader.add_constructor(_TAG + "float", Loader.number)
for _kind in ("binary", "timestamp", "omap", "pairs", "set"):
    Loader.add_constructor(_TAG + _kind, Loader.refuse)
# A class with constructors of its own does not inherit later additions to its parent's.
WordLoader.yaml_constructors = Loader.yaml_constructors


def read_yaml(path: Path, words: bool = False) -> Any:
    """Read a YAML file. Raises UserError if it cannot be read or parsed."""
    return parse_yaml(read_text(path, YAML_BYTES), str(path), words)


def parse_yaml(text: str, where: str, words: bool = False) -> Any:
    """Parse YAML with the types of YAML 1.2.

    Args:
        text: the YAML.
        where: name of the text in errors.
        words: keep numbers as strings.

    Raises:
        UserError: the text is not YAML, holds values that are not plain, refers to itself, is nested deeper than
            `YAML_DEPTH`, or has more than `YAML_NODES` values with aliases expanded.
    """
    reader = (WordLoader if words else Loader)(text)
    try:
        node = reader.get_single_node()
        if node is None:
            return None
        _count(node, 0, {}, where)
        return reader.construct_document(node)
    except RecursionError as error:
        raise UserError(f"{where} cannot be read as YAML: it is nested too deep") from error
    except (yaml.YAMLError, ValueError) as error:  # an integer with too many digits is a ValueError
        raise UserError(f"{where} cannot be read as YAML: {' '.join(str(error).split())}") from error
    finally:
        reader.dispose()


def _count(node: yaml.Node, depth: int, known: dict[int, int | None], where: str) -> int:
    """Count the values below a node, with aliases expanded."""
    if depth > YAML_DEPTH:
        raise UserError(f"{where} cannot be read as YAML: it is nested deeper than {YAML_DEPTH} levels")
    if id(node) in known:
        if (found := known[id(node)]) is None:
            raise UserError(f"{where} cannot be read as YAML: an alias refers to a value that contains it")
        return found
    known[id(node)] = None
    total = 1
    if isinstance(node, yaml.MappingNode):
        children = [part for pair in node.value for part in pair]
    else:
        children = node.value if isinstance(node, yaml.SequenceNode) else []
        if isinstance(node.value, str) and "\0" in node.value:
            raise UserError(f"{where} cannot be read as YAML: a string holds a NUL character")
    for child in children:
        total += _count(child, depth + 1, known, where)
        if total > YAML_NODES:
            raise UserError(
                f"{where} cannot be read as YAML: it has more than {YAML_NODES:,} values with aliases expanded"
            )
    known[id(node)] = total
    return total


def check_path(path: str, where: str) -> None:
    """Raise UserError, which names ``where``, for a path that no file system accepts."""
    if "\0" in path:
        raise UserError(f"{where}: a path holds a NUL character")
    if len(os.fsencode(path)) > 4000 or any(len(os.fsencode(part)) > 255 for part in path.split("/")):
        raise UserError(f"{where}: the path {path[:40]}... is too long for a file")


def expand_home(path: str | os.PathLike[str]) -> str:
    """Expand a leading ``~`` or ``~NAME`` of a path or Hub id.

    A folder that is named ``~`` is written ``./~``; it is made absolute, because `pathlib` drops the ``./``.

    Raises:
        UserError: the user does not exist.
    """
    text = os.fspath(path)
    if text.startswith("~"):
        expanded = os.path.expanduser(text)
        if expanded.startswith("~"):
            user = text.partition("/")[0]
            raise UserError(f"{text}: there is no home folder {user}; write ./{user} for a file or folder of that name")
        return expanded
    return os.path.abspath(text) if os.path.normpath(text).startswith("~") else text
