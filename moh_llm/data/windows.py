"""Windows of tokens as batches: input ids, positions and labels that keep documents apart."""

from collections.abc import Sequence

import numpy as np
import torch

from moh_llm.data.shards import TokenizedSource, TokenStream
from moh_llm.errors import UserError


def window(stream: TokenStream, start: int, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens `start` to `start + length` of a stream: ids, positions within documents, labels.

    Labels are the ids, but -100 where documents begin, and at tokens that the loss is not taken on.
    """
    ids, begins = stream.read(start, length)
    # A window that opens inside a document counts positions from its own start.
    origin = np.zeros(length, dtype=np.int64)
    origin[begins] = begins
    positions = np.arange(length) - np.maximum.accumulate(origin)
    labels = ids.copy()
    labels[begins] = -100
    if (targets := stream.targets(start, length)) is not None:
        labels[~targets] = -100
    return ids, positions, labels


def stack(sequences: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]], length: int) -> dict[str, torch.Tensor]:
    """Stack results of `window` as int64 tensors `[B, length]`."""
    names = ("input_ids", "position_ids", "labels")
    if not sequences:  # of a step that has fewer sequences than there are processes
        return {name: torch.zeros(0, length, dtype=torch.int64) for name in names}
    parts = zip(*sequences, strict=True)
    return {name: torch.from_numpy(np.stack(part)) for name, part in zip(names, parts, strict=True)}


def window_counts(streams: Sequence[TokenStream], shares: Sequence[float], length: int, tokens: int) -> list[int]:
    """How many windows of `length` tokens `fixed_batches` takes of each stream."""
    return [
        min(max(1, round(tokens * share / length)), len(stream) // length)
        for stream, share in zip(streams, shares, strict=True)
    ]


def fixed_batches(
    streams: Sequence[TokenStream], shares: Sequence[float], length: int, tokens: int, batch_size: int
) -> list[dict[str, torch.Tensor]]:
    """The first windows of `length` tokens of each stream, up to its share of `tokens`, as batches.

    A stream that is too short gives what it has; at least one window is taken where there is one.
    Batches are those of `SequenceStream.batch`, with `documents`: each token's document, numbered over
    all streams, so that a document that spans windows or batches is known as one. The last batch may
    have fewer rows.
    """
    windows, documents, last = [], [], 0
    for stream, count in zip(streams, window_counts(streams, shares, length, tokens), strict=True):
        last += 1  # a stream may open inside a document
        for index in range(count):
            windows.append(window(stream, index * length, length))
            begins = np.zeros(length, dtype=np.int64)
            begins[stream.read(index * length, length)[1]] = 1
            documents.append(last + np.cumsum(begins))
            last = int(documents[-1][-1])
    return [
        stack(windows[first : first + batch_size], length)
        | {"documents": torch.from_numpy(np.stack(documents[first : first + batch_size]))}
        for first in range(0, len(windows), batch_size)
    ]


def validation_batches(
    sources: Sequence[TokenizedSource], sequence_length: int, max_tokens: int, batch_size: int
) -> list[dict[str, torch.Tensor]]:
    """Held-out windows of all sources by weight, `max_tokens` in all: the same ones in every run.

    Raises:
        UserError: no source has held-out text for one window.
    """
    batches = fixed_batches(
        [s.validation for s in sources], [s.weight for s in sources], sequence_length, max_tokens, batch_size
    )
    if not batches:
        held_out = sum(len(source.validation) for source in sources)
        raise UserError(
            f"the held-out text has {held_out} tokens, fewer than one window of {sequence_length}; give more text"
        )
    if not any((batch["labels"][:, 1:] != -100).any() for batch in batches):
        raise UserError(
            "the loss is taken on none of the held-out tokens: what the assistant says is not among them; "
            "give more text, or raise evaluation.max_tokens"
        )
    return batches
