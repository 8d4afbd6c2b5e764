"""Token streams to batches, in an order that is a pure function of (seed, mixture, block number).

The unit is a block of L tokens of one source. Block number i belongs to a source chosen so that
realised token shares follow the weights at every moment, and to one block of that source chosen
by a permutation per epoch that needs no table. One integer is therefore the whole data state.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch

from moh_llm.data.tokenize import TokenizedSource, TokenStream
from moh_llm.errors import UserError

_ONE = 1 << 40  # weights are fixed-point numbers, so that counting is exact at any block number


class BlockStream:
    """An endless, randomly addressable stream of training blocks.

    Args:
        sources: tokenised sources; weights are shares of tokens.
        block_length: L, tokens per block.
        seed: chooses the permutations.

    Raises:
        UserError: a source has fewer training tokens than one block.
    """

    def __init__(self, sources: Sequence[TokenizedSource], block_length: int, seed: int):
        for source in sources:
            if len(source.train) < block_length:
                raise UserError(
                    f"source {source.name} has {len(source.train)} training tokens, fewer than one block of "
                    f"{block_length}; add text or shorten the block"
                )
        self.sources, self.block_length, self.seed = list(sources), block_length, seed
        # Source s against all later ones: the share that s takes of what earlier ones leave.
        weights = np.array([source.weight for source in sources], dtype=np.float64)
        rest = np.cumsum(weights[::-1])[::-1]
        self._shares = [min(_ONE, round(_ONE * float(w / r))) for w, r in zip(weights, rest, strict=True)]
        self._shares[-1] = _ONE

    def locate(self, number: int) -> tuple[int, int]:
        """Global block number -> (source, how many blocks that source gave before).

        Each source in turn takes its share of the blocks that are left, evenly spaced:
        of the first n it takes floor(n * share + 1/2).
        """
        for source, share in enumerate(self._shares):
            before, after = ((n * share + _ONE // 2) // _ONE for n in (number, number + 1))
            if after > before:
                return source, before
            number -= before
        raise AssertionError("the last source takes every block that is left")

    def batch(self, first: int, count: int) -> dict[str, torch.Tensor]:
        """Blocks `first` to `first + count - 1` as int64 tensors `[count, L]`.

        `input_ids`; `position_ids`, which restart with each document; `labels`, equal to the ids
        but -100 at a document's first token, which nothing before it predicts.
        """
        blocks = []
        for number in range(first, first + count):
            source, index = self.locate(number)
            stream = self.sources[source].train
            blocks_per_epoch = len(stream) // self.block_length
            epoch, position = divmod(index, blocks_per_epoch)
            block = permute(position, blocks_per_epoch, f"{self.seed}/{source}/{epoch}")
            blocks.append(window(stream, block * self.block_length, self.block_length))
        return _stack(blocks)

    def sources_of(self, first: int, count: int) -> list[str]:
        """Names of the sources of blocks `first` to `first + count - 1`."""
        return [self.sources[self.locate(number)[0]].name for number in range(first, first + count)]


def fixed_batches(
    streams: Sequence[TokenStream], shares: Sequence[float], length: int, tokens: int, batch_size: int
) -> list[dict[str, torch.Tensor]]:
    """The first windows of `length` tokens of each stream, up to its share of `tokens`, as batches.

    A stream that is too short gives what it has; at least one window is taken where there is one.
    Batches are those of `BlockStream.batch`; the last may have fewer rows.
    """
    windows = []
    for stream, share in zip(streams, shares, strict=True):
        count = min(max(1, round(tokens * share / length)), len(stream) // length)
        windows += [window(stream, index * length, length) for index in range(count)]
    return [_stack(windows[first : first + batch_size]) for first in range(0, len(windows), batch_size)]


def validation_batches(
    sources: Sequence[TokenizedSource], block_length: int, max_tokens: int, batch_size: int
) -> list[dict[str, torch.Tensor]]:
    """Held-out windows of all sources by weight, `max_tokens` in all: the same ones in every run.

    Raises:
        UserError: no source has held-out text for one window.
    """
    batches = fixed_batches(
        [s.validation for s in sources], [s.weight for s in sources], block_length, max_tokens, batch_size
    )
    if not batches:
        held_out = sum(len(source.validation) for source in sources)
        raise UserError(
            f"the held-out text has {held_out} tokens, fewer than one window of {block_length}; give more text"
        )
    return batches


def window(stream: TokenStream, start: int, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens `start` to `start + length` of a stream: ids, positions within documents, labels."""
    ids = stream.tokens[start : start + length].astype(np.int64)
    low, high = np.searchsorted(stream.document_starts, (start, start + length))
    begins = stream.document_starts[low:high] - start
    # A window that opens inside a document counts positions from its own start.
    origin = np.zeros(length, dtype=np.int64)
    origin[begins] = begins
    positions = np.arange(length) - np.maximum.accumulate(origin)
    labels = ids.copy()
    labels[begins] = -100
    return ids, positions, labels


def permute(index: int, size: int, key: str) -> int:
    """Where a keyed permutation of `range(size)` sends `index`: a Feistel network with cycle walking."""
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    while True:
        left, right = index >> half_bits, index & mask
        for turn in range(4):
            message = f"{key}/{turn}/{right}".encode()
            left, right = (
                right,
                left ^ (int.from_bytes(hashlib.blake2b(message, digest_size=8).digest(), "little") & mask),
            )
        index = left << half_bits | right
        if index < size:
            return index


def _stack(blocks: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> dict[str, torch.Tensor]:
    ids, positions, labels = (torch.from_numpy(np.stack(part)) for part in zip(*blocks, strict=True))
    return {"input_ids": ids, "position_ids": positions, "labels": labels}
