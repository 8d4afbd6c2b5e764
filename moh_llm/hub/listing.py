"""Which files of a model's folder are published: those of a list, and no others."""

import re
from collections.abc import Iterator
from pathlib import Path

from moh_llm.errors import UserError
from moh_llm.files import sha256
from moh_llm.hub.problem import Problem
from moh_llm.hub.remote_code import module_files
from moh_llm.model_folder import INDEX_NAME, SINGLE_NAME
from moh_llm.reading import read_json

# Tokenizers' big tables: as text they are full of things that look like anything.
VOCABULARIES = {
    "added_tokens.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "vocab.json",
    "vocab.txt",
}
RECORDS = ("conversion.json", "lineage.json", "run.json", "evaluation.json")
CARD = "README.md"
_NAMES = {
    *VOCABULARIES,
    *RECORDS,
    CARD,
    INDEX_NAME,
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "tokenizer.model",
    "tokenizer_config.json",
}
_LICENCES = re.compile(r"(LICENSE|LICENCE|NOTICE|USE_POLICY)[A-Za-z0-9._-]*")
_TEMPLATES = "additional_chat_templates"
_PICKLED = {".bin", ".ckpt", ".joblib", ".pickle", ".pkl", ".pt", ".pth"}


def list_files(folder: Path) -> tuple[list[str], list[Problem]]:
    """The files of a model's folder that are published, and one problem for each other one.

    Hidden files and Python's caches stay behind without a word. Names are relative, with ``/``.
    """
    allowed = _NAMES | _weights(folder) | set(module_files(folder))
    files, problems = [], []
    for path in _visible(folder):
        name = path.relative_to(folder).as_posix()
        if not _is_allowed(name, allowed):
            problems.append(_unwanted(path, name))
        elif path.is_file():
            files.append(name)
        else:  # a link that leads nowhere
            problems.append(Problem(name, "cannot be read as a file", "restore or remove it"))
    return files, problems


def is_text(name: str) -> bool:
    """Whether a published file is text, to be searched for what must not leave."""
    return not name.endswith((".safetensors", ".model"))


def _is_allowed(name: str, allowed: set[str]) -> bool:
    parent, _, last = name.rpartition("/")
    if parent:
        return parent == _TEMPLATES and last.endswith(".jinja")
    return name in allowed or _LICENCES.fullmatch(name) is not None


def _visible(folder: Path) -> Iterator[Path]:
    """Files, and folders that are not the one of templates, which are not looked into."""
    for path in sorted(folder.iterdir()):
        if path.name == _TEMPLATES and not path.is_symlink() and path.is_dir():
            yield from sorted(path.iterdir())
        elif not path.name.startswith(".") and path.name != "__pycache__":
            yield path


def _weights(folder: Path) -> set[str]:
    """The weight files that a reader of the folder would load."""
    if not (folder / INDEX_NAME).is_file():
        return {SINGLE_NAME}
    try:
        return {str(name) for name in read_json(folder / INDEX_NAME)["weight_map"].values()}
    except (UserError, KeyError, TypeError, AttributeError):
        return set()  # `check_weights` says what is wrong with the index


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
