"""How much of some text other text holds as well: shared n-grams of tokens."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from moh_llm.data.shards import TokenStream

NGRAM = 13  # tokens; the usual length at which a match is no chance (GPT-3 and later reports)
# Odd, so that no token id loses bits in the product.
_MIX, _STEP = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x9E3779B97F4A7C15)

Numbered = tuple[np.ndarray, np.ndarray]  # token ids `[N]` and the number of each one's document `[N]`


class Overlap(NamedTuple):
    """Of some text its n-grams and tokens, and how many of them the other text holds."""

    ngrams: int
    shared: int
    tokens: int
    covered: int  # tokens that lie in a shared n-gram

    @property
    def share(self) -> float:
        """Share of the n-grams."""
        return self.shared / max(1, self.ngrams)

    @property
    def covered_share(self) -> float:
        """Share of the tokens."""
        return self.covered / max(1, self.tokens)


class NGrams:
    """The n-grams of some text, as sorted hashes of 64 bits.

    Args:
        parts: token ids and their documents' numbers; no n-gram spans two documents, or two parts.
    """

    def __init__(self, parts: Iterable[Numbered]):
        hashes = [_hashes(ids)[within(documents)] for ids, documents in parts]
        self.known = np.unique(np.concatenate(hashes)) if hashes else np.zeros(0, dtype=np.uint64)

    def overlap(self, ids: np.ndarray, documents: np.ndarray) -> Overlap:
        """How much of another text these n-grams hold."""
        inside, shared = within(documents), np.zeros(max(0, len(ids) - NGRAM + 1), dtype=bool)
        if len(self.known):
            hashes = _hashes(ids)
            at = np.searchsorted(self.known, hashes).clip(max=len(self.known) - 1)
            shared = (self.known[at] == hashes) & inside
        starts = np.zeros(len(ids) + 1, dtype=np.int64)
        starts[: len(shared)] += shared
        starts[NGRAM : NGRAM + len(shared)] -= shared
        covered = int((np.cumsum(starts) > 0).sum())
        return Overlap(int(inside.sum()), int(shared.sum()), len(ids), covered)


def numbered(stream: TokenStream) -> Numbered:
    """All tokens of a stream, with the numbers of their documents."""
    ids, begins = stream.read(0, len(stream))
    first = np.zeros(len(ids), dtype=np.int64)
    first[begins] = 1
    return ids, np.cumsum(first)


def within(documents: np.ndarray) -> np.ndarray:
    """Which n-grams, by the positions at which they start, lie in one document."""
    count = max(0, len(documents) - NGRAM + 1)
    return documents[:count] == documents[len(documents) - count :]


def _hashes(ids: np.ndarray) -> np.ndarray:
    """A hash of each n-gram by its start: a polynomial of scattered ids, modulo 2^64."""
    scattered = (ids.astype(np.uint64) + np.uint64(1)) * _MIX
    scattered ^= scattered >> np.uint64(31)
    count = max(0, len(ids) - NGRAM + 1)
    found = np.zeros(count, dtype=np.uint64)
    for offset in range(NGRAM if count else 0):
        found = found * _STEP + scattered[offset : offset + count]
        found ^= found >> np.uint64(29)
    return found
