"""Read JSON and YAML that others wrote: regular files of a bounded size, with plain values."""

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
            raise UserError(f"{path} has {found.st_size:,} bytes, over the limit of {limit:,} for this kind of file")
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
    """YAML with the core schema of YAML 1.2: `no`, `1:30` and dates are strings, 1e-5 is a number.

    Keys are strings as written. Errors are: a key that is given twice, a tag of other values than these, and an alias,
    since a few aliases of aliases stand for more values than fit into memory.
    """

    yaml_implicit_resolvers: ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = {}

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.composer.ComposerError(None, None, "aliases are not supported", self.peek_event().start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        made: dict[str, Any] = {}
        for key, value in node.value:
            fault = None if isinstance(key, yaml.ScalarNode) else "a key is not a plain string"
            if fault is None and key.value in made:  # else the first of two entries would be lost
                fault = f"the key {key.value!r} is given twice"
            if fault:
                raise yaml.constructor.ConstructorError(None, None, fault, key.start_mark)
            made[key.value] = self.construct_object(value, deep=deep)
        return made


BLANK = object()  # what `lora:` gives without a value, where words are kept


class WordLoader(Loader):
    """The same, with numbers kept as strings, and a blank told from a null."""

    yaml_implicit_resolvers: ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = {}


_TAG = "tag:yaml.org,2002:"
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
Loader.add_constructor(_TAG + "int", lambda _, node: int(node.value, 0))  # 010 is an error, not eight
for _kind in ("binary", "timestamp", "omap", "pairs", "set"):
    Loader.add_constructor(_TAG + _kind, yaml.SafeLoader.construct_undefined)
# A class with constructors of its own does not inherit later additions to its parent's.
WordLoader.yaml_constructors = {**Loader.yaml_constructors, _TAG + "null": lambda _, n: None if n.value else BLANK}


def read_yaml(path: Path, words: bool = False) -> Any:
    """Read a YAML file. Raises UserError if it cannot be read or parsed."""
    return parse_yaml(read_text(path, YAML_BYTES), str(path), words)


def parse_yaml(text: str, where: str, words: bool = False) -> Any:
    """Parse YAML with the types of YAML 1.2; with ``words`` numbers stay strings.

    Raises:
        UserError, which names ``where``: the text is not YAML, is nested too deep, or holds values that are not plain.
    """
    try:
        return yaml.load(text, Loader=WordLoader if words else Loader)
    except RecursionError as error:
        raise UserError(f"{where} cannot be read as YAML: it is nested too deep") from error
    except (yaml.YAMLError, ValueError) as error:  # an integer with too many digits is a ValueError
        raise UserError(f"{where} cannot be read as YAML: {' '.join(str(error).split())[:400]}") from error


def is_path(text: str) -> bool:
    """Whether file systems and JSON records can hold a path: it is UTF-8, without NUL characters."""
    return "\0" not in text and text.encode(errors="replace").decode() == text


def expand_home(path: str | os.PathLike[str]) -> str:
    """A path or Hub id with a leading ``~`` or ``~NAME`` expanded."""
    return os.path.expanduser(os.fspath(path))
