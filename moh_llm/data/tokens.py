"""Opening tokens for training: a folder that was tokenised before, or text tokenised into a cache now."""

import hashlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moh_llm.data.locate import locate
from moh_llm.data.mixture import EMBEDDED, Mixture, Source, load_mixture
from moh_llm.data.shards import Shard, TokenizedSource, TokenStream, split_tail
from moh_llm.data.tasks import RECORD, SPLITS, source_identity
from moh_llm.data.tokenizer import TextTokenizer
from moh_llm.errors import UserError
from moh_llm.locking import lock_folder
from moh_llm.reading import read_json

# More text than this is tokenised on purpose, not on the way: it takes minutes, and its place is to be chosen.
ON_THE_FLY_BYTES = 1 << 30


class Tokens(NamedTuple):
    """A mixture's name, the folder of its shards, and its sources."""

    name: str
    folder: str
    sources: list[TokenizedSource]


def tokens_for(mixture: str, tokenizer: Any, say: Callable[[str], None]) -> Tokens:
    """The tokens of what a recipe's ``data.mixture`` names.

    Args:
        mixture: a folder that ``moh-llm tokenize`` made, or a mixture file or name, whose text is
            then tokenised into the cache, if it is not there yet.
        tokenizer: the model's Hugging Face tokenizer.
        say: prints one line.

    Raises:
        UserError: the tokens are of another tokenizer, or the text cannot be read or is too much.
    """
    wanted = TextTokenizer.of(tokenizer)
    if Path(mixture).is_dir() and mixture != EMBEDDED.name:
        sources = open_tokens(Path(mixture), tokenizer=wanted)
        return Tokens(read_json(Path(mixture) / RECORD)["name"], mixture, sources)
    spec = load_mixture(mixture)
    say(spec.describe())
    folder = cache_folder(spec, wanted)
    if not _is_finished(folder):
        from moh_llm.data.tokenize import tokenize_mixture

        say(f"tokenising its text into {folder}")
        with lock_folder(folder, wait=True):
            if not _is_finished(folder):  # by another process, meanwhile
                # A killed run's leftovers are of the same text: the folder's name says so.
                tokenize_mixture(spec, wanted, folder)
    return Tokens(spec.name, str(folder), open_tokens(folder, spec, wanted))


def open_tokens(
    folder: Path, mixture: Mixture | None = None, tokenizer: TextTokenizer | None = None
) -> list[TokenizedSource]:
    """The sources of a folder that `tokenize_mixture` finished.

    Where the hash held nothing of a source out, or all of it (one long document, say), the end of
    the source is held out instead.

    Args:
        folder: the folder.
        mixture: gives weights and bounds of epochs; None: the recorded ones.
        tokenizer: which one the tokens must be of; None: any.

    Raises:
        UserError: the folder is not finished, a shard is missing or cut short, or the tokens are
            of another tokenizer.
    """
    if not (folder / RECORD).is_file():
        raise UserError(f"{folder} holds no {RECORD}; name a folder that moh-llm tokenize made, or a mixture file")
    record = read_json(folder / RECORD)
    if not isinstance(record, dict) or record.get("status") != "finished":
        raise UserError(f"{folder} is not finished; give the same moh-llm tokenize command again")
    try:
        made_by = record["tokenizer"]
        if tokenizer is not None and made_by["sha256"] != tokenizer.sha256:
            raise UserError(
                f"the tokens in {folder} were made with tokenizer {made_by['name']} ({made_by['sha256'][:12]}), "
                f"not with {tokenizer.name} ({tokenizer.sha256[:12]}); tokenise the mixture with the latter"
            )
        shares = mixture.sources if mixture else [_recorded(*item) for item in record["sources"].items()]
        return [_open_source(folder / s.name, s, record["sources"][s.name], record) for s in shares]
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{folder / RECORD} is not a record of this version (no {error}); tokenise again") from error


def cache_folder(mixture: Mixture, tokenizer: TextTokenizer) -> Path:
    """Where a mixture's tokens are cached: the same for the same text, tokenizer and settings, whatever the weights.

    ``$MOH_LLM_CACHE``, by default ``moh_llm`` in the Hugging Face cache.

    Raises:
        UserError: the text is not there, or too much to be tokenised on the way.
    """
    from huggingface_hub.constants import HF_HOME

    identity, total = {}, 0
    for source in mixture.sources:
        files = locate(source)
        if source.builtin is None and any(file.size is None or "://" in file.path for file in files):
            raise UserError(f"source {source.name} is read over the network; {_tokenize_first(mixture)}")
        total += sum(file.size or 0 for file in files)
        identity[source.name] = source_identity(source, files, tokenizer.sha256, mixture.validation_share)
    if total > ON_THE_FLY_BYTES:
        raise UserError(f"mixture {mixture.name} has {total / 2**30:.1f} GiB of text; {_tokenize_first(mixture)}")
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    root = Path(os.environ.get("MOH_LLM_CACHE") or Path(HF_HOME) / "moh_llm")
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


def _recorded(name: str, entry: dict[str, Any]) -> Source:
    return Source(name, entry["weight"], max_epochs=entry.get("max_epochs"))


def _open_source(folder: Path, source: Source, entry: dict[str, Any], record: dict[str, Any]) -> TokenizedSource:
    dtype = np.dtype(record["tokenizer"]["dtype"]).newbyteorder("<")
    streams = []
    for split in SPLITS:
        shards = [Shard(s["tokens"], folder / s["file"], dtype, s["documents"]) for s in entry["shards"][split]]
        for shard in shards:
            shard.check()
        streams.append(TokenStream.of(shards))
    train, validation = streams
    if not len(train) or not len(validation):
        train, validation = split_tail(train if len(train) else validation, record["validation_share"])
    digest = hashlib.sha256("".join(s["sha256"] for split in SPLITS for s in entry["shards"][split]).encode())
    return TokenizedSource(source.name, source.weight, train, validation, source.max_epochs, digest.hexdigest())
