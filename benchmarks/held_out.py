"""The held-out text of benchmarks: which documents, how much of each, and how much of it other text holds as well."""

import argparse
import hashlib
import itertools
import re
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from overlap import NGRAM, NGrams, Overlap, numbered
from transformers import PreTrainedTokenizerBase

from moh_llm.data.mixture import mixture_from_arguments, mixture_from_files
from moh_llm.data.records import source_documents
from moh_llm.data.sample import sample_mixture
from moh_llm.data.shards import Shard, TokenStream
from moh_llm.data.tokenizer import TextTokenizer, is_held_out
from moh_llm.data.windows import fixed_batches
from moh_llm.errors import UserError
from moh_llm.metrics import Batch

WINDOW, BATCH = 512, 4  # tokens in a sequence of the tables for short contexts, and sequences in a batch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags that choose documents."""
    parser.add_argument("--tokens", type=int, default=1 << 40, help="read at most this many tokens of each text")
    parser.add_argument("--documents", type=int, metavar="N", help="read at most N documents of each text")
    parser.add_argument(
        "--matching",
        metavar="PATTERN",
        help="read only documents in which this regular expression is found, of a language, say: [\\u4e00-\\u9fff]{9}",
    )
    parser.add_argument("--tokens-per-document", type=int, metavar="T", help="read the first T tokens of each document")
    parser.add_argument(
        "--last",
        action="store_true",
        help="with --documents: the last N; calibration, which reads a file from its beginning, does not get there",
    )
    parser.add_argument(
        "--held-out-share",
        type=float,
        metavar="SHARE",
        help="read only documents that a mixture with this validation_share holds out from tuning and calibration",
    )


def read_texts(
    names: Sequence[str], args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase, length: int, batch_size: int
) -> dict[str, list[Batch]]:
    """The chosen documents of each text file or glob, as batches of windows of `length` tokens.

    Raises:
        UserError: a text has no window of that length, or `--last` does not say how many.
    """
    if args.last and args.documents is None:
        raise UserError("--last takes the last of how many? Give --documents, too")
    return {name: _read(name, args, tokenizer, length, batch_size) for name in names}


def _read(
    name: str, args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase, length: int, batch_size: int
) -> list[Batch]:
    (source,) = mixture_from_files([name]).sources
    texts: Iterable[str] = (text for _, text in source_documents(source))
    if args.held_out_share is not None:
        texts = (text for text in texts if is_held_out(text, args.held_out_share))
    if args.matching is not None:
        texts = filter(re.compile(args.matching).search, texts)
    if args.documents is not None:
        texts = deque(texts, args.documents) if args.last else itertools.islice(texts, args.documents)
    pieces: list[np.ndarray] = []
    total = 0
    for _, ids in TextTokenizer.of(tokenizer).encode(texts):
        pieces.append(ids[: args.tokens_per_document])
        total += len(pieces[-1])
        if total >= args.tokens:
            break
    stream = TokenStream.of([Shard.of(pieces)])
    if len(stream) < length:
        raise UserError(f"{name}: {len(pieces)} documents were chosen, {len(stream)} tokens, fewer than {length}")
    return fixed_batches([stream], [1.0], length, min(args.tokens, len(stream)), batch_size)


def ngrams_of(arguments: Sequence[str], tokenizer: PreTrainedTokenizerBase, tokens: int | None) -> NGrams:
    """The n-grams that tuning or calibration may read of text files or a mixture: all of its training part.

    With `tokens` only the first ones, by the mixture's weights.
    """
    sources = sample_mixture(mixture_from_arguments(arguments), tokenizer, tokens, None if tokens is None else 0)
    lengths = [len(s.train) if tokens is None else min(len(s.train), round(tokens * s.weight)) for s in sources]
    return NGrams(numbered(s.train.part(0, length)) for s, length in zip(sources, lengths, strict=True))


def ngrams_of_batches(batches: Sequence[Batch]) -> NGrams:
    """The n-grams of what was read as these batches."""
    return NGrams([_numbered(batches)])


def hash_batches(batches: Sequence[Batch]) -> str:
    """SHA-256 of the tokens, in their order."""
    return hashlib.sha256(b"".join(batch["input_ids"].numpy().tobytes() for batch in batches)).hexdigest()


def overlap(batches: Sequence[Batch], read: NGrams) -> Overlap:
    """How much of the held-out `batches` lies in what was `read`."""
    return read.overlap(*_numbered(batches))


def describe(found: Overlap | None) -> dict[str, Any] | None:
    """For records: the share of the text's n-grams, and of its tokens that lie in such an n-gram."""
    if found is None:
        return None
    return {"ngram": NGRAM, "ngrams": found.ngrams, "shared": found.share, "tokens_covered": found.covered_share}


def _numbered(batches: Sequence[Batch]) -> tuple[np.ndarray, np.ndarray]:
    return tuple(np.concatenate([b[key].flatten().numpy() for b in batches]) for key in ("input_ids", "documents"))
