"""Sequences: their order is a pure function, shares follow the weights, and no process count changes a step."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moh_llm.data.shards import TokenizedSource, TokenStream
from moh_llm.data.stream import SequenceStream, permute
from moh_llm.errors import UserError

TAB_D = [4.24, 3.50, 4.37, 3.19, 10.94, 61.28, 12.48]


def tokens(length: int, base: int = 0, documents: int = 1) -> TokenStream:
    return TokenStream.from_documents(np.array_split(np.arange(base, base + length, dtype=np.uint32), documents))


def source(name: str, weight: float, length: int = 1000, base: int = 0, **fields) -> TokenizedSource:
    return TokenizedSource(name, weight, tokens(length, base), tokens(length // 10, base), **fields)


def sequences_of(weights, sequence_length: int = 10, seed: int = 0, length: int = 1000) -> SequenceStream:
    total = sum(weights)
    sources = [source(str(i), w / total, length, base=10_000 * i) for i, w in enumerate(weights)]
    return SequenceStream(sources, sequence_length, seed)


@pytest.mark.parametrize("weights", [[1.0], [0.5, 0.5], [0.7, 0.2, 0.1], TAB_D])
def test_shares_follow_the_weights_at_every_moment(weights):
    stream, share = sequences_of(weights), np.array(weights) / sum(weights)
    counts = np.zeros(len(weights), dtype=int)
    for number in range(10_000):
        chosen, index = stream.locate(number)
        assert index == counts[chosen]
        counts[chosen] += 1
        # Half a sequence for the source itself and half for each one before it.
        assert np.all(np.abs(counts - share * (number + 1)) <= (np.arange(len(weights)) + 1) / 2 + 1e-9)
    assert np.abs(counts / 10_000 - share).max() < 0.001


def test_every_epoch_reads_each_sequence_once_in_another_order():
    stream = sequences_of([1.0])
    first, second = (stream.batch(100 * epoch, 100)["input_ids"][:, 0].tolist() for epoch in (0, 1))
    assert sorted(first) == sorted(second) == list(range(0, 1000, 10))
    assert first != second
    assert sequences_of([1.0], seed=1).batch(0, 100)["input_ids"][:, 0].tolist() != first


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 1000])
def test_permutation_is_one(size):
    assert sorted(permute(i, size, "key") for i in range(size)) == list(range(size))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    weights=st.lists(st.floats(0.01, 1), min_size=1, max_size=5),
    sequence_length=st.integers(2, 40),
    batch_size=st.integers(1, 17),
    step=st.integers(1, 10**9),
)
def test_a_step_is_the_same_on_any_number_of_processes(seed, weights, sequence_length, batch_size, step):
    stream = sequences_of(weights, sequence_length, seed)
    whole = stream.batch((step - 1) * batch_size, batch_size)
    for world in (1, 2, 3, 8):
        # A fresh stream: nothing is remembered from earlier steps.
        again = sequences_of(weights, sequence_length, seed)
        parts = [next(again.read_steps([step], batch_size, rank, world)) for rank in range(world)]
        for name, tensor in whole.items():
            assert torch.equal(torch.cat([part[name] for part in parts]), tensor)


def test_too_little_text_is_refused():
    with pytest.raises(UserError, match="source a has 5 training tokens, fewer than one sequence of 10"):
        SequenceStream([source("a", 1.0, length=5)], 10, seed=0)
