"""Checks of a training job's tokenizer and text, for `moh_llm.training.preflight`.

Only the beginning of each source is tokenised, so that this takes seconds.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from moh_llm.data.locate import locate
from moh_llm.data.mixture import EMBEDDED, Mixture, Source, load_mixture
from moh_llm.data.sample import estimate_tokens
from moh_llm.data.shards import TokenizedSource, cache_folder, open_tokens
from moh_llm.data.stream import SequenceStream, make_receipt
from moh_llm.data.tokenizer import TextTokenizer, tokens_without_rows
from moh_llm.errors import UserError
from moh_llm.training.config import TrainConfig
from moh_llm.training.networks import embedding_rows, load_tokenizer

# Error of an estimated number of tokens: within it of a bound, the finding is a warning.
_DOUBT = 0.1
# Up to this many epochs repeated text is worth about as much as new text (Muennighoff et al., NeurIPS 2023).
_EPOCHS = 4


class Finding(NamedTuple):
    """Result of a check, in one line. A fault stops the job or makes it useless; a warning may be intended."""

    state: Literal["ok", "warning", "fault"]
    check: str
    text: str


def check_data(config: TrainConfig) -> Iterator[Finding]:
    """Whether tokenizer and text can be read, and how many epochs of each source the job takes."""
    name = config.data.mixture
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
        if Path(name).is_dir() and name != EMBEDDED.name:
            yield from _check_tokens(config, open_tokens(Path(name), tokenizer=tokenizer))
        else:
            yield from _check_mixture(config, load_mixture(name), tokenizer)
    except UserError as error:
        yield Finding("fault", "data", str(error))


def _check_tokens(config: TrainConfig, sources: list[TokenizedSource]) -> Iterator[Finding]:
    """Check token shards, by exact counts. Raises UserError for a source that is shorter than a sequence."""
    length, sequences = config.data.sequence_length, config.max_steps * config.data.batch_size
    stream = SequenceStream(sources, length, config.seed)
    for source, (name, entry) in zip(sources, make_receipt(stream, sequences).items(), strict=True):
        text = f"{name}: {entry['tokens']:,} tokens to be read of {len(source.train):,}"
        yield _judged(text, entry["epochs"], source.max_epochs)
    if all(len(source.validation) < length for source in sources):
        yield Finding("fault", "data", f"no source holds out one sequence of {length} tokens; give more text")
    stream.check_epochs(sequences)


def _check_mixture(config: TrainConfig, mixture: Mixture, tokenizer: TextTokenizer) -> Iterator[Finding]:
    """Check a mixture by the token counts of its cached shards, or else by an estimate from its beginning."""
    refusal, sources = None, []
    try:
        folder = cache_folder(mixture, tokenizer)
        with contextlib.suppress(UserError):  # not tokenised yet
            sources = open_tokens(folder, mixture, tokenizer)
    except UserError as error:
        refusal = str(error)
        yield Finding("fault", "data", refusal)
    if sources:
        yield from _check_tokens(config, sources)
        return
    for source in mixture.sources:
        if not source.files and source.builtin is None:
            continue  # it is read over the network, which training refuses, too
        try:
            yield _check_source(config, source, mixture.validation_share, tokenizer)
        except UserError as error:
            if str(error) != refusal:
                yield Finding("fault", "data", str(error))


def _check_source(config: TrainConfig, source: Source, held_out: float, tokenizer: TextTokenizer) -> Finding:
    """Check the text of one source. Raises UserError where it cannot be read."""
    tokens = estimate_tokens(source, locate(source), tokenizer)
    if tokens is None:
        return Finding("warning", "data", f"{source.name}: its number of tokens is unknown until it is tokenised")
    has = round(tokens * (1 - held_out))
    wanted = config.max_steps * config.tokens_per_step * source.weight
    text = f"{source.name}: {wanted:,.0f} tokens to be read of about {has:,}"
    if has < config.data.sequence_length:
        text += ", which is less than a sequence; add text or lower data.sequence_length"
        return Finding("fault", "data", text)
    excess = wanted / has / source.max_epochs if source.max_epochs is not None else 0.0
    if excess > 1 - _DOUBT:
        state: Literal["warning", "fault"] = "fault" if excess > 1 + _DOUBT else "warning"
        remedy = "train for fewer tokens, lower its weight or add text to it"
        text += f", {wanted / has:.2f} epochs, and max_epochs={source.max_epochs:g}"
        return Finding(state, "data", f"{text}; {remedy}")
    return _judged(text, wanted / has, source.max_epochs)


def _judged(text: str, epochs: float, allowed: float | None) -> Finding:
    """The finding of a source that is within its ``max_epochs``."""
    text += f", {epochs:.2f} epochs"
    if allowed is None and epochs > _EPOCHS:
        return Finding("warning", "data", f"{text}: so many repetitions help little; add text or train for less")
    return Finding("ok", "data", text)
