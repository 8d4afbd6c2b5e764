"""What must not be published in a text: secrets, and paths of this machine.

Secrets are keys and tokens, known by their form, and what is assigned to a name like password. Most forms are those of
detect-secrets. Its detectors of random text are left out, because the files of a model are full of hashes and of tokens
that are no words, and so are those that ask a service whether a key is valid.
"""

import functools
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import get_token

# Forms that detect-secrets lacks, or matches too rarely or too often.
_FORMS = {
    "a Hugging Face token": re.compile(r"\b(?:hf_|api_org_)[A-Za-z0-9]{30,}"),
    "an AWS key": re.compile(r"\b(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}\b"),
    "a GitHub token": re.compile(r"\b(?:gh[pousr]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{40,})"),
    "a Google key": re.compile(r"\b(?:AIza[\w-]{35}(?![\w-])|GOCSPX-[\w-]{28}|ya29\.[\w-]{20,})"),
    "a Slack token": re.compile(r"\bx(?:ox[a-z](?:\.xox[a-z])?|app)-[A-Za-z0-9-]{10,}"),
    "a Weights & Biases key": re.compile(
        r"(?i)\bwandb_v1_\w{20,}|\bwandb[\w .\"'`:=-]{1,40}?\b(?:local-)?[0-9a-f]{40}\b|\bpassword\s+[0-9a-f]{40}\b"
    ),
    "an API key": re.compile(r"\bsk-(?=[A-Za-z0-9_-]*[0-9])[A-Za-z0-9_-]{20,}"),
    "a service's token": re.compile(
        r"\b(?:gsk_[A-Za-z0-9]{40,}|nvapi-[\w-]{40,}|r8_[A-Za-z0-9]{30,}|xai-[A-Za-z0-9]{40,}|pplx-[A-Za-z0-9]{40,}"
        r"|npm_[A-Za-z0-9]{36}\b|do[opr]_v1_[0-9a-f]{40,}|dapi[0-9a-f]{32}\b|ATATT3[\w=-]{20,}|shp(?:at|ca|pa|ss)_[0-9a-f]{32}"
        r"|hv[bs]\.[\w-]{24,}|lin_api_[A-Za-z0-9]{30,})"
    ),
    "a private key": re.compile(
        r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY|\bPuTTY-User-Key-File-\d|\bAGE-SECRET-KEY-1[A-Z0-9]{40,}"
    ),
    "an authorization header": re.compile(
        r"(?i)\bauthorization[\"']?\s*[:=]\s*[\"']?(?:bearer|basic|token(?=\s+\S*\d))\s+[\w.~+/=-]{8,}"
    ),
    "a password in an address": re.compile(
        r"\b[a-z][a-z0-9+.-]*://(?:[^\s/:@\"'<>${]+:|:(?=[^\s/@]*\d))[^\s/@\"'<>${]{3,}@"
    ),
    "a token in an address": re.compile(r"\bhttps?://(?=[\w-]*\d)(?=[\w-]*[A-Za-z])[\w-]{12,}@[\w-]+\.\w"),
    "a signature in an address": re.compile(r"[?&](?:sig|X-(?:Amz|Goog)-Signature)=[\w%+/=-]{20,}"),
    "an address of a webhook": re.compile(
        r"\bhttps://(?:[\w.-]*\bdiscord(?:app)?\.com/api/webhooks/\d{10,}/[\w-]{30,}"
        r"|[\w-]+\.webhook\.office\.com/webhookb2/[\w@-]+/IncomingWebhook/[0-9a-f]{20,})"
    ),
}
_ASSIGNED = "a password or key that is assigned to a name"
_ASSIGNMENT = re.compile(
    r"(?i)(?:(?P<password>password|passwd|passphrase|\bpwd|\b\w*_pwd)"
    r"|secret|(?:api|auth|access|account|client|private|service|db)[_-]?key|(?:access|auth|refresh)_?token)\w*"
    r"[\"'`]?\]?\s*(?P<sign>(?:=|:=|=>)\s*|:\s*(?=[^\s\"'`]*\d)|:\s*(?=[\"'`]))(?P<quote>[\"'`]?)"
    r"(?P<value>[^\s\"'`,;&<>{}]{4,})(?P<after>,?)"
)
# Names that also mean other things (`eos_token`, `first_pass`), in forms that leave little doubt.
_RANDOM = r"(?=[\d_.~+/=-]*[A-Za-z])(?=(?:[\w.~+/=-]*?\d){3})[\w.~+/=-]{8,}(?![\w(\[{<])"
_OTHER_ASSIGNMENTS = [
    re.compile(rf"(?:\b(?:token|TOKEN|(?i:bearer_token))|\b[A-Z][A-Z0-9_]*_TOKEN)[\"'`]?\s*[:=]\s*[\"'`]?({_RANDOM})"),
    re.compile(r"\b(?:[A-Z][A-Z0-9_]*_PASS|(?i:db|smtp|ftp|mail)_pass)\s*[:=]\s*[\"'`]?([^\s\"'`,;&<>{}]{4,})"),
    re.compile(r"--(?:password|passwd|token|api-key|secret)[ \t]+[\"']?((?=\S*\d)(?=\S*[A-Za-z])[^\s\"'`,;&<>{}]{6,})"),
    re.compile(r"\blogin\s+\S+\s+password\s+((?=\S*\d)\S{4,})"),
    re.compile(r"(?m)^\s*password[ \t]+((?=\S*\d)(?=\S*[A-Za-z])\S{4,})[ \t]*$"),
]
# No value but a placeholder: a template's, a variable of the environment, a call, or a word such as EMPTY.
_PLACEHOLDER = re.compile(
    r"(?i)[%<{(\[*.]|\$(?:[\d_{(\[]|[a-z_]+$|(?-i:[A-Z_][A-Z0-9_]*$)|\w+[:\[.(-])|\w+[(\[.]\S*"
    r"|.*(?:your|example|token|_key|xxx|\.\.\.|\*\*\*).*|\D*(?:password|secret)\D*$"
    r"|(?:empty|none|null|true|false|string|dummy|unset|change_?me|redacted|hidden|required|optional)\b"
)
_NAME = re.compile(r"(?i)[a-z]+(?:_[a-z]+)+$")


@functools.cache
def _detectors(names: bool) -> list:
    """The detectors of detect-secrets: of forms of secrets or, with ``names``, also of names before them.

    None of them uses the network here.
    """
    from detect_secrets.plugins import (
        azure_storage_key,
        cloudant,
        discord,
        gitlab_token,
        ibm_cos_hmac,
        jwt,
        mailchimp,
        npm,
        pypi_token,
        sendgrid,
        slack,
        softlayer,
        square_oauth,
        stripe,
        telegram_token,
        twilio,
    )

    forms = [
        azure_storage_key.AzureStorageKeyDetector(),
        discord.DiscordBotTokenDetector(),
        gitlab_token.GitLabTokenDetector(),
        jwt.JwtTokenDetector(),
        mailchimp.MailchimpDetector(),
        npm.NpmDetector(),
        pypi_token.PypiTokenDetector(),
        sendgrid.SendGridDetector(),
        slack.SlackDetector(),
        square_oauth.SquareOAuthDetector(),
        stripe.StripeDetector(),
        telegram_token.TelegramBotTokenDetector(),
        twilio.TwilioKeyDetector(),
    ]
    named = [cloudant.CloudantDetector(), ibm_cos_hmac.IbmCosHmacDetector(), softlayer.SoftlayerDetector()]
    return forms + named if names else forms


def find_secrets(text: str, names: bool = True) -> list[str]:
    """The kinds of secrets that a text seems to hold, such as "a GitHub token".

    Args:
        text: any text; a quote that JSON escapes is one.
        names: whether values assigned to a name like ``password`` count; not in a vocabulary, whose words are names.
    """
    return list(dict.fromkeys(kind for kind, _ in _secrets(text, names)))


def redact(text: str) -> str:
    """The text with everything that looks like a secret replaced."""
    for _, secret in list(_secrets(text, names=True)):
        text = text.replace(secret, "[hidden]")
    return text


def find_in_file(path: Path, names: bool = True) -> list[tuple[int | None, str]]:
    """Line (None: it spans several) and kind of each secret that a text file seems to hold."""
    file = path.stat()
    # A model's folder and the copy of it that is uploaded are both checked, and a large tokenizer.json takes seconds.
    return _find_in_file(path.resolve(), file.st_size, file.st_mtime_ns, names, get_token())


@functools.lru_cache(maxsize=64)
def _find_in_file(path: Path, size: int, mtime: int, names: bool, own: str | None) -> list[tuple[int | None, str]]:
    text = path.read_text(encoding="utf-8", errors="replace")
    if not (kinds := find_secrets(text, names)):
        return []
    found: list[tuple[int | None, str]] = [
        (number, kind) for number, line in enumerate(text.splitlines(), 1) for kind in find_secrets(line, names)
    ]
    return found + [(None, kind) for kind in kinds if kind not in {kind for _, kind in found}]


def _secrets(text: str, names: bool) -> Iterator[tuple[str, str]]:
    """Kind and text of each secret, the same kind several times."""
    text = text.replace('\\"', '"')
    found = [(kind, match[0]) for kind, pattern in _FORMS.items() for match in pattern.finditer(text)]
    own = get_token()
    if own and own in text and not found:
        found.append(("your Hugging Face token", own))
    for detector in _detectors(names):
        known = " ".join(secret for _, secret in found)
        secrets = (secret for secret in detector.analyze_string(text) if secret not in known)
        found += [(f"a secret ({detector.secret_type})", secret) for secret in secrets]
    if names:
        known = " ".join(secret for _, secret in found)
        values = [match["value"].rstrip(").]:") for match in _ASSIGNMENT.finditer(text) if not _is_name(match)]
        values += [match[1].rstrip(").]:") for pattern in _OTHER_ASSIGNMENTS for match in pattern.finditer(text)]
        values = list(dict.fromkeys(values))
        found += [(_ASSIGNED, v) for v in values if len(v) >= 4 and v not in known and not _PLACEHOLDER.match(v)]
    yield from found


def _is_name(match: re.Match[str]) -> bool:
    """Whether the assigned value is itself a name, as in `f(password=user_pass)`, although a password may look so."""
    value = match["value"]
    if not _NAME.match(value.rstrip(").]:")):
        return False
    if not match["password"]:
        return True
    return not match["quote"] and (match["sign"] != "=" or bool(match["after"]) or value.endswith(")"))


# ---- local paths in texts

_PART = r"[\w.@+%=,:~-]"
_PATH = re.compile(rf"(?<![\w:/.<~}}-])(?:file://)?/{_PART}+(?:/+{_PART}+)+/?(?<![.,:])")


def find_paths(text: str, folder: Path) -> bool:
    """Whether a text holds a path in a home folder, or in the working, temporary or model's parent folder."""
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
            name = scrub(key)  # two files of one name in different folders stay two entries
            copied[f"{name} ({len(copied) + 1})" if name in copied else name] = scrub_json(item)
        return copied
    return scrub(value) if isinstance(value, str) else value


def _last(path: str) -> str:
    trimmed = path.rstrip("/")
    # The last component of a home folder is a person's name.
    is_home = trimmed == str(Path.home()) or re.fullmatch(r"(file://)?/(home|Users)/[^/]+", trimmed)
    return "home" if is_home else trimmed.rpartition("/")[2]
