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
from moh_llm.data.windows import SHORTER, whole_windows

_SLACK = 1024  # tokens more than a share, so that a share rounded up to full windows is there, too
_SEARCHED = 32  # times what is asked for, how many tokens are read to find long documents
_PASSED = 1 << 28  # characters of text for training that are passed over, at most, in search of held-out documents
_WINDOW = 256  # tokens of a held-out document that count where its windows are not known
_SAMPLE = 2 << 20  # bytes of text that an estimate tokenises

# A document's token ids, and which of them the loss is taken on; None: all.
_Piece = tuple[np.ndarray, np.ndarray | None]


def sample_mixture(
    mixture: Mixture,
    tokenizer: Any,
    train_tokens: int | None = None,
    validation_tokens: int | None = None,
    long: int | None = None,
    window: int | None = None,
    rows: int | None = None,
) -> list[TokenizedSource]:
    """Tokenise the beginning of each of a mixture's sources.

    These are the first tokens, and the first held-out ones, of what `tokenize_mixture` writes.
    Where the hash leaves one side empty (one long document, say), the end of what was read is held
    out instead.

    Args:
        mixture: the sources and their weights.
        tokenizer: a Hugging Face tokenizer.
        train_tokens, validation_tokens: stop reading a source once it has its weight's share of both, and more of the
            second where other sources have less; by default everything is read.
        long: take the first `long` tokens of documents that have as many, and others after these only. The
            beginning of a source is searched for them, some 32 times what is asked for.
        window: how many tokens of a held-out document count for `validation_tokens` (`validation_batches`); None: 256,
            so that there are documents enough for windows of that length or longer.
            Text for training that is no longer asked for is passed over meanwhile, up to 2^28 characters.
        rows: of the embedding of the model that the tokens are for; None: not known.

    Raises:
        UserError: unreadable text, a source without any, or a token without a row.
    """
    text_tokenizer, found = TextTokenizer.of(tokenizer, rows), []
    wanted = math.inf if validation_tokens is None else validation_tokens

    def sample(source: Source, held_out: float) -> tuple[TokenizedSource, int]:
        train = math.inf if train_tokens is None else train_tokens * source.weight + _SLACK
        whole = math.inf if validation_tokens is None else whole_windows(long or 0, validation_tokens)
        long_held_out = min(held_out, (long or 0) * whole * source.weight + _SLACK) if long else 0.0
        limits = _Limits(train, held_out, long_held_out, long, min(window or _WINDOW, SHORTER))
        return _sample_source(source, text_tokenizer, mixture.validation_share, limits)

    for source in mixture.sources:
        found.append(sample(source, wanted * source.weight + _SLACK))
    if sum(tokens for _, tokens in found) < wanted < math.inf:  # some sources end early: others make up for them
        for number, source in enumerate(mixture.sources):
            if found[number][1] >= wanted * source.weight + _SLACK:
                found[number] = sample(source, wanted)
    return [source for source, _ in found]


@dataclass(frozen=True)
class _Limits:
    """When to stop reading a source.

    Attributes:
        train, held_out: tokens of each side; of training only those of long documents count, where some are wanted.
        long_held_out: held-out tokens of long documents.
        long: tokens of a long document; None: documents are all alike.
        window: how many tokens of a held-out document count.
    """

    train: float
    held_out: float
    long_held_out: float
    long: int | None
    window: int


def _sample_source(
    source: Source, tokenizer: TextTokenizer, validation_share: float, limits: _Limits
) -> tuple[TokenizedSource, int]:
    """A source's beginning, and how many of its held-out tokens count."""
    pieces: dict[bool, list[_Piece]] = {False: [], True: []}  # by whether the document is held out
    short: dict[bool, list[_Piece]] = {False: [], True: []}  # likewise, of documents that are not long
    long, lengths, searched, held_out_tokens = limits.long, {False: 0, True: 0}, 0, 0
    reading, passed = Reading(advice="correct it, or leave the file out"), 0

    def wanted() -> Iterator[tuple[str, str]]:
        """All documents; once there is enough for training, the held-out ones, after the first of these."""
        nonlocal passed
        for group, text in source_documents(source, reading=reading, template=tokenizer.chat):
            if lengths[False] < limits.train or not held_out_tokens or is_held_out(group, validation_share):
                yield group, text
            elif (passed := passed + len(text)) > _PASSED:
                return

    with tqdm(desc=f"tokenize {source.name[-40:]}", unit="token", unit_scale=True, leave=False) as bar:
        for group, ids, targets in tokenizer.encode_grouped(wanted()):
            held_out = is_held_out(group, validation_share)
            bar.update(len(ids))
            searched += len(ids)
            if held_out:
                held_out_tokens += len(ids[: limits.window])
            if long and len(ids) < long:
                short[held_out].append((ids, targets))
            else:
                pieces[held_out].append((ids[:long], None if targets is None else targets[:long]))
                lengths[held_out] += len(ids[:long])
            enough = held_out_tokens >= limits.held_out and lengths[True] >= limits.long_held_out
            if lengths[False] >= limits.train and enough:
                break
            if long and searched >= _SEARCHED * (limits.train + limits.long_held_out):
                break
        else:
            if passed <= _PASSED:  # it was read to its end
                check_filters(source, reading, empty=not searched)
    pieces = {side: pieces[side] + short[side] for side in pieces}
    train, validation = (TokenStream.of([_shard(pieces[side])]) for side in (False, True))
    if not len(train) or not len(validation):
        train, validation = split_tail(train if len(train) else validation, validation_share)
    return TokenizedSource(source.name, source.weight, train, validation, source.max_epochs), held_out_tokens


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
