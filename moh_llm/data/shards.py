"""Tokens of a mixture as training reads them: shards in files, mapped into memory, or arrays.

A shard is what datatrove's tokenizer writes: ``X.ds``, little-endian uint16 or uint32 token ids;
``X.ds.index``, uint64, the end of each document in tokens; ``X.ds.metadata``; and, where the loss is taken on a part
of the tokens, ``X.ds.loss``, a byte per token, 0 or 1.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moh_llm.data.locate import locate, source_identity
from moh_llm.data.mixture import EMBEDDED, Mixture, load_mixture
from moh_llm.data.tokenizer import TextTokenizer
from moh_llm.errors import UserError
from moh_llm.locking import lock_folder
from moh_llm.reading import expand_home
from moh_llm.records.tokens import SPLITS, SplitRecord, TokensRecord, index_of, loss_of, read_tokens

# Training does not tokenise more text than this itself: it takes minutes, and users want to choose the folder.
ON_THE_FLY_BYTES = 1 << 30


_Arrays = tuple[np.ndarray, np.ndarray, np.ndarray | None]  # tokens, ends of documents, targets of the loss


class Shard:
    """Tokens of some documents.

    Args:
        length: number of tokens.
        masked: whether the loss is taken on a part of them.
        load: gives the arrays when they are first read.
    """

    def __init__(self, length: int, masked: bool, load: Callable[[], _Arrays]):
        self.length, self.masked, self._load = length, masked, load
        self._arrays: _Arrays | None = None

    @classmethod
    def from_documents(cls, pieces: Sequence[np.ndarray], targets: Sequence[np.ndarray] | None = None) -> "Shard":
        """A shard in memory: one array of ids per document, and one of the tokens that the loss is taken on."""
        ends = np.cumsum([len(piece) for piece in pieces], dtype=np.uint64)
        tokens = np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.uint32)
        arrays = tokens, ends, None if targets is None else np.concatenate(targets)
        return cls(len(tokens), targets is not None, partial(tuple, arrays))

    @classmethod
    def from_file(cls, path: Path, dtype: np.dtype, entry: SplitRecord) -> "Shard":
        """The shard of a ``.ds`` file, mapped into memory."""
        return cls(entry.tokens, entry.loss_sha256 is not None, partial(_map_files, path, dtype, entry))

    def _open(self) -> _Arrays:
        if self._arrays is None:
            self._arrays = self._load()
        return self._arrays

    def read(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens `start` to `stop`, and where among them documents begin, as offsets from `start`."""
        tokens, ends, _ = self._open()
        # Keys of the index's own dtype: others would have numpy convert, that is copy, all of it.
        low, high = ends.searchsorted(np.array([start, stop], dtype=ends.dtype))
        begins = ends[low:high].astype(np.int64) - start
        if start == 0 and stop > 0:
            begins = np.concatenate([[0], begins])
        return tokens[start:stop], begins

    def targets(self, start: int, stop: int) -> np.ndarray:
        """Whether the loss is taken on each of the tokens `start` to `stop`."""
        targets = self._open()[2]
        return np.ones(stop - start, dtype=bool) if targets is None else targets[start:stop]

    def largest(self) -> int:
        """The largest id, by reading all tokens."""
        return max(int(self.read(at, at + (1 << 22))[0].max()) for at in range(0, self.length, 1 << 22))


def _map_files(path: Path, dtype: np.dtype, entry: SplitRecord) -> _Arrays:
    try:
        tokens = np.memmap(path, dtype=dtype, mode="r", shape=(entry.tokens,))
        ends = np.memmap(index_of(path), dtype="<u8", mode="r", shape=(entry.documents,))
        if entry.loss_sha256 is None:
            return np.asarray(tokens), np.asarray(ends), None
        targets = np.memmap(loss_of(path), dtype=bool, mode="r", shape=(entry.tokens,))
        return np.asarray(tokens), np.asarray(ends), np.asarray(targets)
    except (OSError, ValueError) as error:
        raise UserError(f"token shard {path} cannot be read: {error}; tokenise again") from error


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
        ends = tuple(accumulate(shard.length for shard in shards))
        return cls(tuple(shards), 0, ends[-1] if ends else 0, ends)

    @classmethod
    def from_documents(cls, pieces: Sequence[np.ndarray], targets: Sequence[np.ndarray] | None = None) -> "TokenStream":
        """Tokens in memory (`Shard.from_documents`)."""
        return cls.from_shards([Shard.from_documents(pieces, targets)])

    def __len__(self) -> int:
        return self.stop - self.start

    def part(self, start: int, stop: int) -> "TokenStream":
        """Tokens `start` to `stop` of this stream, as a stream."""
        return TokenStream(self.shards, self.start + start, self.start + stop, self.ends)

    def read(self, start: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """`length` token ids from `start` on, int64, and the offsets at which documents begin.

        Raises:
            IndexError: the stream has fewer tokens.
            UserError: a shard is gone.
        """
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
        if not any(shard.masked for shard in self.shards):
            return None
        return np.concatenate([shard.targets(low, high) for shard, low, high in self._parts(start, length)])

    def _parts(self, start: int, length: int) -> Iterator[tuple[Shard, int, int]]:
        """The shards that hold `length` tokens from `start` on, and where in each they begin and end."""
        position, stop = self.start + start, self.start + start + length
        number = int(np.searchsorted(self.ends, position, side="right"))
        while position < stop:
            shard, upto = self.shards[number], min(stop, self.ends[number])
            first = self.ends[number] - shard.length
            yield shard, position - first, upto - first
            position, number = upto, number + 1


@dataclass(frozen=True)
class TokenizedSource:
    """A source's tokens, for training and held out.

    `weight` is its share of the tokens, `max_epochs` how often training may go through it, and
    `sha256` a hash over its shards' hashes ("" in memory).
    """

    name: str
    weight: float
    train: TokenStream
    validation: TokenStream
    max_epochs: float | None = None
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


def tokens_for(mixture: str, tokenizer: Any, say: Callable[[str], None], rows: int | None = None) -> Tokens:
    """The tokens of a recipe's ``data.mixture``.

    Args:
        mixture: a folder that ``moh-llm tokenize`` made, or a mixture file or name, whose text is tokenised into the
            cache unless its tokens are there.
        tokenizer: the model's Hugging Face tokenizer.
        say: prints one line.
        rows: of the model's embedding.

    Raises:
        UserError: another tokenizer made the tokens, one has no row, or the text cannot be read or is too much.
    """
    wanted = TextTokenizer.from_tokenizer(tokenizer, rows)
    if Path(mixture).is_dir() and mixture != EMBEDDED.name:
        sources = open_tokens(Path(mixture), tokenizer=wanted)
        return Tokens(read_tokens(Path(mixture)).name, mixture, sources)
    spec = load_mixture(mixture)
    say(spec.describe())
    folder = cache_folder(spec, wanted)
    if not _is_finished(folder):
        from moh_llm.data.tokenize import tokenize_mixture

        say(f"tokenising its text into {folder}")
        with lock_folder(folder, wait=True):
            if not _is_finished(folder):  # by another process, meanwhile
                # What a killed run left is from the same text: the folder's name has its hash.
                tokenize_mixture(spec, wanted, folder)
    return Tokens(spec.name, str(folder), open_tokens(folder, spec, wanted))


def open_tokens(
    folder: Path, mixture: Mixture | None = None, tokenizer: TextTokenizer | None = None
) -> list[TokenizedSource]:
    """The sources of a folder that `tokenize_mixture` finished.

    Where the hash held out nothing of a source, or all of it (one long document, for example), the end of
    the source is held out instead.

    Args:
        folder: the folder.
        mixture: its weights and bounds of epochs take the place of the recorded ones.
        tokenizer: must be the one that made the tokens, with a row for each of them; None: any.

    Raises:
        UserError: the folder is not finished, a shard is missing or cut short, or another tokenizer
            made the tokens.
    """
    record = read_tokens(folder)
    made_by = record.tokenizer
    if tokenizer is not None and made_by.sha256 != tokenizer.sha256:
        raise UserError(
            f"the tokens in {folder} were made with tokenizer {made_by.name} ({made_by.sha256[:12]}), "
            f"not with {tokenizer.name} ({tokenizer.sha256[:12]}); tokenise the mixture with the latter"
        )
    template = made_by.chat_template
    if tokenizer is not None and template and template != (tokenizer.chat and tokenizer.chat.sha256):
        raise UserError(
            f"the conversations in {folder} were written with another chat template than that of {tokenizer.name}; "
            "tokenise the mixture with the latter"
        )
    shares = {name: (entry.weight, entry.max_epochs) for name, entry in record.sources.items()}
    if mixture is not None:
        shares = {source.name: (source.weight, source.max_epochs) for source in mixture.sources}
    sources = [_open_source(folder, name, weight, epochs, record) for name, (weight, epochs) in shares.items()]
    if tokenizer is not None and tokenizer.rows is not None:  # only then may a shard hold an id without a row
        for source in sources:
            for shard in {*source.train.shards, *source.validation.shards}:
                tokenizer.check_rows(shard.largest(), f"a token shard of {folder / source.name}")
    return sources


def cache_folder(mixture: Mixture, tokenizer: TextTokenizer) -> Path:
    """The folder of a mixture's tokens in ``$MOH_LLM_CACHE``, by default ``moh_llm`` in the Hugging Face cache.

    Its name has a hash of text, tokenizer and settings; weights do not change it.

    Raises:
        UserError: the text is not there, or too much for training to tokenise.
    """
    from huggingface_hub.constants import HF_HOME

    identity, total = {}, 0
    for source in mixture.sources:
        files = locate(source)
        if source.builtin is None and any(file.size is None or "://" in file.path for file in files):
            raise UserError(f"source {source.name} is read over the network; {_tokenize_first(mixture)}")
        total += sum(file.size or 0 for file in files)
        own = source_identity(source, files, tokenizer, mixture.validation_share)
        identity[source.name] = own.content()
    if total > ON_THE_FLY_BYTES:
        raise UserError(f"mixture {mixture.name} has {total / 2**30:.1f} GiB of text; {_tokenize_first(mixture)}")
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    root = Path(expand_home(os.environ.get("MOH_LLM_CACHE") or os.path.join(HF_HOME, "moh_llm")))
    return root / "tokens" / f"{re.sub(r'[^A-Za-z0-9_-]', '-', mixture.name)}-{key}"


def _tokenize_first(mixture: Mixture) -> str:
    return (
        f"tokenise it first (moh-llm tokenize MIXTURE --tokenizer MODEL --output FOLDER) and train with "
        f"data.mixture=FOLDER instead of {mixture.name}"
    )


def _is_finished(folder: Path) -> bool:
    try:
        return bool(open_tokens(folder))
    except UserError:
        return False


def _open_source(
    folder: Path, name: str, weight: float, max_epochs: float | None, record: TokensRecord
) -> TokenizedSource:
    if name not in record.sources:
        raise UserError(f"{folder} holds no tokens of source {name}; tokenise the mixture again")
    entries = record.sources[name].shards
    dtype = np.dtype(record.tokenizer.dtype).newbyteorder("<")
    streams = []
    for split in SPLITS:
        shards = []
        for entry in entries.get(split, []):
            path = folder / name / entry.file
            if fault := entry.fault(path):
                raise UserError(f"{fault}; give the same moh-llm tokenize command again, which repairs the folder")
            shards.append(Shard.from_file(path, dtype, entry))
        streams.append(TokenStream.from_shards(shards))
    train, validation = streams
    if not len(train) or not len(validation):
        train, validation = split_tail(train if len(train) else validation, record.validation_share)
    found = [entry for split in SPLITS for entry in entries.get(split, [])]
    digest = hashlib.sha256("".join(entry.sha256 + (entry.loss_sha256 or "") for entry in found).encode())
    return TokenizedSource(name, weight, train, validation, max_epochs, digest.hexdigest())
