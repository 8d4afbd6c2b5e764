"""The exception for bad input, and functions that remove credentials from addresses.

`UserError` and `moh_llm.files.write_json` pass every string through `without_passwords`, so that messages and records
never hold a password.
"""

import re
from typing import Any
from urllib.parse import urlsplit, urlunsplit

# C0 and C1 control characters, marks of text direction, invisible joiners, other line ends, and surrogates, which stand
# for bytes of file names that are not UTF-8.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")
_ADDRESS = re.compile(r"\w+://[^\s'\"<>]+")
# Also one slash: making a path absolute or normal drops the other.
_SCHEME = r"\b([A-Za-z][A-Za-z0-9+.-]{1,20}:/{1,2})"
# Everything before the last @ of the authority, which ends at a slash.
_USER = re.compile(rf"{_SCHEME}[^\s/?#]*@")
# A password may hold slashes (AWS keys) and spaces: whatever follows the colon is one, unless it is a port.
_PASSWORD = re.compile(rf"{_SCHEME}[^\s/?#@:\[\]]*:(?!\d{{1,5}}(?![\w%+-]))[^\n@]*@")


def shown(path: str) -> str:
    """A path or address as it may be printed and recorded: without user, password and query."""
    path = without_passwords(path)
    if "://" not in path:
        return path
    try:
        parts = urlsplit(path)
    except ValueError:  # unbalanced brackets
        return re.split(r"[?#]", path, maxsplit=1)[0]
    return urlunsplit((parts.scheme, parts.netloc, parts.path, "", ""))


def shown_in(text: str) -> str:
    """Apply `shown` to every address in a text."""
    return _ADDRESS.sub(lambda match: shown(match[0]), without_passwords(text))


def reason(error: BaseException) -> str:
    """The message of an error on one line, with addresses as they may be shown."""
    return " ".join(shown_in(str(error)).split()) or type(error).__name__


def without_passwords(text: str) -> str:
    """Remove user and password from every address (``scheme://user:password@host``) in a text."""
    if ":/" not in text or "@" not in text:
        return text
    return _PASSWORD.sub(r"\1", _USER.sub(r"\1", text))


def without_passwords_in(value: Any) -> Any:
    """Apply `without_passwords` to every string of a JSON value, including keys."""
    if isinstance(value, str):
        return without_passwords(value)
    if isinstance(value, dict):
        return {without_passwords_in(key): without_passwords_in(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [without_passwords_in(child) for child in value]
    return value


def printable(text: str) -> str:
    """Escape characters that control a terminal or the text direction, newlines, and bytes that are not UTF-8."""
    return _CONTROL.sub(lambda match: repr(match[0])[1:-1], text)


class UserError(Exception):
    """Bad input. The message is one line that says what is wrong, where, and how to fix it.

    Commands print it as ``error: ...`` and exit with status 2. Any other exception is a bug and keeps its traceback.
    The message is passed through `without_passwords` and `printable`.
    """

    def __init__(self, message: str):
        super().__init__(printable(without_passwords(message)))
