"""Secrets in files that are published: forms that detect-secrets knows, and tokens for the Hub."""

import functools
import re
from typing import Any

from huggingface_hub import get_token

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

    Args:
        text: a line, or a whole vocabulary.
        vocabulary: values that only their names make secrets do not count.
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
