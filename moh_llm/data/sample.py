"""The beginning of a mixture: its first tokens, for conversion."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm import tqdm

from moh_llm.data.mixture import Mixture, Source
from moh_llm.data.records import source_documents
from moh_llm.data.shards import TokenizedSource, TokenStream, split_tail
from moh_llm.data.tokenizer import TextTokenizer, is_held_out
from moh_llm.data.windows import SHORTER, whole_windows

_SLACK = 1024  # tokens beyond a share, so that a share rounded up to full windows is there, too
_SEARCHED = 32  # how many times the wanted tokens are read in search of long documents
_PASSED = 1 << 28  # characters of text for training that are passed over, at most, in search of held-out documents
_WINDOW = 256  # tokens of a held-out document that count, by default

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
    """Tokenise the beginning of each source of a mixture.

    These are the first tokens, and the first held-out tokens, that `tokenize_mixture` writes. Where the hash leaves one
    side empty (one long document, for example), the end of what was read is held out instead.

    Args:
        mixture, tokenizer: the text, and a Hugging Face tokenizer.
        train_tokens, validation_tokens: stop reading a source once it has its weight's share of both. A source with too
            few held-out tokens is made up for by the others. None: read everything.
        long: take the first `long` tokens of documents that have as many, and shorter documents after these. At most 32
            times the wanted tokens are read in search of them.
        window: tokens of a held-out document that count for `validation_tokens`, so that there are enough documents
            for windows of that length (`validation_batches`); None: 256. Up to 2^28 characters of text for training
            are passed over in search of held-out documents.
        rows: of the embedding that the ids index; None: not checked.

    Raises:
        UserError: unreadable text, a source without any, or a token without a row.
    """
    wanted = math.inf if validation_tokens is None else validation_tokens
    sampler = _Sampler(
        tokenizer=TextTokenizer.from_tokenizer(tokenizer, rows),
        validation_share=mixture.validation_share,
        train=math.inf if train_tokens is None else train_tokens,
        whole=math.inf if validation_tokens is None else whole_windows(long or 0, validation_tokens),
        long=long,
        window=min(window or _WINDOW, SHORTER),
    )
    found = [sampler.sample(source, wanted * source.weight + _SLACK) for source in mixture.sources]
    if sum(tokens for _, tokens in found) < wanted < math.inf:  # some sources end early
        for number, source in enumerate(mixture.sources):
            if found[number][1] >= wanted * source.weight + _SLACK:
                found[number] = sampler.sample(source, wanted)
    return [source for source, _ in found]


@dataclass(frozen=True)
class _Sampler:
    """Reads the beginning of sources: `train` tokens and `whole` held-out windows of `long` tokens, by weight."""

    tokenizer: TextTokenizer
    validation_share: float
    train: float
    whole: float
    long: int | None
    window: int

    def sample(self, source: Source, held_out: float) -> tuple[TokenizedSource, int]:
        """A source's beginning with `held_out` held-out tokens that count, and how many of these there are."""
        long, train = self.long, self.train * source.weight + _SLACK
        long_held_out = min(held_out, long * self.whole * source.weight + _SLACK) if long else 0.0
        pieces: dict[bool, list[_Piece]] = {False: [], True: []}  # by whether the document is held out
        short: dict[bool, list[_Piece]] = {False: [], True: []}  # likewise, of documents that are not long
        lengths, read, counted, passed = {False: 0, True: 0}, 0, 0, 0

        def documents() -> Iterator[tuple[str, str]]:
            """All documents; once there is enough for training, only held-out ones, beginning with the second."""
            nonlocal passed
            for group, text in source_documents(source, template=self.tokenizer.chat):
                if lengths[False] < train or not counted or is_held_out(group, self.validation_share):
                    yield group, text
                elif (passed := passed + len(text)) > _PASSED:
                    return

        with tqdm(desc=f"tokenize {source.name[-40:]}", unit="token", unit_scale=True, leave=False) as bar:
            for group, ids, targets in self.tokenizer.encode(documents()):
                side = is_held_out(group, self.validation_share)
                bar.update(len(ids))
                read += len(ids)
                if side:
                    counted += len(ids[: self.window])
                if long and len(ids) < long:
                    short[side].append((ids, targets))
                else:
                    pieces[side].append((ids[:long], None if targets is None else targets[:long]))
                    lengths[side] += len(ids[:long])
                if lengths[False] >= train and counted >= held_out and lengths[True] >= long_held_out:
                    break
                if long and read >= _SEARCHED * (train + long_held_out):
                    break
        streams = [_stream(pieces[side] + short[side]) for side in (False, True)]
        if not all(map(len, streams)):
            streams = split_tail(streams[0] if len(streams[0]) else streams[1], self.validation_share)
        return TokenizedSource(source.name, source.weight, *streams), counted


def _stream(pieces: Sequence[_Piece]) -> TokenStream:
    ids, targets = [piece[0] for piece in pieces], [piece[1] for piece in pieces if piece[1] is not None]
    return TokenStream.from_documents(ids, targets or None)
