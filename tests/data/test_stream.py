"""Blocks: their order is a pure function, shares follow the weights, documents are marked."""

import numpy as np
import pytest
import torch

from moh_llm.data.stream import BlockStream, fixed_batches, permute, validation_batches, window
from moh_llm.data.tokenize import TokenizedSource, TokenStream
from moh_llm.errors import UserError


def stream(length: int, starts=(0,), base: int = 0) -> TokenStream:
    return TokenStream(np.arange(base, base + length, dtype=np.int32), np.array(starts, dtype=np.int64))


def source(name: str, weight: float, length: int = 1000, base: int = 0) -> TokenizedSource:
    return TokenizedSource(name, weight, stream(length, base=base), stream(length // 10, base=base))


@pytest.mark.parametrize(
    "weights", [[1.0], [0.5, 0.5], [0.7, 0.2, 0.1], [0.6128, 0.1248, 0.1094, 0.0437, 0.0424, 0.035, 0.0319]]
)
def test_shares_follow_the_weights_at_every_moment(weights):
    blocks = BlockStream([source(str(i), w) for i, w in enumerate(weights)], 10, seed=0)
    counts = np.zeros(len(weights), dtype=int)
    for number in range(3000):
        chosen, index = blocks.locate(number)
        assert index == counts[chosen]  # a source's blocks are numbered without gap
        counts[chosen] += 1
        # Each earlier source may be off by half a block, and what is left to later ones with it.
        assert np.abs(counts - np.array(weights) / sum(weights) * (number + 1)).max() <= 1.5


def test_any_block_is_found_without_its_predecessors():
    blocks = BlockStream([source("a", 0.3), source("b", 0.7, base=5000)], 10, seed=3)
    whole = blocks.batch(0, 50)["input_ids"]
    for first, count in ((0, 7), (7, 1), (49, 1), (13, 20)):
        assert torch.equal(blocks.batch(first, count)["input_ids"], whole[first : first + count])
    assert blocks.sources_of(0, 50) == ["a" if row[0] < 5000 else "b" for row in whole]


def test_every_epoch_reads_each_block_once_in_another_order():
    blocks = BlockStream([source("a", 1.0)], 10, seed=0)
    first, second = (blocks.batch(100 * epoch, 100)["input_ids"][:, 0].tolist() for epoch in (0, 1))
    assert sorted(first) == sorted(second) == list(range(0, 1000, 10))
    assert first != second
    assert BlockStream([source("a", 1.0)], 10, seed=1).batch(0, 100)["input_ids"][:, 0].tolist() != first


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 1000])
def test_permutation_is_one(size):
    assert sorted(permute(i, size, "key") for i in range(size)) == list(range(size))


def test_window_marks_documents():
    ids, positions, labels = window(stream(20, starts=(0, 7, 9)), 5, 8)
    assert ids.tolist() == [5, 6, 7, 8, 9, 10, 11, 12]
    assert positions.tolist() == [0, 1, 0, 1, 0, 1, 2, 3]
    assert labels.tolist() == [5, 6, -100, 8, -100, 10, 11, 12]


def test_too_little_text_is_refused():
    with pytest.raises(UserError, match="source a has 5 training tokens, fewer than one block of 10"):
        BlockStream([source("a", 1.0, length=5)], 10, seed=0)
    with pytest.raises(UserError, match="held-out text has 10 tokens, fewer than one window of 64"):
        validation_batches([source("a", 1.0, length=100)], 64, 128, 4)


def test_fixed_batches_share_tokens():
    batches = fixed_batches([stream(1000), stream(1000, base=5000), stream(5)], [0.5, 0.25, 0.25], 10, 200, 4)
    ids = torch.cat([batch["input_ids"] for batch in batches])
    assert ids.shape == (15, 10)  # 10 windows, 5 windows, none of the short one
    assert ids[9, 0] == 90 and ids[10, 0] == 5000
    assert [len(batch["input_ids"]) for batch in batches] == [4, 4, 4, 3]
