"""What must not leave in a text: secrets, and paths of this machine."""

import os
import re
import tempfile
from pathlib import Path
from typing import Any

from huggingface_hub import get_token

_SECRETS = {
    "a Hugging Face token": re.compile(r"\b(?:hf_|api_org_)[A-Za-z0-9]{30,}"),
    "an AWS key": re.compile(r"\b(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}\b"),
    "a GitHub token": re.compile(r"\b(?:gh[pousr]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{40,})"),
    "an API key": re.compile(r"\bsk-(?=[A-Za-z0-9_-]*[0-9])[A-Za-z0-9_-]{20,}"),
    "a private key": re.compile(r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY"),
    "an authorization header": re.compile(
        r"(?i)\bauthorization[\"']?\s*[:=]\s*[\"']?(?:bearer|basic)\s+[\w.~+/=-]{8,}"
    ),
    "a password in an address": re.compile(r"\b[a-z][a-z0-9+.-]*://[^\s/:@\"'<>${]+:[^\s/@\"'<>${]{3,}@"),
}
_PART = r"[\w.@+%=,:~-]"
_PATH = re.compile(rf"(?<![\w:/.<~}}-])(?:file://)?/{_PART}+(?:/+{_PART}+)+/?(?<![.,:])")


def find_secrets(text: str) -> list[str]:
    """The kinds of secrets that a text holds, such as "a GitHub token"; the secrets themselves are not given."""
    own = get_token()
    found = [kind for kind, pattern in _SECRETS.items() if pattern.search(text)]
    return found or (["your Hugging Face token"] if own and own in text else [])


def redact(text: str) -> str:
    """The text with all that looks like a secret replaced."""
    for pattern in _SECRETS.values():
        text = pattern.sub("[hidden]", text)
    own = get_token()
    return text.replace(own, "[hidden]") if own else text


def find_paths(text: str, folder: Path) -> bool:
    """Whether a text holds a path in somebody's home, or in this machine's working, temporary or the model's folder."""
    places = {Path.home(), Path.cwd(), Path(tempfile.gettempdir()), folder.resolve().parent}
    roots = "|".join(sorted(re.escape(str(place)) for place in places if len(place.parts) > 1))
    return re.search(rf"(?<![\w:/.<~-])(?:file://)?(?:/(?:home|Users)/\w|(?:{roots})/[\w.])", text) is not None


def scrub(text: str) -> str:
    """The text with every absolute path of two or more components cut to its last one."""
    if text.startswith("/") and "\n" not in text and os.path.exists(text):
        return _last(text)  # it may have spaces
    return _PATH.sub(lambda found: _last(found[0]), text)


def scrub_json(value: Any) -> Any:
    """A copy of what a JSON file holds with all its strings, keys too, as `scrub` gives them."""
    if isinstance(value, list):
        return [scrub_json(item) for item in value]
    if isinstance(value, dict):
        copied: dict[str, Any] = {}
        for key, item in value.items():
            name, number = scrub(key), 1
            while name in copied:  # two texts of one name in different folders stay two
                number += 1
                name = f"{scrub(key)} ({number})"
            copied[name] = scrub_json(item)
        return copied
    return scrub(value) if isinstance(value, str) else value


def _last(path: str) -> str:
    trimmed = path.rstrip("/")
    # The last component of a home folder is somebody's name.
    is_home = trimmed == str(Path.home()) or re.fullmatch(r"(file://)?/(home|Users)/[^/]+", trimmed)
    return "home" if is_home else trimmed.rpartition("/")[2]
