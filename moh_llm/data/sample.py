"""The first tokens of a mixture, in memory: what conversion calibrates and proves with."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from tqdm import tqdm

from moh_llm.data.embedded import embedded_documents
from moh_llm.data.locate import locate
from moh_llm.data.mixture import Mixture, Source
from moh_llm.data.records import Reading, read_documents
from moh_llm.data.shards import Shard, TokenizedSource, TokenStream, split_tail
from moh_llm.data.tokenizer import TextTokenizer, is_held_out
from moh_llm.errors import UserError

_SLACK = 1024  # so that a share rounded up to whole windows is there, too


def sample_mixture(
    mixture: Mixture, tokenizer: Any, train_tokens: int | None = None, validation_tokens: int | None = None
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

    Raises:
        UserError: unreadable text, or a source without any.
    """
    text_tokenizer = TextTokenizer.of(tokenizer)
    sources = []
    for source in mixture.sources:
        limits = [math.inf if n is None else n * source.weight + _SLACK for n in (train_tokens, validation_tokens)]
        sources.append(_sample_source(source, text_tokenizer, mixture.validation_share, *limits))
    return sources


def _sample_source(
    source: Source, tokenizer: TextTokenizer, validation_share: float, train_limit: float, validation_limit: float
) -> TokenizedSource:
    pieces: dict[bool, list[np.ndarray]] = {False: [], True: []}  # by whether the document is held out
    lengths = {False: 0, True: 0}
    with tqdm(desc=f"tokenize {source.name[-40:]}", unit="token", unit_scale=True, leave=False) as bar:
        for group, ids in tokenizer.encode_grouped(source_documents(source)):
            held_out = is_held_out(group, validation_share)
            pieces[held_out].append(ids)
            lengths[held_out] += len(ids)
            bar.update(len(ids))
            if lengths[False] >= train_limit and lengths[True] >= validation_limit:
                break
    if not sum(lengths.values()):
        raise UserError(f"source {source.name} holds no text")
    train, validation = (TokenStream.of([Shard.of(pieces[side])]) for side in (False, True))
    if not len(train) or not len(validation):
        train, validation = split_tail(train if len(train) else validation, validation_share)
    return TokenizedSource(source.name, source.weight, train, validation, source.max_epochs)


def source_documents(source: Source) -> Iterator[tuple[str, str]]:
    """Group and text of a source's documents in their order, empty ones left out.

    Raises:
        UserError: text that cannot be read.
    """
    if source.builtin is not None:
        yield from embedded_documents(source.builtin)
    for file in locate(source):
        for text in read_documents(file, source, Reading(advice="mend it, or leave the file out")):
            yield text, text
