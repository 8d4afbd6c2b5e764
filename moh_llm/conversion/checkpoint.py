"""Writing checkpoints: a base with more tokens; copies of the base's shards, one shard of routing tensors, an index.

At most one shard's tensors are in memory, and none where shards are copied.
"""

import contextlib
import copy
import dataclasses
import math
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tqdm import tqdm
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

import moh_llm.modeling
from moh_llm.conversion.base import BaseCheckpoint, accompanying
from moh_llm.data.tokenizer import open_tokenizer
from moh_llm.errors import UserError
from moh_llm.files import write_json
from moh_llm.reading import read_json
from moh_llm.records.model import CONFIG, TOKENIZERS, save_tensors, weight_names
from moh_llm.records.tensors import EMBEDDING, HEAD, cast_weight

REMOTE_CODE = sorted(Path(moh_llm.modeling.__file__).parent.glob("*_moh*.py"))  # the files that travel with a model
_TABLES = (EMBEDDING, HEAD)  # embedding of the input, and of the output where that is another matrix
_MULTIPLE = 64  # rows: kernels of matrix products are slower with other numbers
_TOKENIZER_FILES = {*TOKENIZERS, "special_tokens_map.json", "added_tokens.json", "merges.txt", "chat_template.jinja"}


def write_weights(
    folder: Path, base: BaseCheckpoint, routing: dict[str, torch.Tensor], dtype: torch.dtype | None = None
) -> dict[str, str]:
    """Write the weights of a converted model, or without routing tensors those of the dense base.

    Files of dense tensors alone are copied as they are, unless the weights are cast to a `dtype`, one shard at a time.
    Returns the index, tensor name -> file name, which `write_description` writes last.

    Raises:
        UserError: the disk refuses, or a weight is too large for the dtype.
    """
    count = len(base.shards) + bool(routing)
    single = weight_names(base.folder)[0]
    stem = single.removesuffix(".safetensors")
    names = [single] if count == 1 else [f"{stem}-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    renamed = {shard.name: name for shard, name in zip(base.shards, names, strict=False)}
    with tqdm(base.shards, desc="write weights", unit="shard", leave=False) as bar:
        for shard in bar:
            target = folder / renamed[shard.name]
            kept = {name for name, file in base.weight_map.items() if file == shard.name}
            with safe_open(shard, framework="np") as file:
                mixed = kept != set(file.keys())
            if not mixed and dtype is None:
                shutil.copyfile(shard, target)
                continue
            tensors = {name: tensor for name, tensor in load_file(shard).items() if name in kept}
            if dtype is not None:
                tensors = {name: cast_weight(t, dtype, f"{shard}: {name}") for name, t in tensors.items()}
            save_tensors(tensors, target)
    weight_map = {tensor: renamed[file] for tensor, file in base.weight_map.items()}
    if routing:
        save_tensors(routing, folder / names[-1])
        weight_map |= dict.fromkeys(routing, names[-1])
    return weight_map


def write_description(
    folder: Path, base: BaseCheckpoint, config: PreTrainedConfig, weight_map: dict[str, str], remote_code: bool = True
) -> None:
    """Write config, remote code, tokenizer, and last the index of the shards."""
    config.save_pretrained(folder)
    if remote_code:
        for file in REMOTE_CODE:
            shutil.copyfile(file, folder / file.name)
    for file in accompanying(base.folder):
        if file.name not in (CONFIG, "README.md"):  # the card describes the base
            target = folder / file.relative_to(base.folder)
            target.parent.mkdir(exist_ok=True)  # for additional chat templates
            shutil.copyfile(file, target)
    _keep_tokenizer_class(folder, base)
    files = sorted(set(weight_map.values()))
    single, index_name = weight_names(base.folder)
    if files != [single]:
        total = sum(_tensor_bytes(folder / name) for name in files)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(folder / index_name, index)


def _keep_tokenizer_class(folder: Path, base: BaseCheckpoint) -> None:
    """Name the class of the base's tokenizer, which transformers may derive from the base's `model_type`."""
    own = found = None
    with contextlib.suppress(UserError):  # there is none, or one that cannot be read here
        own = type(open_tokenizer(base.folder))
        found = type(open_tokenizer(folder))
    if found is not own:
        path = folder / "tokenizer_config.json"
        write_json(path, (read_json(path) if path.exists() else {}) | {"tokenizer_class": own.__name__})


def _tensor_bytes(shard: Path) -> int:
    """Bytes of tensor data in a safetensors file, which follow a length-prefixed JSON header."""
    with shard.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
    return shard.stat().st_size - 8 - header


@dataclass(frozen=True)
class Widening:
    """New tokens for a base.

    Attributes:
        tokenizer: tokenizer with the base's tokens, under the same ids, and new ones.
        own: the base's tokenizer.
        new_ids: ids of tokens without a row in the base's embedding, or with a row that no token had.
        rows: rows of the widened embedding.
    """

    tokenizer: PreTrainedTokenizerBase
    own: PreTrainedTokenizerBase
    new_ids: list[int]
    rows: int


def plan_widening(base: BaseCheckpoint, name: str) -> Widening:
    """Compare a tokenizer (folder or Hub id) with the base's.

    Raises:
        UserError: it cannot be read, does not keep the base's ids, or has no new token.
    """
    own = open_tokenizer(base.folder, base.config.vocab_size)
    tokenizer = open_tokenizer(name)
    ids, wanted, rows = own.get_vocab(), tokenizer.get_vocab(), base.config.vocab_size
    for token, number in ids.items():
        if wanted.get(token) != number:
            found = "lacks it" if token not in wanted else f"gives it id {wanted[token]}"
            raise UserError(
                f"--tokenizer {name}: token {token[:40]!r} has id {number} in {base.name}, and this tokenizer {found}; "
                "add tokens to the base's own tokenizer, so that all of its ids stay"
            )
    new_ids = sorted(set(wanted.values()) - {number for number in ids.values() if number < rows})
    if not new_ids:
        raise UserError(f"--tokenizer {name} has no token that {base.name} lacks; drop --tokenizer")
    rows = math.ceil(max(rows, 1 + new_ids[-1]) / _MULTIPLE) * _MULTIPLE
    return Widening(tokenizer, own, new_ids, rows)


def widen(base: BaseCheckpoint, widening: Widening, folder: Path) -> BaseCheckpoint:
    """Write the base with more tokens into a new folder, and return it.

    A new token's row is the mean of the rows of its pieces in the base's tokenizer. Special tokens, parts of a
    character and rows without a token get the mean of all tokens' rows. Files without an embedding are links.

    Raises:
        UserError: the disk refuses.
    """
    folder.mkdir()
    known = torch.tensor(sorted({n for n in widening.own.get_vocab().values() if n < base.config.vocab_size}))
    pieces = _pieces(base, widening)
    for shard in base.shards:
        if any(base.weight_map.get(name) == shard.name for name in _TABLES):
            tensors = load_file(shard)
            for name in tensors.keys() & set(_TABLES):
                tensors[name] = _widened(tensors[name], widening, known, pieces)
            save_tensors(tensors, folder / shard.name)
        else:
            (folder / shard.name).symlink_to(shard.resolve())
    for file in base.folder.iterdir():
        if file.is_file() and file.name not in _TOKENIZER_FILES | set(base.weight_map.values()):
            (folder / file.name).symlink_to(file.resolve())
    widening.tokenizer.save_pretrained(folder)
    config = copy.deepcopy(base.config)
    config.vocab_size = widening.rows
    return dataclasses.replace(base, folder=folder, config=config)


def _pieces(base: BaseCheckpoint, widening: Widening) -> dict[int, list[int]]:
    """Id of each new token that has a text -> ids of the base's tokens that make up this text."""
    tokenizer, texts = widening.tokenizer, {}
    added = tokenizer.added_tokens_decoder  # their text is stored as it is, not in the alphabet of the tokenizer
    for number in widening.new_ids:
        if number not in added:
            texts[number] = tokenizer.decode([number], clean_up_tokenization_spaces=False)
        elif not added[number].special:
            texts[number] = added[number].content
    # U+FFFD stands for bytes that are no character.
    texts = {number: text for number, text in texts.items() if text and "\ufffd" not in text}
    if not texts:
        return {}
    split = widening.own(list(texts.values()), add_special_tokens=False)["input_ids"]
    rows = base.config.vocab_size
    found = {number: [piece for piece in ids if piece < rows] for number, ids in zip(texts, split, strict=True)}
    return {number: ids for number, ids in found.items() if ids}


def _widened(
    table: torch.Tensor, widening: Widening, known: torch.Tensor, pieces: dict[int, list[int]]
) -> torch.Tensor:
    """A table of embeddings `[V, C]` with more rows; its own rows stay as they are, except for ids of new tokens."""
    # In parts, since a table in double precision takes four times its memory.
    mean = (sum(table[ids].double().sum(0) for ids in known.split(4096)) / len(known)).to(table.dtype)
    wide = mean.repeat(widening.rows, 1)
    wide[: len(table)] = table
    for number in widening.new_ids:
        ids = pieces.get(number)
        wide[number] = mean if ids is None else table[ids].double().mean(0).to(table.dtype)
    return wide
