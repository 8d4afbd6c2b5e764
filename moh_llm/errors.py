"""The one exception for bad input, and addresses as they may be shown: without user, password and query.

`UserError` and `moh_llm.files.write_json` pass every text through `without_passwords`, so that no message and no
record holds one, wherever it was given.
"""

import re
from typing import Any
from urllib.parse import urlsplit, urlunsplit

_SURROGATE = re.compile("([\udc80-\udcff])|[\ud800-\udfff]")
# C0 and C1, the marks that turn the direction of text or join its parts unseen, and the other ends of a line.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff]")
_ADDRESS = re.compile(r"\w+://[^\s'\"<>]+")
# One slash, too: a path that is made absolute or normalised loses the other.
_SCHEME = r"\b([A-Za-z][A-Za-z0-9+.-]{1,20}:/{1,2})"
# All that stands before the last @ of an address's authority, which ends at a slash.
_USER = re.compile(rf"{_SCHEME}[^\s/?#]*@")
# A password may hold slashes (a key of AWS) and blanks: what follows the colon is one unless it is a port.
_PASSWORD = re.compile(rf"{_SCHEME}[^\s/?#@:\[\]]*:(?!\d{{1,5}}(?![\w%+-]))[^\n@]*@")


def shown(path: str) -> str:
    """A path as it may be shown and recorded: an address without user, password and query."""
    path = without_passwords(in_unicode(path))
    if "://" not in path:
        return path
    try:
        parts = urlsplit(path)
    except ValueError:  # brackets that do not match
        return re.split(r"[?#]", path, maxsplit=1)[0]
    return urlunsplit((parts.scheme, parts.netloc, parts.path, "", ""))


def shown_in(text: str) -> str:
    """The text with the addresses in it as they may be shown."""
    return _ADDRESS.sub(lambda match: shown(match[0]), without_passwords(text))


def reason(error: BaseException) -> str:
    """An error's message on one line, with its addresses as they may be shown."""
    return " ".join(shown_in(str(error)).split()) or type(error).__name__


def without_passwords(text: str) -> str:
    """The text with user and password taken out of every address in it (``scheme://user:password@host``)."""
    if ":/" not in text or "@" not in text:
        return text
    return _PASSWORD.sub(r"\1", _USER.sub(r"\1", text))


def without_passwords_in(value: Any) -> Any:
    """`without_passwords` of every text in what JSON can hold, keys of objects among them."""
    if isinstance(value, str):
        return without_passwords(value)
    if isinstance(value, dict):
        return {without_passwords_in(key): without_passwords_in(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [without_passwords_in(child) for child in value]
    return value


def in_unicode(text: str) -> str:
    """A name with its bytes that are not UTF-8, which Python keeps as surrogates, written as in addresses, ``%NN``."""
    if text.isascii() or not _SURROGATE.search(text):
        return text
    return _SURROGATE.sub(lambda match: f"%{ord(match[0]) - 0xDC00:02X}" if match[1] else repr(match[0])[1:-1], text)


def printable(text: str) -> str:
    """A line as it may be shown: characters that control a terminal, or turn the direction of text, as escapes.

    Among them are newlines, and bytes of file names that are not UTF-8 (`in_unicode`).
    """
    return _CONTROL.sub(lambda match: repr(match[0])[1:-1], in_unicode(text))


class UserError(Exception):
    """Something the user gave cannot be used.

    The message is one line that says what is wrong, where, and how to fix it. Commands print it as
    ``error: ...`` and exit with status 2, without a traceback; any other exception is a bug and
    keeps its traceback. User and password of an address in it are taken out, and characters that are no text of one
    line (`printable`) are escaped.
    """

    def __init__(self, message: str):
        super().__init__(printable(without_passwords(message)))
