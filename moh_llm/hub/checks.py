"""All checks of a folder's files before they leave. Nothing is loaded: the proof by loading is `moh_llm.hub.proof`."""

from pathlib import Path

from moh_llm.hub.listing import RECORDS, VOCABULARIES, is_text, list_files
from moh_llm.hub.problem import Problem
from moh_llm.hub.remote_code import check_remote_code
from moh_llm.hub.texts import find_paths, find_paths_in_json, find_secrets, find_secrets_in_json, parse_json
from moh_llm.hub.weights import check_weights

_REMOVE = "remove it, and have it revoked where it was issued"
_NEEDED = ("config.json", "tokenizer_config.json")


def check_files(folder: Path) -> list[Problem]:
    """Everything that speaks against publishing a model's folder as it is.

    Only files of `list_files` are there, needed ones are, weights are those of index and config,
    the code needs nothing but torch and transformers, and no text holds a secret or a path of this
    machine.
    """
    files, problems = list_files(folder)
    for name in _NEEDED:
        if name not in files:
            problems.append(Problem(name, "is missing", "convert or save the model again"))
    problems += check_weights(folder) + check_remote_code(folder) + check_secrets(folder, files)
    for name in files:
        problems += _local_paths(folder, name)
    return problems


def check_secrets(folder: Path, files: list[str]) -> list[Problem]:
    """One problem for each place of a text file that holds what looks like a secret."""
    problems = []
    for name in filter(is_text, files):
        text = _read(folder / name)
        if name.endswith(".json") and name not in VOCABULARIES:
            found = list(find_secrets_in_json(parse_json(text)))
        else:
            found = _secrets_by_line(text, fields=name not in VOCABULARIES)
        problems += [Problem(name, f"{place} looks like {kind}", _REMOVE, forceable=False) for place, kind in found]
    return problems


def _secrets_by_line(text: str, fields: bool) -> list[tuple[str, str]]:
    if not find_secrets(text, fields):
        return []
    lines = enumerate(text.splitlines(), 1)
    return [(f"line {number}", kind) for number, line in lines for kind in find_secrets(line, fields)]


def _local_paths(folder: Path, name: str) -> list[Problem]:
    if name in VOCABULARIES or not is_text(name):
        return []
    text = _read(folder / name)
    if name.endswith(".json"):
        found = [place for place, _ in find_paths_in_json(parse_json(text))]
    else:
        found = [f"line {number}" for number, line in enumerate(text.splitlines(), 1) if find_paths(line)]
    fix = "run the step that wrote it from relative paths" if name in RECORDS else "take it out"
    return [Problem(name, f"{place} holds a path of this machine", fix) for place in dict.fromkeys(found)]


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")
