"""Whether a job's tokenizer and text are as it needs them: checks of `moh_llm.training.preflight`.

No more text is tokenised than the beginning of a source, so that this takes seconds.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from moh_llm.data.locate import locate
from moh_llm.data.mixture import EMBEDDED, Mixture, Source, load_mixture
from moh_llm.data.sample import estimate_source
from moh_llm.data.shards import TokenizedSource, cache_folder, open_tokens
from moh_llm.data.stream import SequenceStream, make_receipt
from moh_llm.data.tokenizer import TextTokenizer
from moh_llm.errors import UserError
from moh_llm.training.config import TrainConfig
from moh_llm.training.networks import load_tokenizer

# An estimated number of tokens is off by some percent: this far from a bound it is only a warning.
_DOUBT = 0.1
# Text that is read up to so often teaches about as much as new text (Muennighoff et al., NeurIPS 2023).
_EPOCHS = 4


class Finding(NamedTuple):
    """What a check found, in one line. A fault stops the job or spoils it; a warning may be meant."""

    state: Literal["ok", "warning", "fault"]
    check: str
    text: str


def check_data(config: TrainConfig) -> Iterator[Finding]:
    """Whether tokenizer and text are there, and how often the job would go through each source."""
    name = config.data.mixture
    try:
        tokenizer = TextTokenizer.of(load_tokenizer(Path(config.model)))
    except UserError as error:
        yield Finding("fault", "tokenizer", str(error))
        return
    yield Finding("ok", "tokenizer", f"{tokenizer.vocab_size:,} tokens, {tokenizer.sha256[:12]}")
    try:
        if Path(name).is_dir() and name != EMBEDDED.name:
            yield from _check_tokens(config, open_tokens(Path(name), tokenizer=tokenizer))
        else:
            yield from _check_mixture(config, load_mixture(name), tokenizer)
    except UserError as error:
        yield Finding("fault", "data", str(error))


def _check_tokens(config: TrainConfig, sources: list[TokenizedSource]) -> Iterator[Finding]:
    """Of shards, whose numbers are exact. Raises UserError for a source that is shorter than a sequence."""
    length, sequences = config.data.sequence_length, config.max_steps * config.data.batch_size
    stream = SequenceStream(sources, length, config.seed)
    for source, (name, entry) in zip(sources, make_receipt(stream, sequences).items(), strict=True):
        text = f"{name}: {entry['tokens']:,} tokens to be read of {len(source.train):,}"
        yield _judged(text, entry["epochs"], source.max_epochs)
    if all(len(source.validation) < length for source in sources):
        yield Finding("fault", "data", f"no source holds out one sequence of {length} tokens; give more text")
    stream.check_epochs(sequences)


def _check_mixture(config: TrainConfig, mixture: Mixture, tokenizer: TextTokenizer) -> Iterator[Finding]:
    """Of a mixture's text: from its shards if they are in the cache, else estimated from its beginning."""
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
            continue  # over the network, which training refuses, too
        try:
            yield _check_source(config, source, mixture.validation_share, tokenizer)
        except UserError as error:
            if str(error) != refusal:
                yield Finding("fault", "data", str(error))


def _check_source(config: TrainConfig, source: Source, held_out: float, tokenizer: TextTokenizer) -> Finding:
    """Of one source's text. Raises UserError where it cannot be read."""
    estimate = estimate_source(source, locate(source), tokenizer)
    if estimate.tokens is None:
        return Finding("warning", "data", f"{source.name}: its number of tokens is not known before it is tokenised")
    has = round(estimate.tokens * (1 - held_out))
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
    """A finding about a source that is not read more often than its ``max_epochs`` allows, if it has any."""
    text += f", {epochs:.2f} epochs"
    if allowed is None and epochs > _EPOCHS:
        return Finding("warning", "data", f"{text}: repeated so often, text teaches little; add some or train for less")
    return Finding("ok", "data", text)
