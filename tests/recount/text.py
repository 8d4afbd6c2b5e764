"""The mixture's text as tokens, and which of them are read: by the rules of docs/data.md, written anew."""

import hashlib
import json
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path

import numpy as np
import yaml
from transformers import AutoTokenizer


@dataclass(frozen=True, eq=False)
class Window:
    """Some tokens in a row: their ids, and the number of the document that each is of, both `[T]`."""

    ids: np.ndarray
    documents: np.ndarray

    @property
    def pieces(self) -> list[tuple[int, np.ndarray]]:
        """The parts of its documents: each document's number and the ids of its tokens."""
        cuts = np.flatnonzero(np.diff(self.documents)) + 1
        numbers = self.documents[np.concatenate([[0], cuts])]
        return list(zip(numbers.tolist(), np.split(self.ids, cuts), strict=True))


@dataclass(frozen=True, eq=False)
class Split:
    """One side of a source: its documents' tokens, one after another."""

    documents: list[np.ndarray]

    @cached_property
    def row(self) -> Window:
        numbers = np.repeat(np.arange(len(self.documents)), [len(ids) for ids in self.documents])
        return Window(np.concatenate(self.documents), numbers)

    def __len__(self) -> int:
        return len(self.row.ids)

    def window(self, start: int, length: int) -> Window:
        return Window(self.row.ids[start : start + length], self.row.documents[start : start + length])


@dataclass(frozen=True)
class Source:
    name: str
    share: float
    train: Split
    held_out: Split


def read_sources(mixture: Path, tokenizer: Path) -> list[Source]:
    """The sources of a mixture file, whose weights become shares."""
    content, encode = yaml.safe_load(mixture.read_text()), AutoTokenizer.from_pretrained(tokenizer)
    total = sum(Fraction(str(source["weight"])) for source in content["sources"].values())
    found = []
    for name, source in content["sources"].items():
        sides: dict[bool, list[np.ndarray]] = {False: [], True: []}
        for line in (mixture.parent / source["files"]).read_text().splitlines():
            text = json.loads(line)["text"]
            digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
            is_held_out = digest < content["validation_share"] * 2**64
            sides[is_held_out].append(np.array([*encode(text)["input_ids"], encode.eos_token_id]))
        share = float(Fraction(str(source["weight"])) / total)
        found.append(Source(name, share, Split(sides[False]), Split(sides[True])))
    return found


def first_windows(sources: list[Source], length: int, tokens: int) -> dict[str, list[Window]]:
    """Calibration text: of each source's training text the first windows, as many as its share of ``tokens``."""
    found = {}
    for source in sources:
        count = min(max(1, round(tokens * source.share / length)), len(source.train) // length)
        found[source.name] = [source.train.window(number * length, length) for number in range(count)]
    return found


def sequence_of(sources: list[Source], number: int, length: int, seed: int) -> tuple[str, Window]:
    """Sequence ``number`` of training and the name of its source.

    Each source in turn takes its share of what earlier ones leave: of n sequences floor(n * share + 1/2).
    """
    left = Fraction(1)
    for source in sources:
        share = Fraction(source.share) / left if source is not sources[-1] else Fraction(1)
        before, after = (int(n * share + Fraction(1, 2)) for n in (number, number + 1))
        if after > before:
            epoch, place = divmod(before, len(source.train) // length)
            at = _permuted(place, len(source.train) // length, f"{seed}/{source.name}/{epoch}")
            return source.name, source.train.window(at * length, length)
        number, left = number - before, left - Fraction(source.share)
    raise AssertionError("no source takes it")


def _permuted(place: int, size: int, key: str) -> int:
    """Where the keyed permutation of an epoch sends ``place``: four Feistel rounds, again while it is out of range."""
    bits = max(1, ((size - 1).bit_length() + 1) // 2)
    while True:
        left, right = divmod(place, 1 << bits)
        for turn in range(4):
            digest = hashlib.blake2b(f"{key}/{turn}/{right}".encode(), digest_size=8).digest()
            left, right = right, left ^ int.from_bytes(digest, "little") % (1 << bits)
        place = (left << bits) + right
        if place < size:
            return place
