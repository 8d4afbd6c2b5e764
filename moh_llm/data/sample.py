"""The beginning of a mixture: its first tokens, for conversion, and an estimate of how many there are in all."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm import tqdm

from moh_llm.data.fields import Reading
from moh_llm.data.locate import SourceFile
from moh_llm.data.mixture import Mixture, Source
from moh_llm.data.records import check_filters, source_documents
from moh_llm.data.shards import Shard, TokenizedSource, TokenStream, split_tail
from moh_llm.data.tokenizer import TextTokenizer, is_held_out

_SLACK = 1024  # tokens more than a share, so that a share rounded up to full windows is there, too
_SEARCHED = 32  # times what is asked for, how many tokens are read to find long documents
_SAMPLE = 2 << 20  # bytes of text that an estimate tokenises

# A document's token ids, and which of them the loss is taken on; None: all.
_Piece = tuple[np.ndarray, np.ndarray | None]


def sample_mixture(
    mixture: Mixture,
    tokenizer: Any,
    train_tokens: int | None = None,
    validation_tokens: int | None = None,
    long: int | None = None,
) -> list[TokenizedSource]:
    """Tokenise the beginning of each of a mixture's sources.

    These are the first tokens, and the first held-out ones, of what `tokenize_mixture` writes.
    Where the hash leaves one side empty (one long document, say), the end of what was read is held
    out instead.

    Args:
        mixture: the sources and their weights.
        tokenizer: a Hugging Face tokenizer.
        train_tokens, validation_tokens: stop reading a source once it has its weight's share of
            both; by default everything is read.
        long: take the first `long` tokens of documents that have as many, and others after these only. The
            beginning of a source is searched for them, some 32 times what is asked for.

    Raises:
        UserError: unreadable text, or a source without any.
    """
    text_tokenizer = TextTokenizer.of(tokenizer)
    sources = []
    for source in mixture.sources:
        limits = [math.inf if n is None else n * source.weight + _SLACK for n in (train_tokens, validation_tokens)]
        sources.append(_sample_source(source, text_tokenizer, mixture.validation_share, *limits, long))
    return sources


def _sample_source(
    source: Source,
    tokenizer: TextTokenizer,
    validation_share: float,
    train_limit: float,
    validation_limit: float,
    long: int | None,
) -> TokenizedSource:
    pieces: dict[bool, list[_Piece]] = {False: [], True: []}  # by whether the document is held out
    short: dict[bool, list[_Piece]] = {False: [], True: []}  # likewise, of documents that are not long
    lengths, searched = {False: 0, True: 0}, 0
    reading = Reading(advice="correct it, or leave the file out")
    documents = source_documents(source, reading=reading, template=tokenizer.chat)
    with tqdm(desc=f"tokenize {source.name[-40:]}", unit="token", unit_scale=True, leave=False) as bar:
        for group, ids, targets in tokenizer.encode_grouped(documents):
            held_out = is_held_out(group, validation_share)
            bar.update(len(ids))
            searched += len(ids)
            if long and len(ids) < long:
                short[held_out].append((ids, targets))
            else:
                pieces[held_out].append((ids[:long], None if targets is None else targets[:long]))
                lengths[held_out] += len(ids[:long])
            if lengths[False] >= train_limit and lengths[True] >= validation_limit:
                break
            if long and searched >= _SEARCHED * (train_limit + validation_limit):
                break
        else:
            check_filters(source, reading, empty=not searched)
    pieces = {side: pieces[side] + short[side] for side in pieces}
    train, validation = (TokenStream.of([_shard(pieces[side])]) for side in (False, True))
    if not len(train) or not len(validation):
        train, validation = split_tail(train if len(train) else validation, validation_share)
    return TokenizedSource(source.name, source.weight, train, validation, source.max_epochs)


def _shard(pieces: Sequence[_Piece]) -> Shard:
    ids, targets = [piece[0] for piece in pieces], [piece[1] for piece in pieces if piece[1] is not None]
    return Shard.of(ids, targets or None)


@dataclass(frozen=True)
class Estimate:
    """Estimate for one source: total tokens, and the tokenizer's seconds on all cores of this machine.

    Both are None where the stored size is not known (files on a server that was not asked).
    """

    tokens: int | None
    seconds: float | None


def with_progress(sources: Sequence[Source]) -> Iterator[tuple[Source, Callable[[int], object]]]:
    """Each of some sources with the `advance` of its `estimate_source`, which moves a bar over all of them."""
    each = 2 * _SAMPLE
    with tqdm(total=len(sources) * each, desc="reading", unit="B", unit_scale=True, leave=False) as bar:
        for number, source in enumerate(sources, start=1):
            yield source, bar.update
            bar.update(number * each - bar.n)  # a source may be short, or not there


def estimate_source(
    source: Source,
    files: Sequence[SourceFile],
    tokenizer: TextTokenizer,
    advance: Callable[[int], object] = lambda count: None,
) -> Estimate:
    """Tokenise the first 2 MiB of a source's text and scale by its stored bytes.

    Compressed files are read in pieces, so that the number is off by some percent even where the
    rest of the source is like its beginning.

    Args:
        source: the source.
        files: its files (`locate`).
        tokenizer: what text is tokenised with.
        advance: receives how many bytes were read, and again how many were tokenised, up to 2 MiB of each.

    Raises:
        UserError: the beginning cannot be read.
    """
    sample: list[str] = []
    sampled = stored = 0
    ended = True
    reading = Reading(skip_bad=True)  # tokenising itself reports bad records
    for _, text in source_documents(source, files, reading, tokenizer.chat):
        if sampled < _SAMPLE:
            sample.append(text)
            advance(min(reading.bytes, _SAMPLE) - sampled)
            sampled, stored = reading.bytes, reading.stored
        elif files:  # only built-in text, which is short, is read to its end
            ended = False
            break
    if ended:
        check_filters(source, reading, empty=not sample)
    began = time.perf_counter()
    tokens = 0
    for number, (_, ids) in enumerate(tokenizer.encode(sample)):
        tokens += len(ids)
        advance(_SAMPLE * (number + 1) // len(sample) - _SAMPLE * number // len(sample))
    seconds = time.perf_counter() - began
    if not files:
        scale = reading.bytes / sampled
    elif ended:
        scale = 1.0
    else:
        sizes = [file.size for file in files]
        if None in sizes or not stored:
            return Estimate(None, None)
        scale = sum(size or 0 for size in sizes) / stored
    return Estimate(round(tokens * scale), seconds * scale)
