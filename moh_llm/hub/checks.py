"""The files of a model that are published: which, the checks before their upload, and the copy that is uploaded.

Nothing is loaded or run here; `moh_llm.hub.proof` loads the model.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import moh_llm
from moh_llm.errors import UserError
from moh_llm.files import scratch_folder, sha256, write_text
from moh_llm.hub.secrets import find_in_file, find_paths, find_secrets, scrub_json
from moh_llm.locking import lock_folder
from moh_llm.reading import read_json
from moh_llm.records.model import INDEX_NAME, LICENCE_NAMES, SINGLE_NAME, read_index, read_weight_map
from moh_llm.records.seal import SEAL

CARD = "README.md"
RECORDS = ("conversion.json", "lineage.json", "run.json", "evaluation.json")
_NEEDED = ("config.json", "tokenizer_config.json")
_VOCABULARIES = ("merges.txt", "tokenizer.json", "vocab.json", "vocab.txt")  # they hold words that look like paths
_NAMES = {
    *RECORDS,
    *_NEEDED,
    *_VOCABULARIES,
    CARD,
    SEAL,
    INDEX_NAME,
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
}
_TEMPLATES = "additional_chat_templates"
_OWN = Path(moh_llm.__file__).parent / "modeling"

_CONVERT = "convert or save the model again"
_OTHER_CODE = "save the model again with this version, or read the code and pass --allow-other-code"


@dataclass(frozen=True)
class Problem:
    """One reason not to publish a file.

    Attributes:
        file: name relative to the model's folder.
        what: what is wrong; never holds a secret that was found.
        fix: how to fix it.
        forceable: whether ``--force`` may ignore it.
    """

    file: str
    what: str
    fix: str
    forceable: bool = True

    def __str__(self) -> str:
        return f"{self.file}: {self.what}; {self.fix}"


def check_files(folder: Path) -> list[Problem]:
    """Check a model's folder.

    Only files of `list_files` may be there, and configs must be; shards must hold what the index says; no text may hold
    a secret or a path of this machine.
    """
    files, problems = list_files(folder)
    problems += [Problem(name, "is missing", _CONVERT) for name in _NEEDED if name not in files]
    problems += [*_check_weights(folder), *check_secrets(folder, files)]
    for name in filter(_is_text, files):
        text = "" if name in _VOCABULARIES else _read(folder / name)
        for number, line in enumerate(text.splitlines() if find_paths(text, folder) else [], 1):
            if find_paths(line, folder):
                fix = "run the step that wrote it from relative paths" if name in RECORDS else "remove it"
                problems.append(Problem(name, f"line {number} holds a path of this machine", fix))
    return problems


def check_secrets(folder: Path, files: list[str]) -> list[Problem]:
    """One problem for each line of a text file that seems to hold a secret."""
    problems, fix = [], "remove it, and revoke it where it was issued"
    for name in filter(_is_text, files):
        for number, kind in find_in_file(folder / name, names=name not in _VOCABULARIES):
            line = "it holds what" if number is None else f"line {number}"
            problems.append(Problem(name, f"{line} looks like {kind}", fix, forceable=False))
    return problems


def _is_text(name: str) -> bool:
    return not name.endswith((".safetensors", ".model"))


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


# ---- which files


def list_files(folder: Path) -> tuple[list[str], list[Problem]]:
    """The files of a model's folder that are published, and a problem for each other file.

    Hidden files and Python's caches are skipped. Names are relative, with ``/``.
    """
    allowed = _NAMES | _weight_files(folder)
    files, problems = [], []
    for path in _visible(folder):
        name = path.relative_to(folder).as_posix()
        is_model_file = name in allowed or name.startswith(LICENCE_NAMES) or path.match(f"{_TEMPLATES}/*.jinja")
        if not (is_model_file or (path.suffix == ".py" and path.is_file())):
            problems.append(Problem(name, "is not part of a model", "move it out of the folder"))
        elif path.is_file():
            files.append(name)
        else:
            problems.append(Problem(name, "is not a file that can be read", "restore or remove it"))
    return files, problems


def _visible(folder: Path) -> Iterator[Path]:
    """The entries of a folder, with the files of its folder of templates."""
    for path in sorted(folder.iterdir()):
        if path.name == _TEMPLATES and not path.is_symlink() and path.is_dir():
            yield from sorted(path.iterdir())
        elif not path.name.startswith(".") and path.name != "__pycache__":
            yield path


def _weight_files(folder: Path) -> set[str]:
    """The weight files that are loaded from the folder: a single one is preferred to an index beside it."""
    if (folder / SINGLE_NAME).is_file() or not (folder / INDEX_NAME).is_file():
        return {SINGLE_NAME}
    try:
        return set(read_index(folder).values())
    except UserError:
        return set()  # `_check_weights` reports what is wrong with the index


# ---- weights


def _check_weights(folder: Path) -> Iterator[Problem]:
    """Compare index and shards, of which only the headers are read; the proof loads them as the config asks."""
    from safetensors import safe_open

    try:
        shards, _ = read_weight_map(folder)
        single = shards[0].name == SINGLE_NAME
        placed = {} if single else read_index(folder)
        if single and set(read_index(folder).values()) - {SINGLE_NAME}:
            yield Problem(INDEX_NAME, f"is not read beside {SINGLE_NAME}", "move it out of the folder")
    except UserError as error:
        what = str(error).replace(f"{folder}/", "").replace(str(folder), "the folder")
        yield Problem(INDEX_NAME if (folder / INDEX_NAME).is_file() else SINGLE_NAME, what, _CONVERT)
        return
    for shard in shards:
        with safe_open(shard, framework="np") as file:
            names, metadata = list(file.keys()), json.dumps(file.metadata() or {})
        if find_secrets(metadata) or find_paths(metadata, folder):
            yield Problem(shard.name, "its metadata holds a secret or a local path", _CONVERT, forceable=False)
        if placed and (extra := [name for name in names if placed.get(name) != shard.name]):
            yield Problem(shard.name, f"holds {extra[0]}, which the index does not place there", _CONVERT)


# ---- code


def other_code(folder: Path) -> list[Problem]:
    """The code in a folder that is not this version's own, by its hash. Nothing is run.

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
    """Pairs of an auto class and the code that it names, in a JSON file's `auto_map`, which may be malformed."""
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


# ---- the copy of the folder that is uploaded


@contextlib.contextmanager
def upload_copy(folder: Path, files: list[str], added: Mapping[str, Path]) -> Iterator[tuple[Path, list[str]]]:
    """Make a temporary copy of a model's folder to upload, without its card.

    Files without local paths are links: replace files of the copy, never write into them.

    Args:
        folder: the model's folder.
        files: names of its files that are published.
        added: more files for the copy, by the name that they get.

    Yields:
        The copy, and the names of the files in which local paths were cut to their last component.

    Raises:
        UserError: a record cannot be read, another process writes or publishes the model, or the disk refuses.
    """
    sources = {name: folder / name for name in files if name != CARD} | dict(added)
    with lock_folder(folder), scratch_folder(folder.resolve()) as copy:
        scrubbed = []
        for name, source in sources.items():
            (copy / name).parent.mkdir(exist_ok=True)
            if (text := _scrubbed(name, source)) is None:
                (copy / name).symlink_to(source.resolve())
            else:
                scrubbed.append(name)
                write_text(copy / name, text)
        yield copy, scrubbed


def _scrubbed(name: str, source: Path) -> str | None:
    """The text of a record or config without local paths; None where it has none.

    In configs only the fields where `save_pretrained` writes paths change: a chat template, say, must stay as it is.
    """
    if name not in (*RECORDS, "config.json", "tokenizer_config.json"):
        return None
    content = read_json(source)
    if name in RECORDS:
        scrubbed = scrub_json(content)
    elif isinstance(content, dict):
        paths = {key: scrub_json(content[key]) for key in ("_name_or_path", "name_or_path") if key in content}
        scrubbed = content | paths
    else:
        return None
    return None if scrubbed == content else json.dumps(scrubbed, indent=2, ensure_ascii=False) + "\n"
