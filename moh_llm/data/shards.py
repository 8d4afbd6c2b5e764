"""Tokens of a mixture as training reads them: shards in files, mapped into memory, or arrays.

A shard is what datatrove's tokenizer writes: ``X.ds``, little-endian uint16 or uint32 token ids;
``X.ds.index``, uint64, the end of each document in tokens; ``X.ds.metadata``; and, where the loss is taken on a part
of the tokens, ``X.ds.loss``, a byte per token, 0 or 1.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from moh_llm.data.locate import locate, source_identity
from moh_llm.data.mixture import EMBEDDED, Mixture, load_mixture
from moh_llm.data.tokenizer import TextTokenizer
from moh_llm.errors import UserError
from moh_llm.locking import lock_folder
from moh_llm.reading import expand_home
from moh_llm.records.tokens import SPLITS, SplitRecord, index_of, loss_of, read_tokens

# Training does not tokenise more text than this itself: it takes minutes, and users want to choose the folder.
ON_THE_FLY_BYTES = 1 << 30


@dataclass(frozen=True)
class Shard:
    """Tokens of some documents, in memory or mapped from a file."""

    tokens: np.ndarray  # ids
    ends: np.ndarray  # of each document, in tokens, uint64
    targets: np.ndarray | None = None  # whether the loss is taken on each token; None: on all

    @classmethod
    def from_file(cls, path: Path, dtype: np.dtype, entry: SplitRecord) -> "Shard":
        """The shard of a ``.ds`` file, mapped into memory."""
        if fault := entry.fault(path):
            raise UserError(f"{fault}; give the same moh-llm tokenize command again, which repairs the folder")
        places = [(path, dtype), (index_of(path), "<u8")] + [(loss_of(path), bool)] * (entry.loss_sha256 is not None)
        # numpy and mmap would keep a file open for each of them, and a corpus has thousands.
        mapped = [torch.from_file(str(at), size=at.stat().st_size, dtype=torch.uint8).numpy() for at, _ in places]
        return cls(*(part.view(kind) for part, (_, kind) in zip(mapped, places, strict=True)))

    def read(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens `start` to `stop`, and where among them documents begin, as offsets from `start`."""
        # Keys of the index's own dtype: others would have numpy convert, that is copy, all of it.
        low, high = self.ends.searchsorted(np.array([start, stop], dtype=self.ends.dtype))
        begins = self.ends[low:high].astype(np.int64) - start
        if start == 0 and stop > 0:
            begins = np.concatenate([[0], begins])
        return self.tokens[start:stop], begins


@dataclass(frozen=True)
class TokenStream:
    """Tokens `start` to `stop` of consecutive shards."""

    shards: tuple[Shard, ...]
    start: int
    stop: int
    ends: tuple[int, ...]  # of the shards, in tokens from the first one's beginning

    @classmethod
    def from_shards(cls, shards: Sequence[Shard]) -> "TokenStream":
        """All tokens of the shards."""
        ends = tuple(accumulate(len(shard.tokens) for shard in shards))
        return cls(tuple(shards), 0, ends[-1] if ends else 0, ends)

    @classmethod
    def from_documents(cls, pieces: Sequence[np.ndarray], targets: Sequence[np.ndarray] | None = None) -> "TokenStream":
        """Tokens in memory: one array of ids per document, and one of the tokens that the loss is taken on."""
        ends = np.cumsum([len(piece) for piece in pieces], dtype=np.uint64)
        tokens = np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.uint32)
        return cls.from_shards([Shard(tokens, ends, None if targets is None else np.concatenate(targets))])

    def __len__(self) -> int:
        return self.stop - self.start

    def part(self, start: int, stop: int) -> "TokenStream":
        """Tokens `start` to `stop` of this stream, as a stream."""
        return TokenStream(self.shards, self.start + start, self.start + stop, self.ends)

    def read(self, start: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """`length` token ids from `start` on, int64, and the offsets at which documents begin."""
        if start < 0 or start + length > len(self):
            raise IndexError(f"tokens {start} to {start + length} of a stream of {len(self)}")
        ids, begins, done = np.empty(length, dtype=np.int64), [], 0
        for shard, low, high in self._parts(start, length):
            tokens, found = shard.read(low, high)
            ids[done : done + len(tokens)] = tokens
            begins.append(found + done)
            done += len(tokens)
        return ids, np.concatenate(begins) if begins else np.zeros(0, dtype=np.int64)

    def targets(self, start: int, length: int) -> np.ndarray | None:
        """Whether the loss is taken on each of `length` tokens from `start` on; None: on all tokens of the stream."""
        if all(shard.targets is None for shard in self.shards):
            return None
        parts = [
            np.ones(high - low, dtype=bool) if shard.targets is None else shard.targets[low:high]
            for shard, low, high in self._parts(start, length)
        ]
        return np.concatenate(parts)

    def _parts(self, start: int, length: int) -> Iterator[tuple[Shard, int, int]]:
        """The shards that hold `length` tokens from `start` on, and where in each they begin and end."""
        position, stop = self.start + start, self.start + start + length
        number = int(np.searchsorted(self.ends, position, side="right"))
        while position < stop:
            shard, upto = self.shards[number], min(stop, self.ends[number])
            first = self.ends[number] - len(shard.tokens)
            yield shard, position - first, upto - first
            position, number = upto, number + 1


@dataclass(frozen=True)
class TokenizedSource:
    """A source's tokens, for training and held out; `sha256` is a hash over its shards' hashes ("" in memory)."""

    name: str
    weight: float
    train: TokenStream
    validation: TokenStream
    sha256: str = ""


def split_tail(stream: TokenStream, share: float) -> tuple[TokenStream, TokenStream]:
    """Split a stream before the last `share` of its tokens, for a source of few documents."""
    cut = len(stream) - round(share * len(stream))
    return stream.part(0, cut), stream.part(cut, len(stream))


class Tokens(NamedTuple):
    """A mixture's name, the folder of its shards, and its sources."""

    name: str
    folder: str
    sources: list[TokenizedSource]


def tokens_for(mixture: str, tokenizer: Any, rows: int | None = None) -> Tokens:
    """The tokens of a recipe's ``data.mixture``.

    That is a folder that ``moh-llm tokenize`` made, or a mixture file or name, whose text is tokenised into the cache
    unless its tokens are there. ``rows`` are those of the model's embedding.

    Raises:
        UserError: another tokenizer made the tokens, one has no row, or the text cannot be read or is too much.
    """
    wanted = TextTokenizer.from_tokenizer(tokenizer, rows)
    if Path(mixture).is_dir() and mixture != EMBEDDED.name:
        return Tokens(read_tokens(Path(mixture)).name, mixture, open_tokens(Path(mixture), tokenizer=wanted))
    spec = load_mixture(mixture)
    folder = cache_folder(spec, wanted)
    from moh_llm.data.tokenize import tokenize_mixture

    # Of several processes the first tokenises. What a killed run left is from the same text: its hash is in the name.
    with lock_folder(folder, wait=True):
        tokenize_mixture(spec, wanted, folder)
    return Tokens(spec.name, str(folder), open_tokens(folder, spec, wanted))


def open_tokens(
    folder: Path, mixture: Mixture | None = None, tokenizer: TextTokenizer | None = None
) -> list[TokenizedSource]:
    """The sources of a folder that `tokenize_mixture` finished.

    The weights of ``mixture`` take the place of the recorded ones. Where the hash held out nothing
    of a source, or all of it (one long document, for example), the end of the source is held out instead.

    Raises:
        UserError: the folder is not finished, a shard is missing or cut short, or a tokenizer other than ``tokenizer``
            made the tokens, or an id has no row in the embedding.
    """
    record = read_tokens(folder)
    if tokenizer is not None:
        made, template = record.tokenizer, tokenizer.chat.sha256 if tokenizer.chat else None
        for what, ours, other in (
            ("tokenizer", made.sha256, tokenizer.sha256),
            ("template", made.chat_template, template),
        ):
            if ours not in (None, other):
                raise UserError(
                    f"the tokens in {folder} were made with another {what} ({made.name}, {ours[:12]}) than that of "
                    f"{tokenizer.name}; tokenise the mixture with the latter"
                )
    weights = {name: entry.weight for name, entry in record.sources.items()}
    if mixture is not None:
        weights = {source.name: source.weight for source in mixture.sources}
    dtype = np.dtype(record.tokenizer.dtype).newbyteorder("<")
    sources = []
    for name, weight in weights.items():
        if name not in record.sources:
            raise UserError(f"{folder} holds no tokens of source {name}; tokenise the mixture again")
        entries = [record.sources[name].shards.get(split, []) for split in SPLITS]
        streams = [
            TokenStream.from_shards([Shard.from_file(folder / name / entry.file, dtype, entry) for entry in found])
            for found in entries
        ]
        if tokenizer is not None and tokenizer.rows is not None:
            largest = max((int(shard.tokens.max()) for stream in streams for shard in stream.shards), default=-1)
            if largest >= tokenizer.rows:
                raise UserError(
                    f"the tokens of {name} in {folder} hold id {largest}, and the model embeds ids below vocab_size="
                    f"{tokenizer.rows}; remove the token from the text, or give it a row in the embedding"
                )
        if not all(map(len, streams)):
            streams = split_tail(streams[0] if len(streams[0]) else streams[1], record.validation_share)
        hashes = "".join(entry.sha256 + (entry.loss_sha256 or "") for found in entries for entry in found)
        digest = hashlib.sha256(hashes.encode()).hexdigest()
        sources.append(TokenizedSource(name, weight, *streams, digest))
    return sources


def cache_folder(mixture: Mixture, tokenizer: TextTokenizer) -> Path:
    """The folder of a mixture's tokens in ``$MOH_LLM_CACHE``, by default ``moh_llm`` in the Hugging Face cache.

    Its name has a hash of text, tokenizer and settings, not of weights. Raises UserError for too much text.
    """
    from huggingface_hub.constants import HF_HOME

    identity, total = {}, 0.0
    for source in mixture.sources:
        files = locate(source)
        total += sum(math.inf if file.size is None else file.size for file in files)
        identity[source.name] = source_identity(source, files, tokenizer, mixture.validation_share).content()
    if total > ON_THE_FLY_BYTES:
        raise UserError(
            f"mixture {mixture.name} has more than {ON_THE_FLY_BYTES / 2**30:g} GiB of text, or files of unknown size; "
            "tokenise it first (moh-llm tokenize MIXTURE --tokenizer MODEL --output-dir FOLDER) and train with "
            "data.mixture=FOLDER"
        )
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    root = Path(expand_home(os.environ.get("MOH_LLM_CACHE") or os.path.join(HF_HOME, "moh_llm")))
    return root / "tokens" / f"{re.sub(r'[^A-Za-z0-9_-]', '-', mixture.name)}-{key}"
