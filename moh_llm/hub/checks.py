"""All checks of a folder's files before they leave. Nothing is loaded: the proof by loading is `moh_llm.hub.proof`."""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import moh_llm
from moh_llm.errors import UserError
from moh_llm.files import sha256
from moh_llm.hub.texts import find_paths, find_secrets
from moh_llm.reading import read_json
from moh_llm.records.model import INDEX_NAME, LICENCE_NAMES, SINGLE_NAME, read_weight_map

CARD = "README.md"
RECORDS = ("conversion.json", "lineage.json", "run.json", "evaluation.json")
_NEEDED = ("config.json", "tokenizer_config.json")
_NAMES = {
    *RECORDS,
    *_NEEDED,
    CARD,
    INDEX_NAME,
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
}
_VOCABULARIES = ("merges.txt", "tokenizer.json", "vocab.json", "vocab.txt")  # they hold every word, /home/a too
_TEMPLATES = "additional_chat_templates"
_PICKLED = {".bin", ".ckpt", ".joblib", ".pickle", ".pkl", ".pt", ".pth"}
_OWN = Path(moh_llm.__file__).parent / "modeling"
_AUTO_CLASSES = ("AutoConfig", "AutoModel", "AutoModelForCausalLM")

_CONVERT = "convert or save the model again"
_REVOKE = "remove it, and have it revoked where it was issued"
_OTHER_CODE = "save the model again with this version, or read the code and pass --allow-other-code"


@dataclass(frozen=True)
class Problem:
    """One reason why a file must not be published as it is.

    Attributes:
        file: name relative to the model's folder.
        what: what is wrong; never holds a secret that was found.
        fix: the way out.
        forceable: whether ``--force`` may pass over it. A secret never leaves.
    """

    file: str
    what: str
    fix: str
    forceable: bool = True

    def __str__(self) -> str:
        return f"{self.file}: {self.what}; {self.fix}"


def check_files(folder: Path) -> list[Problem]:
    """Everything that speaks against publishing a model's folder as it is.

    Only files of `list_files` may be there, needed ones must be, shards must hold what the index says, the code must
    need nothing but torch and transformers, and no text may hold a secret or a path of this machine.
    """
    files, problems = list_files(folder)
    problems += [Problem(name, "is missing", _CONVERT) for name in _NEEDED if name not in files]
    problems += [*_check_weights(folder), *_check_code(folder), *check_secrets(folder, files)]
    for name in filter(_is_text, files):
        text = "" if name in _VOCABULARIES else _read(folder / name)
        for number, line in enumerate(text.splitlines() if find_paths(text, folder) else [], 1):
            if find_paths(line, folder):
                fix = "run the step that wrote it from relative paths" if name in RECORDS else "take it out"
                problems.append(Problem(name, f"line {number} holds a path of this machine", fix))
    return problems


def check_secrets(folder: Path, files: list[str]) -> list[Problem]:
    """One problem for each line of a text file that holds what looks like a secret."""
    problems = []
    for name in filter(_is_text, files):
        text = _read(folder / name)
        for number, line in enumerate(text.splitlines() if find_secrets(text) else [], 1):
            for kind in find_secrets(line):
                problems.append(Problem(name, f"line {number} looks like {kind}", _REVOKE, forceable=False))
    return problems


def _is_text(name: str) -> bool:
    return not name.endswith((".safetensors", ".model"))


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


# ---- which files


def list_files(folder: Path) -> tuple[list[str], list[Problem]]:
    """The files of a model's folder that are published, and one problem for each other one.

    Hidden files and Python's caches stay behind without a word. Names are relative, with ``/``.
    """
    allowed = _NAMES | _weight_files(folder) | set(_module_files(folder))
    files, problems = [], []
    for path in _visible(folder):
        name = path.relative_to(folder).as_posix()
        if not (name in allowed or name.startswith(LICENCE_NAMES) or path.match(f"{_TEMPLATES}/*.jinja")):
            problems.append(_unwanted(path, name))
        elif path.is_file():
            files.append(name)
        else:  # a link that leads nowhere
            problems.append(Problem(name, "cannot be read as a file", "restore or remove it"))
    return files, problems


def _visible(folder: Path) -> Iterator[Path]:
    """Files, and folders that are not the one of templates, which are not looked into."""
    for path in sorted(folder.iterdir()):
        if path.name == _TEMPLATES and not path.is_symlink() and path.is_dir():
            yield from sorted(path.iterdir())
        elif not path.name.startswith(".") and path.name != "__pycache__":
            yield path


def _weight_files(folder: Path) -> set[str]:
    """The weight files that a reader of the folder would load."""
    if not (folder / INDEX_NAME).is_file():
        return {SINGLE_NAME}
    try:
        return {str(name) for name in read_json(folder / INDEX_NAME)["weight_map"].values()}
    except (UserError, KeyError, TypeError, AttributeError):
        return set()  # `_check_weights` says what is wrong with the index


def _unwanted(path: Path, name: str) -> Problem:
    if "optimizer" in name or "scheduler" in name or name == "checkpoints":
        what = "is the state of a training run"
    elif path.is_dir():
        what = "is a folder, which a model has none of"
    elif path.suffix in _PICKLED:
        what = "is a pickle, which runs code where it is loaded"
    elif path.suffix == ".safetensors":
        what = "holds weights that the index does not name"
    elif path.suffix == ".py":
        what = "is code that no auto_map entry needs"
        if path.is_file():
            what += f" (SHA-256 {sha256(path)[:16]})"
    else:
        what = "is not part of a model"
    return Problem(name, what, "move it out of the folder")


# ---- weights


def _check_weights(folder: Path) -> Iterator[Problem]:
    """Compare index and shards, of which only the headers are read; the proof loads them as the config asks."""
    from safetensors import safe_open

    try:
        shards, weight_map = read_weight_map(folder)
    except UserError as error:
        what = str(error).replace(f"{folder}/", "").replace(str(folder), "the folder")
        yield Problem(INDEX_NAME if (folder / INDEX_NAME).is_file() else SINGLE_NAME, what, _CONVERT)
        return
    for shard in shards:
        with safe_open(shard, framework="np") as file:
            names, metadata = list(file.keys()), json.dumps(file.metadata() or {})
        if find_secrets(metadata) or find_paths(metadata, folder):
            yield Problem(shard.name, "its metadata holds a secret or a local path", _CONVERT, forceable=False)
        if astray := [name for name in names if weight_map.get(name) != shard.name]:
            yield Problem(shard.name, f"holds {astray[0]}, which the index does not place there", _CONVERT)


# ---- code


def other_code(folder: Path) -> list[Problem]:
    """What loading the folder would run that is not this version's own code, by hash. Nothing is run to find out.

    Code is this version's when it has the bytes of the file of that name in `moh_llm.modeling`.
    """
    own = {path.name: sha256(path) for path in _OWN.glob("*.py") if path.name != "__init__.py"}
    problems = []
    for path in sorted(folder.rglob("*.py")):
        name, found = path.relative_to(folder).as_posix(), sha256(path)
        if found != own.get(name):
            theirs = f"whose file has {own[name][:16]}" if name in own else "which has no such file"
            what = f"has SHA-256 {found[:16]} and is not code of moh-llm {moh_llm.__version__}, {theirs}"
            problems.append(Problem(name, what, _OTHER_CODE, forceable=False))
    for name in _NEEDED:
        for wanted, reference in _auto_map(folder / name):
            if f"{reference.partition('.')[0]}.py" not in own:
                what = f"auto_map names {reference} for {wanted}, which is not code of moh-llm {moh_llm.__version__}"
                problems.append(Problem(name, what, _OTHER_CODE, forceable=False))
    return problems


def _auto_map(path: Path) -> Iterator[tuple[str, str]]:
    """(Auto class, code that it names) of a JSON file's `auto_map`, however malformed."""
    try:
        content: Any = read_json(path)
    except UserError:
        return
    auto_map = content.get("auto_map") if isinstance(content, dict) else None
    # A tokenizer's is a pair (slow, fast), in old files without the name of the class.
    entries = auto_map.items() if isinstance(auto_map, dict) else [("AutoTokenizer", auto_map)]
    for wanted, named in entries:
        for reference in named if isinstance(named, list) else [named]:
            if reference is not None:
                yield str(wanted), str(reference)


def _module_files(folder: Path) -> list[str]:
    """The files that `auto_map` names and those that they import beside them, sorted; absent ones are left out."""
    waiting = [f"{reference.partition('.')[0]}.py" for _, reference in _auto_map(folder / "config.json")]
    found: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name not in found and (folder / name).is_file():
            found.add(name)
            # As transformers finds them when it loads remote code.
            siblings = re.findall(r"^\s*from\s+\.(\S+)\s+import", _read(folder / name), re.MULTILINE)
            waiting += [f"{module}.py" for module in siblings]
    return sorted(found)


def _check_code(folder: Path) -> Iterator[Problem]:
    """What would make the code need more than torch and transformers; whether it loads is left to the proof."""
    from transformers.dynamic_module_utils import get_imports

    auto_map = dict(_auto_map(folder / "config.json"))
    for wanted in _AUTO_CLASSES:
        if wanted not in auto_map:
            yield Problem("config.json", f"auto_map has no {wanted}", _CONVERT)
    for name in _module_files(folder):
        try:
            packages = set(get_imports(folder / name)) - {"torch", "transformers"} - sys.stdlib_module_names
        except (SyntaxError, ValueError):
            yield Problem(name, "is not Python that parses", _CONVERT)
            continue
        for package in sorted(packages):
            yield Problem(name, f"imports {package}", "whoever loads the model has torch and transformers only")
