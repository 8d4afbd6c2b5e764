"""What a training job reads and where it writes: whether all of that is as the job needs it.

No weights are read and no more text is tokenised than the beginning of a source, so that these
checks take seconds where opening the job for real would take minutes.
"""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from moh_llm.data.estimate import estimate_source
from moh_llm.data.mixture import EMBEDDED, Mixture, Source, load_mixture
from moh_llm.data.receipt import make_receipt
from moh_llm.data.shards import TokenizedSource
from moh_llm.data.stream import BlockStream
from moh_llm.data.tasks import make_tasks
from moh_llm.data.tokenizer import TextTokenizer
from moh_llm.data.tokens import cache_folder, open_tokens
from moh_llm.errors import UserError
from moh_llm.model_folder import read_weight_map
from moh_llm.modeling import MoHLlamaConfig, MoHLlamaForCausalLM
from moh_llm.reading import read_json
from moh_llm.records.conversion import read_conversion
from moh_llm.training.beginning import expected_reference
from moh_llm.training.config import TrainConfig, changed_keys
from moh_llm.training.memory import has_teacher
from moh_llm.training.networks import check_attention, load_tokenizer
from moh_llm.training.runs import check_converted

# An estimated number of tokens is off by some percent: this far from a bound it is only a warning.
_DOUBT = 0.1
# Text that is read up to so often teaches about as much as new text (Muennighoff et al., NeurIPS 2023).
_EPOCHS = 4


class Finding(NamedTuple):
    """What a check found, in one line. A fault stops the job or spoils it; a warning may be meant."""

    state: Literal["ok", "warning", "fault"]
    check: str
    text: str


def check_output(config: TrainConfig) -> Iterator[Finding]:
    """What the same `moh-llm train` command would do about the output that is there."""
    folder, anew = Path(config.output), "name another folder or train with --overwrite"
    path = folder / "run.json"
    if folder.exists() and not folder.is_dir():
        yield Finding("fault", "output", f"output={folder} is a file; name a folder")
        return
    if not path.exists():
        if folder.exists() and any(folder.iterdir()):
            yield Finding("fault", "output", f"{folder} is not empty and holds no run.json to resume; {anew}")
        else:
            yield Finding("ok", "output", f"{folder} is new")
        return
    try:
        record = read_json(path)
        changed = changed_keys(record["config"], json.loads(json.dumps(asdict(config))))
        finished = record["status"] == "finished"
    except (UserError, KeyError, TypeError, AttributeError):
        yield Finding("fault", "output", f"{path} is not the record of a training run; name another folder")
        return
    checkpoints = sorted(found.name for found in (folder / "checkpoints").glob("step-*"))
    if changed:
        text = f"{folder} holds a run with another recipe; different: {', '.join(changed)}; {anew}"
        yield Finding("fault", "output", text)
    elif finished:
        yield Finding("warning", "output", f"{folder} holds this run, finished; there would be nothing to do")
    else:
        where = f"after {checkpoints[-1]}" if checkpoints else "from its start, as it has no checkpoint"
        yield Finding("ok", "output", f"{folder} holds this run; it would go on {where}")


def read_model_config(config: TrainConfig) -> MoHLlamaConfig:
    """The config of ``config.model``.

    Raises:
        UserError: it is no converted model, or none that can teach itself where that is the objective.
    """
    folder = Path(config.model)
    check_converted(folder)
    try:
        model = MoHLlamaConfig.from_pretrained(folder)
    except (ValueError, TypeError) as error:
        raise UserError(f"{folder / 'config.json'} cannot be used: {' '.join(str(error).split())}") from error
    if has_teacher(config) and set(model.active_heads_per_layer) == {model.num_attention_heads}:
        raise UserError(
            f"model={folder} has every head on: distillation has no head to make up for; "
            "set objective.kind to cross_entropy"
        )
    if has_teacher(config) and model.router_score != "quantized":
        raise UserError(
            f"model={folder} has router_score={model.router_score}: with all heads on it is not its dense form, so "
            "there is no teacher; convert with quantised scores or set objective.kind cross_entropy"
        )
    check_attention(config)
    return model


def check_model(config: TrainConfig, model: MoHLlamaConfig) -> Iterator[Finding]:
    """Whether every file of the weights is there, as long as its header says, and every weight in one of them."""
    folder = Path(config.model)
    try:
        files, held = read_weight_map(folder)
    except UserError as error:
        yield Finding("fault", "model", str(error))
        return
    with torch.device("meta"):
        names = {name for name, _ in MoHLlamaForCausalLM(model).named_parameters()}  # tied ones once
    if missing := sorted(names - held.keys()):
        text = f"{folder} lacks {len(missing)} weights, {missing[0]} among them; convert the model again"
        yield Finding("fault", "model", text)
        return
    size = sum(file.stat().st_size for file in files)
    yield Finding("ok", "model", f"{folder}: {len(held)} tensors in {len(files)} files, {size / 2**30:.2f} GiB")


def check_teacher(config: TrainConfig) -> Iterator[Finding]:
    """Whether the run would be against its base."""
    try:
        reference = expected_reference(config)
        named = read_conversion(Path(config.model)) is not None
    except UserError as error:
        yield Finding("fault", "teacher", str(error))
        return
    if reference is not None:
        by_lineage = reference.kind == "base" and reference.own
        text = "the base, by the model's lineage; training compares hashes" if by_lineage else reference.described
        yield Finding("warning" if named and reference.kind == "start" else "ok", "teacher", text)


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
    """Of shards, whose numbers are exact. Raises UserError for a source that is shorter than a block."""
    length, blocks = config.data.block_length, config.max_steps * config.data.batch_size
    stream = BlockStream(sources, length, config.seed)
    for source, (name, entry) in zip(sources, make_receipt(stream, blocks).items(), strict=True):
        text = f"{name}: {entry['tokens']:,} tokens to be read of {len(source.train):,}"
        yield _judged(text, entry["epochs"], source.max_epochs)
    if all(len(source.validation) < length for source in sources):
        yield Finding("fault", "data", f"no source has held-out text for one block of {length} tokens; give more text")
    stream.check_epochs(blocks)


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
    estimate = estimate_source(make_tasks(Mixture("", (source,)), Path()), tokenizer)
    if estimate.tokens is None:
        return Finding(
            "warning", "data", f"{source.name}: how much text there is cannot be told before it is tokenised"
        )
    has = round(estimate.tokens * (1 - held_out))
    wanted = config.max_steps * config.tokens_per_step * source.weight
    text = f"{source.name}: {wanted:,.0f} tokens to be read of about {has:,}"
    if has < config.data.block_length:
        return Finding("fault", "data", f"{text}, which is less than a block; add text or lower data.block_length")
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
