"""The files of a model that are published: which, the checks before their upload, and the copy that is uploaded.

Nothing is loaded or run here; `moh_llm.hub.proof` loads the model.
"""

import contextlib
import functools
import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import get_token

import moh_llm
from moh_llm.conversion.checkpoint import REMOTE_CODE
from moh_llm.errors import UserError
from moh_llm.evaluation.rendering import plain
from moh_llm.files import scratch_folder, sha256, write_json
from moh_llm.locking import lock_folder
from moh_llm.reading import read_json
from moh_llm.records.model import (
    ADAPTER,
    DESCRIPTION,
    LICENCE_NAMES,
    is_image_model,
    read_config,
    read_index,
    read_weight_map,
    weight_names,
)
from moh_llm.records.seal import SEAL

CARD = "README.md"
_RECORDS = ("conversion.json", "lineage.json", "run.json", "evaluation.json")
_NEEDED = ("config.json", "tokenizer_config.json")  # of text; models of images have no tokenizer
_VOCABULARIES = ("merges.txt", "tekken.json", "tokenizer.json", "vocab.json", "vocab.txt")
_NAMES = {CARD, SEAL, *_RECORDS, *DESCRIPTION}
_TEMPLATES = "additional_chat_templates"
# Files of an earlier upload that would be read beside, or instead of, the new ones.
REPLACED = ["*.safetensors", "*.safetensors.index.json", "*.py", f"{_TEMPLATES}/*.jinja", ADAPTER, *sorted(_NAMES)]
# How to mend a file.
_CONVERT, _MOVE = "convert or save the model again", "move it out of the folder"


def check_files(folder: Path) -> list[str]:
    """Check a model's folder.

    Only files of `list_files` may be there, and configs must be; shards must hold what the index says; no text may hold
    a secret; all code must be this version's. A problem names the file, what is wrong and how to mend it.
    """
    files, problems = list_files(folder)
    of_images = "config.json" in files and is_image_model(read_config(folder))
    needed = _NEEDED[:1] if of_images else _NEEDED
    problems += [f"{name}: is missing; {_CONVERT}" for name in needed if name not in files]
    return [*problems, *_check_weights(folder), *_check_secrets(folder, files), *_check_code(folder, of_images)]


def list_files(folder: Path) -> tuple[list[str], list[str]]:
    """The files of a model's folder that are published, and a problem for each other file.

    Hidden files and Python's caches are skipped. Names are relative, with ``/``.
    """
    allowed = _NAMES | _weight_files(folder) | {weight_names(folder)[1]}
    files, problems = [], []
    for path in _visible(folder):
        name = path.relative_to(folder).as_posix()
        ending = path.suffix.lower()[1:]  # LICENSE-Llama-3.1 is a text, LICENSE.pkl is none
        is_licence = name.startswith(LICENCE_NAMES) and (ending in ("", "md", "txt", "rst") or ending.isdigit())
        is_model_file = name in allowed or is_licence or path.match(f"{_TEMPLATES}/*.jinja")
        if not path.is_file() or not (is_model_file or path.suffix == ".py"):
            problems.append(f"{name}: is not part of a model; {_MOVE}")
        else:
            files.append(name)
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
    single, index = weight_names(folder)
    if (folder / single).is_file() or not (folder / index).is_file():
        return {single}
    try:
        return set(read_index(folder).values())
    except UserError:
        return set()  # `_check_weights` reports what is wrong with the index


def _check_weights(folder: Path) -> Iterator[str]:
    """Compare index and shards, of which only the headers are read; the proof loads them as the config asks."""
    single, index = weight_names(folder)
    try:
        (shards, held), placed = read_weight_map(folder), read_index(folder)
    except UserError as error:
        what = str(error).replace(f"{folder}/", "").replace(str(folder), "the folder")
        yield f"{index if (folder / index).is_file() else single}: {what}; {_CONVERT}"
        return
    if shards[0].name == single:
        if set(placed.values()) - {single}:
            yield f"{index}: is not read beside {single}; {_MOVE}"
    elif extra := next((name for name, file in held.items() if placed.get(name) != file), None):
        yield f"{held[extra]}: holds {extra}, which the index does not place there; {_CONVERT}"


def _check_secrets(folder: Path, files: list[str]) -> Iterator[str]:
    """One problem for each line of a text file that seems to hold a secret."""
    fix = "remove it, and revoke it where it was issued"
    for name in files:
        if name.endswith((".safetensors", ".model")):
            continue
        text, vocabulary = (folder / name).read_text(encoding="utf-8", errors="replace"), name in _VOCABULARIES
        # A vocabulary has a line for each word, and is searched as a whole.
        for number, line in enumerate([text] if vocabulary else text.splitlines(), 1):
            for kind in find_secrets(line, vocabulary):
                where = "it" if vocabulary else f"line {number}"
                yield f"{name}: {where} holds what looks like a secret ({kind}); {fix}"


def _check_code(folder: Path, of_images: bool) -> Iterator[str]:
    """Name the code that has not the bytes that this version writes into a file of that name. Nothing is run.

    The proof runs the code of the folder, and so do all who load the published model.
    """
    own = {path.name: sha256(path) for path in REMOTE_CODE}
    if of_images:
        from moh_llm.vision import read_code  # needs a newer transformers than models of text

        own = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in read_code().items()}
    version = f"code of moh-llm {moh_llm.__version__}"
    for path in sorted(folder.rglob("*.py")):
        name, found = path.relative_to(folder).as_posix(), sha256(path)
        if found != own.get(name):
            yield f"{name}: has SHA-256 {found[:16]} and is not {version}; {_CONVERT}"
    for name in (*_NEEDED, "preprocessor_config.json"):
        for wanted, reference in _auto_map(folder / name):
            if f"{reference.partition('.')[0]}.py" not in own:
                yield f"{name}: auto_map names {reference} for {wanted}, which is not {version}; {_CONVERT}"


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


# ---- secrets: forms that detect-secrets knows, and tokens for the Hub

_HUGGING_FACE = re.compile(r"\b(?:hf_|api_org_)[A-Za-z0-9]{30,}")
# The files of a model are full of hashes and of tokens that are no words; an address of a machine is no secret.
_LEFT_OUT = {"Base64 High Entropy String", "Hex High Entropy String", "Public IP (ipv4)"}
# Known by the name before them. In a vocabulary, names are words like all others.
_NAMED = {"Secret Keyword", "Cloudant Credentials", "IBM COS HMAC Credentials", "SoftLayer Credentials"}


@functools.cache
def _detectors() -> dict[str, Any]:
    """The detectors of detect-secrets, by what they find. None of them uses the network here."""
    from detect_secrets.core.plugins.util import get_mapping_from_secret_type_to_class

    kinds = get_mapping_from_secret_type_to_class()
    return {kind: detector() for kind, detector in kinds.items() if kind not in _LEFT_OUT}


def find_secrets(text: str, vocabulary: bool = False) -> list[str]:
    """The kinds of secrets that a text seems to hold, such as "GitHub Token".

    The text is a line, or a whole ``vocabulary``, in which values that only their names make secrets do not count.
    """
    from detect_secrets.filters.heuristic import is_prefixed_with_dollar_sign, is_templated_secret

    own = get_token()
    found = ["Hugging Face Token"] if _HUGGING_FACE.search(text) or (own and own in text) else []
    for kind, detector in _detectors().items():
        if not (vocabulary and kind in _NAMED):
            secrets = list(detector.analyze_string(text))
            # `${PASSWORD}` and `<password>` stand for a secret.
            if not all(is_templated_secret(secret) or is_prefixed_with_dollar_sign(secret) for secret in secrets):
                found.append(kind)
    return found


def redact(text: str) -> str:
    """The text without tokens for the Hub."""
    own = get_token()
    return _HUGGING_FACE.sub("[hidden]", text.replace(own, "[hidden]") if own else text)


# ---- the copy of the folder that is uploaded


@contextlib.contextmanager
def upload_copy(folder: Path, files: list[str], added: Mapping[str, Path]) -> Iterator[Path]:
    """Make a temporary copy of a model's folder to upload, without its card and its seal.

    Records are written anew, with absolute paths cut to their last component. All other files are links: replace files
    of the copy, never write into them. ``added`` holds more files for the copy, by the name that they get.

    Raises:
        UserError: a record cannot be read, another process writes or publishes the model, or the disk refuses.
    """
    sources = {name: folder / name for name in files if name not in (CARD, SEAL)} | dict(added)
    with lock_folder(folder), scratch_folder(folder.resolve()) as copy:
        for name, source in sources.items():
            (copy / name).parent.mkdir(exist_ok=True)
            if name in _RECORDS:
                write_json(copy / name, _without_paths(read_json(source)))
            else:
                (copy / name).symlink_to(source.resolve())
        yield copy


def _without_paths(value: Any) -> Any:
    """A copy of what a JSON file holds, with absolute paths in its strings, keys too, cut to their last component."""
    if isinstance(value, list):
        return [_without_paths(item) for item in value]
    if isinstance(value, dict):
        copied: dict[str, Any] = {}
        for key, item in value.items():
            name = plain(key)  # two files of one name in different folders stay two entries
            copied[f"{name} ({len(copied) + 1})" if name in copied else name] = _without_paths(item)
        return copied
    return plain(value) if isinstance(value, str) else value
