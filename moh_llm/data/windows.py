"""Windows of tokens as batches: input ids, positions and labels that keep documents apart."""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from moh_llm.data.shards import TokenizedSource, TokenStream
from moh_llm.errors import UserError

DOCUMENTS = 64  # held-out documents that are scored by default
SHORTER, WHOLE = 2048, 8  # of a longer context: the tokens of most windows, and the number of windows of full length
_IGNORED = -100  # label of a token that the loss is not taken on
_BLOCK = 1 << 16  # tokens that are read at once in search of documents

Window = tuple[np.ndarray, np.ndarray, np.ndarray]  # ids, positions within documents, labels


def window(stream: TokenStream, start: int, length: int) -> Window:
    """Tokens `start` to `start + length` of a stream.

    Labels are the ids, and -100 where a document begins or the loss is not taken.
    """
    ids, begins = stream.read(start, length)
    # A window that opens inside a document counts positions from its own start.
    origin = np.zeros(length, dtype=np.int64)
    origin[begins] = begins
    positions = np.arange(length) - np.maximum.accumulate(origin)
    labels = ids.copy()
    labels[begins] = _IGNORED
    if (targets := stream.targets(start, length)) is not None:
        labels[~targets] = _IGNORED
    return ids, positions, labels


def stack(rows: Sequence[tuple[np.ndarray, ...]], length: int) -> dict[str, torch.Tensor]:
    """Stack rows of ids, positions, labels and, if they have it, documents as int64 tensors `[B, length]`."""
    names = ("input_ids", "position_ids", "labels", "documents")
    if not rows:  # a step may have fewer sequences than there are processes
        return {name: torch.zeros(0, length, dtype=torch.int64) for name in names[:3]}
    return {name: torch.from_numpy(np.stack(part)) for name, part in zip(names, zip(*rows, strict=True), strict=False)}


def window_counts(streams: Sequence[TokenStream], shares: Sequence[float], length: int, tokens: int) -> list[int]:
    """The number of windows of `length` tokens that `fixed_batches` takes from each stream."""
    return [
        min(max(1, round(tokens * share / length)), len(stream) // length)
        for stream, share in zip(streams, shares, strict=True)
    ]


def fixed_batches(
    streams: Sequence[TokenStream], shares: Sequence[float], length: int, tokens: int, batch_size: int
) -> list[dict[str, torch.Tensor]]:
    """The first windows of `length` tokens of each stream, up to its share of `tokens`, as batches.

    A stream that is too short gives all it has, and each gives one window at least. Batches have the
    tensors of `SequenceStream.batch` and `documents`: each token's document, numbered over all streams,
    so that a document keeps its number across windows and batches. The last batch may have fewer rows.
    """
    rows, last = [], 0
    for stream, count in zip(streams, window_counts(streams, shares, length, tokens), strict=True):
        last += 1  # a stream may open inside a document
        for start in range(0, count * length, length):
            begins = np.zeros(length, dtype=np.int64)
            begins[stream.read(start, length)[1]] = 1
            documents = last + np.cumsum(begins)
            rows.append((*window(stream, start, length), documents))
            last = int(documents[-1])
    return [stack(rows[first : first + batch_size], length) for first in range(0, len(rows), batch_size)]


def held_out_tokens(length: int) -> int:
    """Held-out tokens that are scored by default: a window from each of `DOCUMENTS` documents.

    Up to a context of `SHORTER` tokens every window has the length of the context. In a longer one `WHOLE` windows do,
    and the others have `SHORTER` tokens: 64 windows of 8,192 tokens would take several times as long as calibration.
    """
    shorter = min(length, SHORTER)
    return DOCUMENTS * shorter + WHOLE * (length - shorter)


def whole_windows(length: int, tokens: int) -> float:
    """The number of held-out windows that may have the full length, if there are `tokens` in all."""
    if length <= SHORTER or tokens < held_out_tokens(length):
        return math.inf
    return (tokens - DOCUMENTS * SHORTER) // (length - SHORTER)


def validation_batches(
    sources: Sequence[TokenizedSource], sequence_length: int, max_tokens: int | None, batch_size: int
) -> list[dict[str, torch.Tensor]]:
    """Held-out windows of all sources by weight, each from another document; the same ones in every run.

    A window is the first tokens of a document, `sequence_length` at most. Tokens of one document resemble each other,
    so that a second window of it would say little. The next window comes from the source that is furthest below its
    weight's share, and each source gives one at least. Short windows share a row, kept apart by their positions; one
    that does not fit into the rest of a row is cut.

    All windows have ``max_tokens`` together; None: `held_out_tokens`. Below that, all may have the full length. Batches
    are like those of `fixed_batches`, the longest documents first; tokens that fill no row are one shorter row in a
    batch of its own.

    Raises:
        UserError: no source has held-out text for one window.
    """
    held_out = sum(len(source.validation) for source in sources)
    if held_out < sequence_length:
        raise UserError(
            f"the held-out text has {held_out} tokens, fewer than one window of {sequence_length}; give more text"
        )
    tokens = held_out_tokens(sequence_length) if max_tokens is None else max_tokens
    rows = _pack(_document_windows(sources, sequence_length, tokens), sequence_length)
    if not rows:
        raise UserError(
            "the loss is taken on none of the held-out tokens, since the assistant says none of them; "
            "give more text, or longer sequences"
        )
    full = [row for row in rows if len(row[0]) == sequence_length]
    groups = [full[first : first + batch_size] for first in range(0, len(full), batch_size)]
    groups += [[row] for row in rows[len(full) :]]
    return [stack(group, len(group[0][0])) for group in groups]


def _document_windows(sources: Sequence[TokenizedSource], length: int, tokens: int) -> list[Window]:
    """The first tokens of documents of all sources, `tokens` in all, without windows that have no label.

    More than `tokens` where a window from every source, or one row, takes more.
    """
    shorter, whole = min(length, SHORTER), whole_windows(length, tokens)
    documents = [_documents(source.validation) for source in sources]
    taken, found, ended = [0] * len(sources), [], set()
    while len(ended) < len(sources):
        number = min(set(range(len(sources))) - ended, key=lambda n: taken[n] / sources[n].weight)
        start, size = next(documents[number], (0, 0))
        size = min(size, length if whole else shorter)
        if whole < math.inf and sum(taken) + size > tokens:
            size = min(size, shorter)
        enough = sum(taken) + size > tokens and sum(taken) >= length and taken[number]
        if not size or enough:
            ended.add(number)
            continue
        ids, positions, labels = window(sources[number].validation, start, size)
        labels[0] = _IGNORED  # where a stream opens inside a document, too
        if (labels == _IGNORED).all():
            continue
        found.append((ids, positions, labels))
        taken[number] += size
        whole -= size > shorter
    return found


def _documents(stream: TokenStream) -> Iterator[tuple[int, int]]:
    """Start and length, in tokens, of each document of a stream, which may open and end inside one."""
    start = 0
    for first in range(0, len(stream), _BLOCK):
        _, begins = stream.read(first, min(_BLOCK, len(stream) - first))
        for begin in (first + begins).tolist():
            if begin > start:
                yield start, begin - start
                start = begin
    if start < len(stream):
        yield start, len(stream) - start


def _pack(windows: Sequence[Window], length: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """Rows of `length` tokens (the last may be shorter): ids, positions, labels, and the number of each window."""
    parts: list[tuple[np.ndarray, ...]] = []
    filled = 0
    # Full rows first; the sort keeps the others in their order.
    for number, window in enumerate(sorted(windows, key=lambda w: len(w[0]) < length), start=1):
        left = length - filled % length
        parts.append(tuple(values[:left] for values in (*window, np.full(len(window[0]), number))))
        filled += len(parts[-1][0])
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    return [tuple(c[first : first + length] for c in columns) for first in range(0, filled, length)]
