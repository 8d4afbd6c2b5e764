"""Documents to token streams, with a part of each source held out for validation."""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from tqdm import tqdm

from moh_llm.data.mixture import Mixture, Source
from moh_llm.data.text import iter_documents
from moh_llm.errors import UserError

_SLACK = 1024  # so that a share rounded up to whole windows is there, too
_BATCH = 64  # documents per tokenizer call: enough for its threads, little to hold


@dataclass(frozen=True)
class TokenStream:
    """Concatenated documents: `tokens` int32 `[N]`, and `document_starts` int64, where each begins."""

    tokens: np.ndarray
    document_starts: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class TokenizedSource:
    """A source's tokens: `train`, and `validation`, which never overlap; `weight` is its token share."""

    name: str
    weight: float
    train: TokenStream
    validation: TokenStream


def tokenize_mixture(
    mixture: Mixture, tokenizer: Any, train_tokens: int | None = None, validation_tokens: int | None = None
) -> list[TokenizedSource]:
    """Tokenise a mixture's sources into memory.

    A document is held out by a hash of its text, so that the same documents are held out in every
    run, however much is read. Where the hash leaves one side empty (one long document, say), the
    end of the source is held out instead.

    Args:
        mixture: the sources and their weights.
        tokenizer: a Hugging Face tokenizer. Its usual special tokens are added, and each document
            ends with its end-of-sequence token, if it has one.
        train_tokens, validation_tokens: stop reading a source once it has its weight's share of
            both; by default everything is read.

    Raises:
        UserError: unreadable text, or a source without any.
    """
    sources = []
    for source in mixture.sources:
        limits = [math.inf if n is None else n * source.weight + _SLACK for n in (train_tokens, validation_tokens)]
        sources.append(_tokenize_source(source, tokenizer, mixture.validation_share, *limits))
    return sources


def _tokenize_source(
    source: Source, tokenizer: Any, validation_share: float, train_limit: float, validation_limit: float
) -> TokenizedSource:
    pieces: dict[bool, list[np.ndarray]] = {False: [], True: []}  # by whether the document is held out
    lengths = {False: 0, True: 0}
    with tqdm(desc=f"tokenize {source.name[-40:]}", unit="token", unit_scale=True, leave=False) as bar:
        for text, ids in _encode(iter_documents(source), tokenizer):
            held_out = _held_out(text, validation_share)
            pieces[held_out].append(ids)
            lengths[held_out] += len(ids)
            bar.update(len(ids))
            if lengths[False] >= train_limit and lengths[True] >= validation_limit:
                break
    total = sum(lengths.values())
    if not total:
        raise UserError(f"source {source.name} holds no text")
    train, validation = pieces[False], pieces[True]
    if not validation or not train:
        train, validation = _cut_tail(train or validation, round(validation_share * total))
    return TokenizedSource(source.name, source.weight, _stream(train), _stream(validation))


def _cut_tail(pieces: list[np.ndarray], wanted: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Split documents in two, the second part the last `wanted` tokens: for a source of few documents."""
    head, tail = list(pieces), []
    while wanted > 0 and head:
        last = head.pop()
        cut = max(0, len(last) - wanted)
        if cut:
            head.append(last[:cut])
        tail.insert(0, last[cut:])
        wanted -= len(last) - cut
    return head, tail


def _stream(pieces: list[np.ndarray]) -> TokenStream:
    lengths = [len(piece) for piece in pieces]
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]) if pieces else np.zeros(0)
    tokens = np.concatenate(pieces) if pieces else np.zeros(0)
    return TokenStream(tokens.astype(np.int32), starts.astype(np.int64))


def _encode(documents: Iterator[str], tokenizer: Any) -> Iterator[tuple[str, np.ndarray]]:
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    while batch := list(islice(documents, _BATCH)):
        encoded = tokenizer(batch, add_special_tokens=True, verbose=False)["input_ids"]
        for text, ids in zip(batch, encoded, strict=True):
            ids = ids if end and ids[-1:] == end else ids + end
            yield text, np.asarray(ids, dtype=np.int32)


def _held_out(text: str, share: float) -> bool:
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") < share * 2**64
