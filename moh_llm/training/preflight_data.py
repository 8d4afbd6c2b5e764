"""Checks of a training job's tokenizer and text, for `moh_llm.training.preflight`."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from moh_llm.data.mixture import EMBEDDED, load_mixture
from moh_llm.data.shards import TokenizedSource, cache_folder, open_tokens
from moh_llm.data.stream import SequenceStream, make_receipt
from moh_llm.data.tokenizer import TextTokenizer, tokens_without_rows
from moh_llm.errors import UserError
from moh_llm.training.config import TrainConfig
from moh_llm.training.networks import embedding_rows, load_tokenizer

# Up to this many epochs repeated text is worth about as much as new text (Muennighoff et al., NeurIPS 2023).
_EPOCHS = 4


class Finding(NamedTuple):
    """Result of a check, in one line. A fault stops the job or makes it useless; a warning may be intended."""

    state: Literal["ok", "warning", "fault"]
    check: str
    text: str


def check_data(config: TrainConfig) -> Iterator[Finding]:
    """Whether tokenizer and text can be read, and how many epochs of each source the job takes."""
    try:
        rows = embedding_rows(Path(config.model))
        tokenizer = TextTokenizer.from_tokenizer(load_tokenizer(Path(config.model)), rows)
    except UserError as error:
        yield Finding("fault", "tokenizer", str(error))
        return
    yield Finding("ok", "tokenizer", f"{tokenizer.vocab_size:,} tokens, {tokenizer.sha256[:12]}")
    if tokenizer.rows is not None:
        without = tokens_without_rows(tokenizer.backend, tokenizer.rows)
        more = f" and {len(without) - 1:,} more tokens" if len(without) > 1 else ""
        text = f"the embedding has no row for the token {without[0][:40]!r}{more}; text that holds one stops the run"
        yield Finding("warning", "tokenizer", text)
    try:
        sources = _open_sources(config.data.mixture, tokenizer)
        if sources is None:
            text = f"{config.data.mixture} will be tokenized first; moh-llm mixture show estimates its tokens"
            yield Finding("ok", "data", text)
        else:
            yield from _check_sources(config, sources)
    except UserError as error:
        yield Finding("fault", "data", str(error))


def _open_sources(name: str, tokenizer: TextTokenizer) -> list[TokenizedSource] | None:
    """The tokens of a folder or of a mixture; None where the mixture is not in the cache yet."""
    if Path(name).is_dir() and name != EMBEDDED.name:
        return open_tokens(Path(name), tokenizer=tokenizer)
    mixture = load_mixture(name)
    folder = cache_folder(mixture, tokenizer)
    with contextlib.suppress(UserError):
        return open_tokens(folder, mixture, tokenizer)
    return None


def _check_sources(config: TrainConfig, sources: list[TokenizedSource]) -> Iterator[Finding]:
    """Count the epochs of each source. Raises UserError where a source is too short or would be read too often."""
    length, sequences = config.data.sequence_length, config.max_steps * config.data.batch_size
    stream = SequenceStream(sources, length, config.seed)
    for source, (name, entry) in zip(sources, make_receipt(stream, sequences).items(), strict=True):
        text = f"{name}: {entry['tokens']:,} tokens to be read of {len(source.train):,}, {entry['epochs']:.2f} epochs"
        if source.max_epochs is None and entry["epochs"] > _EPOCHS:
            text += ": so many repetitions help little; add text or train for less"
            yield Finding("warning", "data", text)
        else:
            yield Finding("ok", "data", text)
    if all(len(source.validation) < length for source in sources):
        yield Finding("fault", "data", f"no source holds out one sequence of {length} tokens; give more text")
    stream.check_epochs(sequences)
