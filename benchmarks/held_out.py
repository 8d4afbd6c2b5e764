"""The held-out text of benchmarks: which documents, how much of each, and which 13-grams of it other text holds."""

import argparse
import hashlib
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from moh_llm.data.mixture import mixture_from_files
from moh_llm.data.records import source_documents
from moh_llm.data.shards import TokenizedSource, TokenStream
from moh_llm.data.tokenizer import TextTokenizer
from moh_llm.data.windows import fixed_batches
from moh_llm.errors import UserError
from moh_llm.metrics import Batch

WINDOW, BATCH = 512, 4  # tokens in a sequence of the tables for short contexts, and sequences in a batch
NGRAM = 13  # tokens; the usual length at which a match is no chance (GPT-3 and later reports)
# Odd, so that no token id loses bits in the product.
_MIX, _STEP = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x9E3779B97F4A7C15)

Numbered = tuple[np.ndarray, np.ndarray]  # token ids `[N]` and the number of each one's document `[N]`


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags that choose documents."""
    parser.add_argument("--documents", type=int, metavar="N", help="read at most N documents of each text")
    parser.add_argument("--tokens-per-document", type=int, metavar="T", help="read the first T tokens of each document")
    parser.add_argument("--last", action="store_true", help="the last N documents, which calibration does not reach")


def read_texts(
    names: Sequence[str], args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase, length: int, batch_size: int
) -> dict[str, list[Batch]]:
    """The chosen documents of each text file or glob, as batches of windows of `length` tokens.

    Raises UserError where a text has no window of that length, or `--last` does not say how many.
    """
    if args.last and args.documents is None:
        raise UserError("--last takes the last of how many? Give --documents, too")
    found = {}
    for name in names:
        texts: Iterable[tuple[str, str]] = texts_of(name)
        if args.documents is not None:
            texts = deque(texts, args.documents) if args.last else itertools.islice(texts, args.documents)
        pieces = [ids[: args.tokens_per_document] for ids in encode(texts, tokenizer)]
        stream = TokenStream.from_documents(pieces)
        if len(stream) < length:
            raise UserError(f"{name}: {len(pieces)} documents were chosen, {len(stream)} tokens, fewer than {length}")
        found[name] = fixed_batches([stream], [1.0], length, len(stream), batch_size)
    return found


def texts_of(name: str) -> Iterator[tuple[str, str]]:
    """The group and the text of each document of a text file or glob."""
    (source,) = mixture_from_files([name]).sources
    return source_documents(source)


def encode(texts: Iterable[tuple[str, str]], tokenizer: PreTrainedTokenizerBase) -> Iterator[np.ndarray]:
    """Token ids of each of these documents."""
    return (ids for _, ids, _ in TextTokenizer.from_tokenizer(tokenizer).encode(texts))


def hash_batches(batches: Sequence[Batch]) -> str:
    """SHA-256 of the tokens, in their order."""
    return hashlib.sha256(b"".join(batch["input_ids"].numpy().tobytes() for batch in batches)).hexdigest()


class NGrams:
    """The n-grams of parts of text, as sorted hashes of 64 bits; none spans two documents, or two parts."""

    def __init__(self, parts: Iterable[Numbered]):
        self.known = np.unique(np.concatenate([_hashes(*part) for part in parts]))

    def overlap(self, ids: np.ndarray, documents: np.ndarray) -> float:
        """The share of another text's n-grams that these hold."""
        hashes = _hashes(ids, documents)
        return float(np.isin(hashes, self.known).mean()) if len(hashes) else 0.0


def training_ngrams(sources: Iterable[TokenizedSource]) -> NGrams:
    """The n-grams of the sources' training part, which is all that tuning may read."""
    parts = []
    for stream in (source.train for source in sources):
        ids, begins = stream.read(0, len(stream))
        first = np.zeros(len(ids), dtype=np.int64)
        first[begins] = 1
        parts.append((ids, np.cumsum(first)))
    return NGrams(parts)


def numbered(batches: Sequence[Batch]) -> Numbered:
    """All tokens of some batches, with the numbers of their documents."""
    return tuple(np.concatenate([b[key].flatten().numpy() for b in batches]) for key in ("input_ids", "documents"))


def _hashes(ids: np.ndarray, documents: np.ndarray) -> np.ndarray:
    """A hash of each n-gram that lies in one document: a polynomial of scattered ids, modulo 2^64."""
    scattered = (ids.astype(np.uint64) + np.uint64(1)) * _MIX
    scattered ^= scattered >> np.uint64(31)
    count = max(0, len(ids) - NGRAM + 1)
    found = np.zeros(count, dtype=np.uint64)
    for offset in range(NGRAM if count else 0):
        found = found * _STEP + scattered[offset : offset + count]
        found ^= found >> np.uint64(29)
    return found[documents[:count] == documents[len(documents) - count :]]
