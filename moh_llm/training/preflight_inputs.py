"""Checks of what a training job reads, its model and its text, for `moh_llm.training.preflight`."""

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from safetensors import safe_open

from moh_llm.data.mixture import EMBEDDED, load_mixture
from moh_llm.data.shards import TokenizedSource, cache_folder, open_tokens
from moh_llm.data.stream import SequenceStream, make_receipt
from moh_llm.data.tokenizer import TextTokenizer, tokens_without_rows
from moh_llm.devices import choose_device
from moh_llm.errors import UserError
from moh_llm.modeling import MoHLlamaConfig
from moh_llm.records.conversion import read_conversion
from moh_llm.records.model import read_weight_map
from moh_llm.records.tensors import check_tensors
from moh_llm.training.config import TrainConfig
from moh_llm.training.networks import embedding_rows, load_tokenizer, read_network_config
from moh_llm.training.precision import check_attention
from moh_llm.training.reference import expected_reference
from moh_llm.training.runs import check_converted
from moh_llm.training.shared_heads import check_shared_heads

# The most that one step may change a router's logit by. SmolLM2-135M's change by 0.19 at a rate of 1e-3, and training
# recovers the base; those of Qwen2.5-Coder-0.5B change by 2.5, and it does not (docs/recovery.md).
MOST = 0.3
# Up to this many epochs repeated text is worth about as much as new text (Muennighoff et al., NeurIPS 2023).
_EPOCHS = 4


class Finding(NamedTuple):
    """Result of a check, in one line. A fault stops the job or makes it useless; a warning may be intended."""

    state: Literal["ok", "warning", "fault"]
    check: str
    text: str


# ---- the model


def read_model_config(config: TrainConfig) -> MoHLlamaConfig:
    """The config of ``config.model``.

    Raises:
        UserError: it is no converted model, has no teacher where the objective is distillation, or has all heads on
            in sequences as short as the recipe's.
    """
    folder = Path(config.model)
    check_converted(folder)
    model = read_network_config(folder)
    if config.objective.has_teacher and set(model.active_heads_per_layer) == {model.num_attention_heads}:
        raise UserError(
            f"model={folder} has every head on: there is nothing for distillation to recover; "
            "set objective.kind to cross_entropy"
        )
    if config.objective.has_teacher and model.router_score != "quantized":
        raise UserError(
            f"model={folder} has router_score={model.router_score}: with all heads on it is not its dense form, so "
            "there is no teacher; convert with quantised scores or set objective.kind cross_entropy"
        )
    length, all_on = config.data.sequence_length, model.all_heads_until
    if model.head_fallback == "local" and length <= all_on and (config.objective.has_teacher or config.freeze_base):
        raise UserError(
            f"data.sequence_length={length}: model={folder} has all heads on for a document's first {all_on} tokens: "
            f"it equals its base there, and learns nothing; set data.sequence_length above {all_on} (see "
            f"recipes/smollm2_long.yaml), or convert with --context {max(length, 512)}"
        )
    if config.schedule.anneal_steps and (model.router_type == "threshold" or any(model.never_on_heads_per_layer)):
        what = "its router sets the number of heads" if model.router_type == "threshold" else "some heads are never on"
        raise UserError(
            f"schedule.anneal_steps={config.schedule.anneal_steps}: model={folder} cannot be annealed: "
            f"{what}; set it to 0"
        )
    if config.shared_heads is not None:
        check_shared_heads(model, config.shared_heads.number)
    check_attention(config, choose_device())
    return model


def check_model(config: TrainConfig, model: MoHLlamaConfig) -> Finding:
    """Whether the weight files are complete and hold every tensor of the config."""
    folder = Path(config.model)
    files, held = read_weight_map(folder)
    tensors = check_tensors(str(folder), folder, held, model)
    size = sum(file.stat().st_size for file in files)
    text = f"{folder}: {len(held)} tensors in {len(files)} files, {size / 2**30:.2f} GiB"
    if note := tensors.note:
        return Finding("warning", "model", f"{text}; {note}")
    return Finding("ok", "model", text)


def check_router_rate(config: TrainConfig, model: MoHLlamaConfig) -> Finding | None:
    """A warning where one step may change a converted model's fitted routers by too much.

    AdamW changes each weight by about its rate, whatever the gradient, so that a logit `w x` may change by the rate
    times the sum of absolute inputs. A layer's inputs are normalised and then scaled by the norm's weights `n`; where
    normalised inputs are normal, that sum is `sqrt(2 / pi) * sum |n|`.

    Returns:
        None where no router that reads the inputs is trained (threshold routers are not), or the model was not
        converted.
    """
    folder = Path(config.model)
    if model.router_type != "linear" or read_conversion(folder) is None:
        return None
    sums = input_sums(folder)
    layer = max(sums, key=sums.__getitem__)
    rate = config.optimizer.router_learning_rate or config.optimizer.learning_rate
    step = rate * sums[layer]
    name = "learning_rate" if config.optimizer.router_learning_rate is None else "router_learning_rate"
    text = f"optimizer.{name}={rate:g} changes a router's logit by about {step:.2g} in a step in layer {layer}"
    if step <= MOST:
        return Finding("ok", "rates", text)
    fitting = MOST / sums[layer]
    digit = 10 ** math.floor(math.log10(fitting))
    lower = math.floor(fitting / digit) * digit
    return Finding(
        "warning", "rates", f"{text}, whose inputs are large; set optimizer.router_learning_rate to {lower:g} at most"
    )


def input_sums(folder: Path) -> dict[int, float]:
    """By layer, what the absolute values of its attention's inputs sum to, estimated from its norm's weights."""
    suffix, sums = ".input_layernorm.weight", {}
    for file in read_weight_map(folder)[0]:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                if name.endswith(suffix):
                    layer = int(name.removesuffix(suffix).rsplit(".", 1)[1])
                    sums[layer] = math.sqrt(2 / math.pi) * tensors.get_tensor(name).double().abs().sum().item()
    return sums


def check_teacher(config: TrainConfig) -> Finding | None:
    """Which model the run would be compared with."""
    reference = expected_reference(config)
    if reference is None:
        return None
    if reference.kind == "base" and reference.own:
        return Finding("ok", "teacher", "the base, by the model's lineage; training compares hashes")
    lost = reference.kind == "start" and read_conversion(Path(config.model)) is not None
    return Finding("warning" if lost else "ok", "teacher", reference.described)


# ---- tokenizer and text


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
