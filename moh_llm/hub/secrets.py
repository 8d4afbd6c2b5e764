"""Secrets in texts that are to be published: keys and tokens by their form, and what is given to a name like password.

Most forms are those of the detectors of detect-secrets. Its detectors of random text are left out, because the files of
a model are full of hashes and of tokens that are no words, and so are those that ask a service whether a key is valid.
"""

import functools
import re
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import get_token

# What detect-secrets lacks, and what it takes for a secret in too few or too many places.
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
    "a private key": re.compile(r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY"),
    "an authorization header": re.compile(
        r"(?i)\bauthorization[\"']?\s*[:=]\s*[\"']?(?:bearer|basic)\s+[\w.~+/=-]{8,}"
    ),
    "a password in an address": re.compile(r"\b[a-z][a-z0-9+.-]*://[^\s/:@\"'<>${]+:[^\s/@\"'<>${]{3,}@"),
}
_ASSIGNED = "a password or key that is assigned to a name"
_ASSIGNMENT = re.compile(
    r"(?i)(?:password|passwd|passphrase|\bpwd|\b\w*_pwd|secret|(?:api|auth|access|account|client|private|service|db)_?key"
    r"|(?:access|auth|refresh)_?token)\w*[\"'`]?\]?\s*(?:(?:=|:=|=>)\s*[\"'`]?|:\s*(?=\S*\d)[\"'`]?|:\s*[\"'`])"
    r"([^\s\"'`,;&<>{}]{4,})"
)
# A value that stands for one: of a template, of the environment, a call, another name, or a word such as EMPTY.
_PLACEHOLDER = re.compile(
    r"(?i)[$%<{(\[*.]|\w+[(\[.]\S*|[a-z]+(?:_[a-z]+)+|.*(?:your|example|password|secret|token|_key|xxx|\.\.\.|\*\*\*).*"
    r"|(?:empty|none|null|true|false|string|dummy|unset|change_?me|redacted|hidden|required|optional)\b"
)


@functools.cache
def _detectors(names: bool) -> list:
    """The detectors of detect-secrets, by the forms of secrets alone or by names before them, too.

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
        names: whether what is assigned to a name like ``password`` counts; not in a vocabulary, whose words are names.
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
        values = (match[1].rstrip(").]:") for match in _ASSIGNMENT.finditer(text))
        found += [(_ASSIGNED, v) for v in values if len(v) >= 4 and v not in known and not _PLACEHOLDER.match(v)]
    yield from found
