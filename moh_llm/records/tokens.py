"""The records of tokenized text: what a folder of token shards holds, and what each of its tasks wrote."""

from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat

from moh_llm.errors import UserError
from moh_llm.reading import read_json
from moh_llm.records.base import Record

MIXTURE_RECORD = "mixture.json"
Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")


class TokenizerRecord(Record):
    """The tokenizer of a folder of tokens, the dtype of its ids, and the hash of its template if it wrote any text."""

    name: str
    sha256: str
    dtype: Literal["uint16", "uint32"]
    chat_template: str | None = None


class TextRecord(Record):
    """A file of text: `modified` is its time of modification, or the Hub's hash of its content."""

    file: str
    bytes: int | None
    modified: str | None


class SourceIdentity(Record):
    """`SOURCE/source.json`: everything that decides the bytes of a source's shards.

    Attributes:
        tokenizer: hash of the tokenizer.
        chat_template: hash of the template that writes conversations; None for text.
        text: the files, or what identifies built-in text.
    """

    tokenizer: str
    validation_share: float
    type: str
    text_field: str
    chat_template: str | None
    text: list[TextRecord] | dict[str, str]


class SplitRecord(Record):
    """One shard: numbers of documents and tokens, and the size and hash of its file of tokens.

    Where the loss is taken on some tokens only, `loss_tokens` is their number, and `loss_sha256` the hash of the file
    that marks them.
    """

    documents: NonNegativeInt
    tokens: NonNegativeInt
    bytes: NonNegativeInt
    sha256: str
    loss_tokens: NonNegativeInt | None = None
    loss_sha256: str | None = None

    def fault(self, path: Path) -> str | None:
        """The first file of the shard at ``path`` that has another size than recorded, and how; None if all agree."""
        sizes = {path: self.bytes, index_of(path): 8 * self.documents}
        if self.loss_sha256 is not None:
            sizes[loss_of(path)] = self.tokens
        for file, size in sizes.items():
            found = file.stat().st_size if file.is_file() else None
            if found != size:
                what = "is missing" if found is None else f"has {found} bytes, {size} were written"
                return f"token shard {file} {what}"
        return None


class ShardRecord(SplitRecord):
    """One shard with the name of its file in the source's folder."""

    file: str


class TaskRecord(Record):
    """`SOURCE/tasks/NUMBER.json`: the shards that a task wrote; a split without documents has none."""

    splits: dict[Split, SplitRecord]


class SourceRecord(Record):
    """A source in `mixture.json`: its numbers, the files that were read, and its shards."""

    weight: PositiveFloat
    documents: int
    tokens: int
    text: list[TextRecord]
    shards: dict[Split, list[ShardRecord]]

    @property
    def loss_tokens(self) -> int | None:
        """Tokens that the loss is taken on; None: all."""
        counts = [shard.loss_tokens for shards in self.shards.values() for shard in shards]
        return None if None in counts else sum(count for count in counts if count is not None)


class TokensRecord(Record):
    """`mixture.json` of a folder of tokens; it is written last. `tokens` are those of all sources."""

    status: Literal["finished"] = "finished"
    name: str
    validation_share: float = Field(gt=0, lt=1)
    tokenizer: TokenizerRecord
    tokens: int
    sources: dict[str, SourceRecord]


def read_tokens(folder: Path) -> TokensRecord:
    """The record of a folder of tokens.

    Raises:
        UserError: there is none, tokenizing did not finish, or the record is malformed or of another version.
    """
    path = folder / MIXTURE_RECORD
    if not path.is_file():
        raise UserError(f"{folder} holds no {MIXTURE_RECORD}; name a folder of moh-llm tokenize, or a mixture file")
    content = read_json(path)
    if not isinstance(content, dict) or content.get("status") != "finished":
        raise UserError(f"{folder} is not finished; give the same moh-llm tokenize command again")
    try:
        return TokensRecord.parse(content, str(path))
    except UserError as error:
        again = f"moh-llm tokenize MIXTURE --tokenizer MODEL --output-dir {folder}"
        raise UserError(f"{error}; tokenize the text again ({again})") from error


def index_of(path: Path) -> Path:
    """The index of a shard: where each document ends, in tokens."""
    return path.with_name(path.name + ".index")


def loss_of(path: Path) -> Path:
    """Which tokens of a shard the loss is taken on, a byte each, 0 or 1."""
    return path.with_name(path.name + ".loss")
