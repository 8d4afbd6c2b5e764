"""What must not leave in a text: secrets, and paths of this machine.

The rules are few and about what people keep beside a model. detect-secrets (1.5.0, of 2024), the
library for this, has none for Hugging Face tokens.
"""

import functools
import itertools
import json
import os
import re
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any

_KINDS = {
    "a Hugging Face token": r"\b(?:hf_|api_org_)[A-Za-z0-9]{30,}",
    "an AWS key": r"\b(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}\b",
    "a GitHub token": r"\b(?:gh[pousr]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{40,})",
    "a GitLab token": r"\bglpat-[A-Za-z0-9_-]{20,}",
    "an API key": r"\bsk-(?=[A-Za-z0-9_-]*[0-9])[A-Za-z0-9_-]{20,}|\bAIza[A-Za-z0-9_-]{35}",
    "a Slack token": r"\bxox[abposr]-[A-Za-z0-9-]{10,}",
    "a JSON web token": r"\beyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{10,}",
    "a private key": r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY",
    "an authorization header": r"(?i:\bauthorization[\"']?\s*[:=]\s*[\"']?(?:bearer|basic|token)\s+)[\w.~+/=-]{8,}",
    "a bearer token": r"(?i:\bbearer\s+)(?=[\w.~+/-]*[0-9])[\w.~+/-]{20,}",
    "a password in an address": r"\b[a-z][a-z0-9+.-]*://[^\s/:@\"'<>${]+:[^\s/@\"'<>${]{3,}@",
}
_SECRETS = {kind: re.compile(pattern) for kind, pattern in _KINDS.items()}

# Tokenizers have fields such as pad_token, so a token is one only by its whole name or with a service's before it.
_FIELD = (
    r"(?:[a-z0-9_-]*(?:api[_-]?key|access[_-]?key(?:[_-]?id)?|secret[_-]?key|secret|password|passwd|credentials?)"
    r"|(?:[a-z0-9_-]*(?:hf|hub|hugging_?face|auth|access|api|bearer|refresh|secret|session|wandb|github)[_-])?token)"
)
_FIELD_NAME = re.compile(_FIELD, re.IGNORECASE)
_FIELD_IN_TEXT = re.compile(rf"(?<![\w-]){_FIELD}[\"']?\s*[:=]\s*[\"']([^\"'\s]{{6,}})[\"']", re.IGNORECASE)
# Without quotes, as in a shell, only what looks drawn at random: letters and digits.
_BARE = r"(?=[A-Za-z_.+/-]*[0-9])(?=[0-9_.+/-]*[A-Za-z])([\w.+/-]{8,})"
_IN_SHELL = re.compile(rf"(?<![\w-])(?:--{_FIELD}[= ]|{_FIELD}=){_BARE}", re.IGNORECASE)
_PLACEHOLDER = re.compile(r"\.\.\.|[<>${}*]|your|xxx|example|changeme|^(?:none|null|true|false)$", re.IGNORECASE)

# Folders that every machine of a kind has tell nothing.
_SYSTEM = {"bin", "boot", "dev", "etc", "lib", "lib64", "proc", "run", "sbin", "sys", "usr"}
_USUAL = {"Users", "Volumes", "content", "data", "home", "mnt", "opt", "private", "root", "scratch", "tmp", "var"}


def find_secrets(text: str, fields: bool = True) -> list[str]:
    """The kinds of secrets that a text holds, such as "a GitHub token"; the secrets themselves are not given.

    Without ``fields``, what stands where a password would is let be: a vocabulary holds every word.
    """
    kinds = [kind for kind, pattern in _SECRETS.items() if pattern.search(text)]
    for pattern in (_FIELD_IN_TEXT, _IN_SHELL) if fields else ():
        if any(not _PLACEHOLDER.search(found[1]) for found in pattern.finditer(text)):
            kinds.append("a field for a secret, filled in")
    return list(dict.fromkeys(kinds))


def find_secrets_in_json(value: Any) -> Iterator[tuple[str, str]]:
    """(place, kind) of the secrets in what a JSON file holds; a place is like ``base.name``."""
    for place, name, text in _strings(value):
        kinds = find_secrets(text)
        if _FIELD_NAME.fullmatch(name) and len(text) >= 4 and not _PLACEHOLDER.search(text):
            kinds = kinds or ["a field for a secret, filled in"]
        yield from ((redact(place), kind) for kind in kinds)


def redact(text: str) -> str:
    """The text with all that looks like a secret replaced."""
    for pattern in _SECRETS.values():
        text = pattern.sub("[hidden]", text)
    return text


def find_paths(text: str) -> list[str]:
    """The paths of this machine that a text holds."""
    return [found[0] for found in _paths().finditer(text)]


def find_paths_in_json(value: Any) -> Iterator[tuple[str, str]]:
    """(place, path) of this machine's paths in what a JSON file holds."""
    for place, _, text in _strings(value):
        yield from ((place, path) for path in find_paths(text))


def scrub(text: str) -> str:
    """The text with every path of this machine cut to its last component."""
    if "\n" not in text and _paths().match(text) and os.path.exists(text):
        return _last(text)  # also where it has spaces
    return _paths().sub(lambda found: _last(found[0]), text)


def scrub_json(value: Any, whole: bool) -> tuple[Any, dict[str, str]]:
    """A copy of what a JSON file holds with every path of this machine cut to its last component.

    Args:
        value: the content.
        whole: change only values that are a path and nothing else. A chat template, say, may
            speak of a path, and must stay as the model knows it.

    Returns:
        The copy, and what was changed: place -> path as it was.
    """
    changed: dict[str, str] = {}

    def copy(item: Any, place: str) -> Any:
        if isinstance(item, dict):
            copied: dict[str, Any] = {}
            for key, child in item.items():
                inner = f"{place}.{key}" if place else key
                copied[key if whole else copy_key(key, inner, item.keys() | copied.keys())] = copy(child, inner)
            return copied
        if isinstance(item, list):
            return [copy(child, f"{place}[{i}]") for i, child in enumerate(item)]
        if not isinstance(item, str):
            return item
        scrubbed = scrub(item)
        if scrubbed == item or (whole and scrubbed != _last(item)):
            return item
        changed[place] = item
        return scrubbed

    def copy_key(key: str, place: str, taken: Set[str]) -> str:
        new = scrub(key)
        if new == key:
            return key
        changed[place] = key
        # Two texts of one name in different folders stay two.
        names = itertools.chain([new], (f"{new} ({number})" for number in itertools.count(2)))
        return next(name for name in names if name not in taken)

    return copy(value, ""), changed


def parse_json(text: str) -> Any:
    """What a JSON text holds, or the text itself where it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _strings(value: Any, place: str = "", name: str = "") -> Iterator[tuple[str, str, str]]:
    """(place, name of the innermost field, text) of every string, keys of objects among them."""
    if isinstance(value, dict):
        for key, child in value.items():
            yield place or "the top", "", key
            yield from _strings(child, f"{place}.{key}" if place else key, key)
    elif isinstance(value, list):
        for i, child in enumerate(value):
            yield from _strings(child, f"{place}[{i}]", name)
    elif isinstance(value, str):
        yield place or "the top", name, value


def _last(path: str) -> str:
    trimmed = path.rstrip("/\\")
    last = re.split(r"[/\\]", trimmed)[-1]
    # The last component of a home folder is somebody's name.
    is_home = trimmed == str(Path.home()) or re.fullmatch(r"(file://)?/(home|Users)/[^/]+", trimmed)
    return "home" if is_home else last


@functools.cache
def _paths() -> re.Pattern[str]:
    here = {path.name for path in Path("/").iterdir() if path.is_dir()} if Path("/").is_dir() else set()
    roots = "|".join(sorted(map(re.escape, (here | _USUAL) - _SYSTEM - {""})))
    part = r"[\w.@+%=,:~-]*[\w@+%=~-]"
    home = rf"|{re.escape(str(Path.home()))}(?![\w/])" if len(Path.home().parts) > 1 else ""
    return re.compile(
        rf"(?<![\w:/.<~-])(?:file://)?(?:/(?:{roots})(?:/+{part})+/?{home})"
        rf"|(?<!\w)[A-Za-z]:[\\/]+Users(?:[\\/]+{part})+"
    )
