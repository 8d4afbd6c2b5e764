"""Windows mark documents; shards are one row of tokens; documents do not see each other."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moh_llm.data.shards import TokenizedSource, TokenStream, split_tail
from moh_llm.data.windows import fixed_batches, held_out_tokens, validation_batches, window
from moh_llm.errors import UserError


def documents(*lengths: int) -> list[np.ndarray]:
    ends = np.cumsum(lengths)
    return [np.arange(end - length, end, dtype=np.uint32) for length, end in zip(lengths, ends, strict=True)]


def test_window_marks_documents():
    ids, positions, labels = window(TokenStream.from_documents(documents(7, 2, 11)), 5, 8)
    assert ids.tolist() == [5, 6, 7, 8, 9, 10, 11, 12]
    assert positions.tolist() == [0, 1, 0, 1, 0, 1, 2, 3]
    assert labels.tolist() == [5, 6, -100, 8, -100, 10, 11, 12]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=4),
    st.integers(0, 100),
    st.integers(0, 100),
)
def test_shards_are_one_row(lengths, start, length):
    flat = [piece for shard in lengths for piece in shard]
    pieces = documents(*flat)
    total, first = sum(flat), np.cumsum([0, *flat])[:-1]
    cuts = np.cumsum([len(shard) for shard in lengths])[:-1]
    stream = TokenStream.from_shards(
        [
            TokenStream.from_documents([pieces[i] for i in part]).shards[0]
            for part in np.split(np.arange(len(flat)), cuts)
        ]
    )
    start = start % total
    length = min(length, total - start)
    ids, begins = stream.read(start, length)
    assert ids.tolist() == list(range(start, start + length))
    assert begins.tolist() == [d - start for d in first if start <= d < start + length]
    part = stream.part(start, total)
    assert len(part) == total - start
    assert part.read(0, length)[0].tolist() == ids.tolist()
    with pytest.raises(IndexError):
        stream.read(total - 1, 2)


def test_the_tail_is_held_out():
    train, validation = split_tail(TokenStream.from_documents(documents(50, 50)), 0.1)
    assert (len(train), len(validation)) == (90, 10)
    assert validation.read(0, 10)[0].tolist() == list(range(90, 100))


def test_fixed_batches_share_tokens():
    streams = [TokenStream.from_documents(documents(n)) for n in (1000, 1000, 5)]
    batches = fixed_batches(streams, [0.5, 0.25, 0.25], 10, 200, 4)
    ids = torch.cat([batch["input_ids"] for batch in batches])
    assert ids.shape == (15, 10)  # 10 windows, 5 windows, none of the short one
    assert ids[9, 0] == 90 and ids[10, 0] == 0
    assert [len(batch["input_ids"]) for batch in batches] == [4, 4, 4, 3]
    short = TokenizedSource("a", 1.0, streams[0], streams[2])
    with pytest.raises(UserError, match="held-out text has 5 tokens, fewer than one window of 64"):
        validation_batches([short], 64, 128, 4)


def test_fixed_batches_number_documents():
    first = TokenStream.from_documents(documents(5, 25, 10))
    tail = split_tail(TokenStream.from_documents(documents(20, 10)), 0.5)[1]  # opens inside a document
    batches = fixed_batches([first, tail], [0.75, 0.25], 10, 40, 3)
    numbers = torch.cat([batch["documents"] for batch in batches]).flatten()
    # One that spans three windows is one; the next stream's is another.
    assert numbers.unique_consecutive(return_counts=True)[1].tolist() == [5, 25, 5, 5]
    assert numbers.unique().numel() == 4


def source(weight: float, *lengths: int) -> TokenizedSource:
    stream = TokenStream.from_documents(documents(*lengths))
    return TokenizedSource("a", weight, stream, stream)


def held_out(sources: list[TokenizedSource], length: int, tokens: int | None = None) -> list[tuple[int, int]]:
    """First id and number of tokens of each held-out document, once each; the rows must fit together."""
    found = []
    for batch in validation_batches(sources, length, tokens, 3):
        assert batch["input_ids"].shape[1] <= length
        for ids, positions, labels, numbers in zip(
            *(batch[k] for k in ("input_ids", "position_ids", "labels", "documents")), strict=True
        ):
            for number in numbers.unique_consecutive():
                piece = numbers == number
                count = int(piece.sum())
                assert positions[piece].tolist() == list(range(count))
                assert labels[piece].tolist() == [-100, *ids[piece].tolist()[1:]]
                found.append((int(number), int(ids[piece][0]), count))
    assert len({number for number, *_ in found}) == len(found)  # no two windows are of one document
    return [piece[1:] for piece in found]


def test_held_out_text_is_one_window_of_each_document():
    """The first tokens of 64 documents, where earlier the first windows were of as few as one."""
    found = held_out([source(1.0, *[300] * 200)], 32)
    assert len(found) == 64 and set(found) == {(300 * n, 32) for n in range(64)}
    # Short ones stand in a row together, and all that there are are taken.
    found = held_out([source(1.0, *[10] * 70)], 32)
    assert len(found) == 70 and sum(count for _, count in found) < 700
    assert len(held_out([source(1.0, 10_000, *[20] * 5)], 32)) == 6
    tail = split_tail(TokenStream.from_documents(documents(500)), 0.5)[1]  # opens inside a document
    assert held_out([TokenizedSource("a", 1.0, tail, tail)], 32) == [(250, 32)]


def test_sources_give_windows_by_weight_and_one_at_least():
    sources = [source(0.7, *[50] * 100), source(0.2, *[50] * 100), source(0.1, *[50] * 100)]
    batches = validation_batches(sources, 10, 200, 4)
    assert sum(batch["input_ids"].shape[0] for batch in batches) == 20
    first = torch.cat([batch["input_ids"][:, 0] for batch in batches]).sort().values.tolist()
    assert [first.count(50 * number) for number in range(15)] == [3, 3, 2, 2, *[1] * 10, 0]
    assert len(held_out([sources[0]], 10, 10)) == 1 and len(validation_batches(sources, 10, 10, 4)[0]["input_ids"]) == 3
    # Where one has few documents, others make up for them.
    assert len(held_out([source(0.9, 50, 50), source(0.1, *[50] * 100)], 10)) == 64


def test_of_long_contexts_some_windows_are_whole():
    found = held_out([source(1.0, *[9000] * 100)], 8192)
    counts = [count for _, count in found]
    assert counts.count(8192) == 8 and counts.count(2048) == 56
    assert sum(counts) == held_out_tokens(8192)
    found = held_out([source(1.0, *[9000] * 100)], 8192, 40_000)  # so few are asked for that all are whole
    assert [count for _, count in found] == [8192] * 4
    assert [held_out_tokens(length) for length in (256, 2048)] == [64 * 256, 64 * 2048]
