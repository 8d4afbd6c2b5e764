"""Token streams to batches, in an order that is a pure function of (seed, mixture, sequence number).

The unit is a sequence of L tokens of one source. The source of sequence i is chosen so that token shares
follow the weights after every sequence, and the place in the source by a keyed permutation per epoch,
which needs no table. One integer is therefore the full state of the data: step s of B sequences reads
sequences (s - 1) * B onwards, on any number of processes.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import torch

from moh_llm.data.shards import TokenizedSource
from moh_llm.data.windows import stack, window
from moh_llm.errors import UserError

_ONE = 1 << 60  # weights are fixed-point numbers, so that counting is exact at any number


class SequenceStream:
    """An endless stream of training sequences of L tokens with random access; ``seed`` chooses the permutations."""

    def __init__(self, sources: Sequence[TokenizedSource], sequence_length: int, seed: int):
        for source in sources:
            if len(source.train) < sequence_length:
                raise UserError(
                    f"source {source.name} has {len(source.train)} training tokens, fewer than one sequence of "
                    f"{sequence_length}; add text or lower the sequence length"
                )
        self.sources, self.sequence_length, self.seed = list(sources), sequence_length, seed
        # Source s against all later ones: the share that s takes of what earlier ones leave.
        weights = [Fraction(source.weight) for source in sources]
        rest = [sum(weights[number:]) for number in range(len(weights))]
        self._shares = [round(_ONE * w / r) for w, r in zip(weights, rest, strict=True)]
        self._shares[-1] = _ONE

    def locate(self, number: int) -> tuple[int, int]:
        """Global sequence number -> (source, number of sequences that the source gave before).

        Each source in turn takes its share of the sequences that are left, evenly spaced: floor(n * share + 1/2)
        of the first n. A source's count therefore differs from its weight's share by at most half a sequence
        for itself and half for each source before it.
        """
        for source, share in enumerate(self._shares):
            before, after = _taken(number, share), _taken(number + 1, share)
            if after > before:
                return source, before
            number -= before
        raise AssertionError("the last source takes every sequence that is left")

    def counts(self, sequences: int) -> list[int]:
        """The number of sequences that each source gives among the first `sequences`."""
        found = []
        for share in self._shares:
            found.append(_taken(sequences, share))
            sequences -= found[-1]
        return found

    def sequences_per_epoch(self, source: int) -> int:
        """Whole sequences of the source; the shorter rest at its end is not read."""
        return len(self.sources[source].train) // self.sequence_length

    def batch(self, first: int, count: int) -> dict[str, torch.Tensor]:
        """Sequences `first` to `first + count - 1` as int64 tensors `[count, L]`.

        `input_ids`; `position_ids`, which restart with each document; `labels`, the ids, and -100 at the
        first token of a document, which nothing before it predicts, and where no loss is taken.
        """
        sequences = []
        for number in range(first, first + count):
            source, index = self.locate(number)
            epoch, position = divmod(index, self.sequences_per_epoch(source))
            key = f"{self.seed}/{self.sources[source].name}/{epoch}"
            start = permute(position, self.sequences_per_epoch(source), key) * self.sequence_length
            sequences.append(window(self.sources[source].train, start, self.sequence_length))
        return stack(sequences, self.sequence_length)

    def read_steps(
        self, steps: Iterable[int], batch_size: int, rank: int = 0, world_size: int = 1
    ) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the batch of each step (from 1): a process's consecutive part of the step's `batch_size` sequences."""
        first = batch_size * rank // world_size
        count = batch_size * (rank + 1) // world_size - first
        for step in steps:
            # Slices of mapped files take milliseconds, so that no other process or thread reads them.
            yield self.batch((step - 1) * batch_size + first, count)


def make_receipt(stream: SequenceStream, sequences: int) -> dict[str, dict[str, Any]]:
    """By source, what the first `sequences` sequences read: planned weight, tokens, share, epochs, repeated tokens."""
    receipt = {}
    for number, (source, count) in enumerate(zip(stream.sources, stream.counts(sequences), strict=True)):
        has = stream.sequences_per_epoch(number)
        receipt[source.name] = {
            "weight": round(source.weight, 6),
            "tokens": count * stream.sequence_length,
            "share": round(count / sequences, 6) if sequences else 0.0,
            "epochs": round(count / has, 4),
            "repeated_tokens": max(0, count - has) * stream.sequence_length,
        }
    return receipt


def permute(index: int, size: int, key: str) -> int:
    """A keyed permutation of `range(size)`, at `index`: a Feistel network with cycle walking."""
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    while True:
        left, right = index >> half_bits, index & mask
        for turn in range(4):
            digest = hashlib.blake2b(f"{key}/{turn}/{right}".encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
        index = left << half_bits | right
        if index < size:
            return index


def _taken(sequences: int, share: int) -> int:
    """The number of sequences that a share (in units of 1 / `_ONE`) takes of the first `sequences`."""
    return (sequences * share + _ONE // 2) // _ONE
