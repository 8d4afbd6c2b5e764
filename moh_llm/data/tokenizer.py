"""The tokenizer of a corpus: what identifies it, and documents as token ids."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Encoding, Tokenizer

from moh_llm.data.chat import ChatTemplate, ChatText
from moh_llm.errors import UserError, reason
from moh_llm.reading import read_json
from moh_llm.records.model import check_place
from moh_llm.records.tokens import TokenizerRecord

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# One call of the tokenizer: enough documents for its threads, little text to hold.
_BATCH_DOCUMENTS = 128
_BATCH_CHARACTERS = 1 << 20
_ADDED_TOKENS = 1024


def open_tokenizer(name_or_path: str | Path, vocab_size: int | None = None) -> "PreTrainedTokenizerBase":
    """The Hugging Face tokenizer of a folder or a Hub id. Code beside it is not run.

    Raises:
        UserError: there is none, its files cannot be read, or it has ids beyond an embedding of ``vocab_size`` rows.
    """
    from transformers import AutoTokenizer

    check_place(name_or_path)
    for file in ("tokenizer.json", "tokenizer_config.json"):  # transformers would wait for a pipe
        if (place := Path(name_or_path) / file).exists() and not isinstance(read_json(place), dict):
            raise UserError(f"{place} is not a JSON object; copy the file from the model's source again")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name_or_path, trust_remote_code=False)
    # Missing files, a wrong id, a field of the wrong type: each an error of its own kind.
    except Exception as error:
        raise UserError(f"{name_or_path} has no tokenizer that loads ({reason(error)[:160]})") from error
    if vocab_size is None:
        return tokenizer
    # Padding tokens are often added without a row, by transformers, too, and plain text does not hold them.
    added = tokenizer.get_added_vocab()
    for number, token in sorted((n, token) for token, n in tokenizer.get_vocab().items() if n >= vocab_size):
        if token not in added or number >= vocab_size + _ADDED_TOKENS:
            raise UserError(
                f"the tokenizer of {name_or_path} has id {number} ({token[:40]!r}), and the model embeds ids below "
                f"vocab_size={vocab_size}; remove the token, or add rows to the embedding"
            )
    return tokenizer


def rows_beside(name_or_path: str | Path) -> int | None:
    """Rows of the embedding of a model's folder or Hub id; None where no model is there. Raises as `check_place`."""
    from transformers import PreTrainedConfig

    check_place(name_or_path)
    try:
        rows = PreTrainedConfig.get_config_dict(name_or_path)[0].get("vocab_size")
    # Nothing there, no network, no JSON: each an error of its own kind.
    except Exception:
        return None
    return rows if isinstance(rows, int) and rows > 0 else None


class TextTokenizer:
    """A fast tokenizer that adds special tokens, closes each document, and neither truncates nor pads.

    Args:
        end: id of the end-of-sequence token that closes each document; None: documents are not closed.
        name: what to call it in records.
        rows: of the embedding that the ids index: text with an id from there on is refused; None: not checked.
    """

    def __init__(
        self, backend: Tokenizer, end: int | None, name: str, chat: ChatTemplate | None = None, rows: int | None = None
    ):
        # A copy, since the caller's may truncate and pad.
        self.backend = Tokenizer.from_str(backend.to_str())
        self.backend.no_truncation()
        self.backend.no_padding()
        self.end, self.name, self.chat = end, name, chat
        self.vocab_size = 1 + max(self.backend.get_vocab(with_added_tokens=True).values(), default=0)
        self.dtype = np.dtype("<u2" if self.vocab_size <= 1 << 16 else "<u4")
        self.rows = rows if rows is not None and rows < self.vocab_size else None

    @classmethod
    def from_tokenizer(cls, tokenizer: Any, rows: int | None = None) -> "TextTokenizer":
        """Wrap a Hugging Face tokenizer. Raises UserError where it is not a fast one."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        name = str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)
        if backend is None:
            raise UserError(f"tokenizer {name} is not a fast one (it has no tokenizer.json); convert it first")
        return cls(backend, tokenizer.eos_token_id, name, ChatTemplate.from_tokenizer(tokenizer), rows)

    @classmethod
    def load(cls, name_or_path: str, rows: int | None = None) -> "TextTokenizer":
        """From a folder or a Hub id. Raises UserError where there is none."""
        return cls.from_tokenizer(open_tokenizer(name_or_path, rows), rows)

    @property
    def sha256(self) -> str:
        """Hex SHA-256 of everything that decides the ids of a text. `chat` decides the text of messages."""
        canonical = json.dumps([json.loads(self.backend.to_str()), self.end], sort_keys=True)
        return hashlib.sha256(canonical.encode()).hexdigest()

    def record(self, chats: bool) -> TokenizerRecord:
        """Identity of the tokenizer for records; ``chats``: with its chat template."""
        template = self.chat.sha256 if chats and self.chat else None
        return TokenizerRecord(name=self.name, sha256=self.sha256, dtype=self.dtype.name, chat_template=template)

    def encode(self, documents: Iterable[tuple[str, str]]) -> Iterator[tuple[str, np.ndarray, np.ndarray | None]]:
        """Yield, per document, its group, its token ids (`dtype`) and on which of them the loss is taken (bool).

        `end` closes a document unless a chat template wrote it. The third is None for all tokens, and an array for a
        `ChatText`. One batch of ``documents`` (`source_documents`) is held.

        Raises:
            UserError: a document holds a token without a row in the embedding.
        """
        for batch in _batches(documents):
            for (group, text), encoding in zip(batch, self._encode_batch([text for _, text in batch]), strict=True):
                ids, chat = encoding.ids, isinstance(text, ChatText)
                closed = self.end is not None and ids[-1:] != [self.end] and not (chat and text.templated)
                if closed:
                    ids.append(self.end)
                if self.rows is not None and max(ids, default=-1) >= self.rows:
                    self._refuse(max(ids), text)
                targets = text.targets(encoding.offsets, closed) if chat else None
                yield group, np.array(ids, dtype=self.dtype), targets

    def _refuse(self, number: int, text: str) -> None:
        raise UserError(
            f"the text {' '.join(text[:40].split())!r}... holds the token {self.backend.id_to_token(number)!r} (id "
            f"{number}) of {self.name}, and the model embeds ids below vocab_size={self.rows}; remove the token from "
            "text or tokenizer, or give it a row: moh-llm convert BASE --tokenizer FOLDER"
        )

    def _encode_batch(self, batch: list[str]) -> list[Encoding]:
        if not any(isinstance(text, ChatText) for text in batch):
            return self.backend.encode_batch_fast(batch)
        found: dict[int, Encoding] = {}
        for templated in (False, True):
            rows = [row for row, text in enumerate(batch) if getattr(text, "templated", False) == templated]
            # Not the fast way, which leaves out the ranges of characters.
            encodings = self.backend.encode_batch([batch[row] for row in rows], add_special_tokens=not templated)
            found |= zip(rows, encodings, strict=True)
        return [found[row] for row in range(len(batch))]


def is_held_out(group: str, share: float) -> bool:
    """Whether a document belongs to validation: by a hash of its group, so the same ones however much is read."""
    digest = hashlib.blake2b(group.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < share * 2**64


def _batches(documents: Iterable[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    batch: list[tuple[str, str]] = []
    characters = 0
    for group, text in documents:
        batch.append((group, text))
        characters += len(text)
        if len(batch) == _BATCH_DOCUMENTS or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
