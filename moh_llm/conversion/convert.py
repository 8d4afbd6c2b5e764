"""From a base to a converted folder: plan, calibrate, write, verify."""

import dataclasses
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import transformers

import moh_llm
from moh_llm.conversion.base import BaseCheckpoint, open_base
from moh_llm.conversion.calibrate import calibrate
from moh_llm.conversion.checkpoint import plan_widening, widen, write_description, write_weights
from moh_llm.conversion.config import ConversionConfig
from moh_llm.conversion.layers import LayerwiseModel
from moh_llm.conversion.plan import plan_layers, routing_tensors, shared_and_active
from moh_llm.conversion.verify import retrieval_prompt, verify
from moh_llm.data.mixture import EMBEDDED, mixture_from_arguments
from moh_llm.data.sample import sample_mixture
from moh_llm.data.shards import TokenizedSource
from moh_llm.data.tokenizer import open_tokenizer
from moh_llm.data.windows import fixed_batches, held_out_tokens, validation_batches, window_counts
from moh_llm.devices import choose_device, compute_dtype, name_device
from moh_llm.errors import UserError
from moh_llm.files import check_output_folder, new_folder
from moh_llm.flops import keys_read
from moh_llm.locking import lock_folder
from moh_llm.metrics import Batch
from moh_llm.records.conversion import (
    CONVERSION,
    LINEAGE,
    Base,
    Calibration,
    Chain,
    Conversion,
    ConversionEntry,
    Parameters,
    Plan,
    Vocabulary,
    last_component,
)
from moh_llm.records.identity import FolderRecords, hash_model, read_records
from moh_llm.records.model import read_config
from moh_llm.records.seal import write_seal
from moh_llm.records.tensors import HEAD, cast_weight, is_fallback_weight, read_headers
from moh_llm.terminal import say_aside

_BATCH_TOKENS = 2048
LONG_CONTEXT = 2048  # tokens from which on calibration prefers documents of this length, and retrieval is scored


def convert(options: ConversionConfig) -> Conversion:
    """Convert a checkpoint, verify it, and return the record of `conversion.json`.

    Raises:
        UserError: bad input, as early as possible; the output folder is then unchanged.
    """
    started = time.perf_counter()
    verifies = options.heldout_tokens != 0
    reads_text = options.needs_calibration or verifies
    mixture = EMBEDDED if options.calibration is None else mixture_from_arguments(options.calibration)
    texts = [file for source in mixture.sources for file in source.files] if reads_text else []
    read = [options.base, *texts, *([options.tokenizer] if options.tokenizer else [])]
    check_output_folder(options.output_dir, options.overwrite, reads=read)
    base = open_base(options.base, paper_preset=options.preset == "paper")
    records = read_base_records(base)
    length = min(options.context, base.config.max_position_embeddings)
    if length < options.context != ConversionConfig.context:
        say_aside(f"--context {options.context} is above the {length} positions of {options.base}: {length} are used")
    plan = dataclasses.replace(options, context=length)
    shared_and_active(plan, base.config)  # impossible counts fail before anything runs
    wanted = options.heldout_tokens or held_out_tokens(length)  # for 0, too: the fit stays the same
    widening = None if options.tokenizer is None else plan_widening(base, options.tokenizer)
    sources: list[TokenizedSource] = []
    if reads_text:
        tokenizer = widening.tokenizer if widening else open_tokenizer(base.folder, base.config.vocab_size)
        only_text = mixture is not EMBEDDED and all(source.type == "text" for source in mixture.sources)
        if only_text and plan.needs_calibration and tokenizer.chat_template:
            say_aside("the base has a chat template: for chats add conversations to --calibration (docs/conversion.md)")
        long = length if length >= LONG_CONTEXT else None
        rows = widening.rows if widening else base.config.vocab_size
        sources = sample_mixture(mixture, tokenizer, options.calibration_tokens, wanted, long, length, rows)
    held_out: list[Batch] = []
    if verifies:
        held_out = validation_batches(sources, length, wanted, _rows(length))

    with lock_folder(options.output_dir), new_folder(options.output_dir, options.overwrite) as folder:
        identity = base.identity()
        chain = records.chain  # a base that is a tuned model has a lineage, which goes on
        if widening is not None:
            base = widen(base, widening, folder / ".widened")  # from here on this is the base
        asked = None if options.dtype is None else getattr(torch, options.dtype)
        dtype, device = asked or base.dtype, choose_device()
        computed = compute_dtype(device, options.compute_dtype)
        record = begin_record(identity, device, computed)
        dense = LayerwiseModel(base.folder, base.weight_map, base.config, computed, device, asked)
        calibrated = None
        if plan.needs_calibration:
            batches = calibration_batches(sources, length, options.calibration_tokens)
            calibrated = calibrate(dense, batches, plan, folder)
            record.calibration = calibration_record(sources, length, options.calibration_tokens)
        config, fits = plan_layers(plan, base.config, calibrated)
        config.dtype = dtype
        routing = {name: cast_weight(tensor, dtype, name) for name, tensor in routing_tensors(fits).items()}
        record.plan = Plan(preset=plan.preset, context=length, keys_read=round(keys_read(config, length), 4))
        weight_map = write_weights(folder, base, routing, asked)
        record.parameters = count_parameters(base, routing)
        if verifies:
            converted = LayerwiseModel(folder, weight_map, config, computed, device)
            seen = plan.window + plan.local_sinks if plan.head_fallback == "local" else 0
            prompt = retrieval_prompt(held_out, tokenizer, seen) if length >= LONG_CONTEXT else None
            record.verification = verify(dense, converted, held_out, prompt=prompt)
        write_description(folder, base, config, weight_map)
        if widening is not None:
            name, count = last_component(options.tokenizer), len(widening.new_ids)
            record.vocabulary = Vocabulary(tokenizer=name, new_tokens=count, dense_sha256=hash_model(folder).dense)
            shutil.rmtree(base.folder)
        finish_record(folder, record, chain, started)
    return record


def begin_record(base: Base, device: torch.device, computed: torch.dtype) -> Conversion:
    """The record of a conversion that is run on this device, in this dtype."""
    return Conversion(
        moh_llm=moh_llm.__version__,
        versions={"torch": torch.__version__, "transformers": transformers.__version__},
        base=base,
        device=name_device(device),
        compute_dtype=str(computed).removeprefix("torch."),
    )


def finish_record(folder: Path, record: Conversion, chain: Chain, started: float) -> None:
    """Complete the record of a converted model whose files are written, write it and the lineage, and seal the folder.

    `chain` is the base's lineage, and `started` what `time.perf_counter` gave at the start.
    """
    base, record.made = record.base, hash_model(folder)
    entry = ConversionEntry(kind="conversion", base=base.label, dense_sha256=base.dense_sha256, made=record.made)
    if record.vocabulary is not None:
        entry.new_tokens = record.vocabulary.new_tokens
    record.seconds = round(time.perf_counter() - started, 1)
    record.write(folder / CONVERSION)
    chain.with_entry(entry).write(folder / LINEAGE)
    write_seal(folder, record.made)


def count_parameters(base: BaseCheckpoint, routing: Mapping[str, torch.Tensor]) -> Parameters:
    """The numbers of weights of a base, and of the tensors that are added to it."""
    counted = dict(base.weight_map)
    if getattr(base.config, "tie_word_embeddings", False):  # some files hold the embedding under this name, too
        counted.pop(HEAD, None)
    dense = sum(math.prod(shape) for _, _, shape in read_headers(base.folder, counted))
    fallbacks = sum(tensor.numel() for name, tensor in routing.items() if is_fallback_weight(name))
    routers = sum(tensor.numel() for tensor in routing.values()) - fallbacks
    return Parameters(dense=dense, routers=routers, fallbacks=fallbacks)


def calibration_record(sources: Sequence[TokenizedSource], length: int, tokens: int) -> Calibration:
    """How much calibration read of each source, in windows of `length` tokens and about `tokens` in all."""
    streams, shares = [source.train for source in sources], [source.weight for source in sources]
    windows = window_counts(streams, shares, length, tokens)
    read = {source.name: count * length for source, count in zip(sources, windows, strict=True)}
    return Calibration(tokens=sum(read.values()), tokens_of_source=read)


def restore_dense(base: BaseCheckpoint, output: Path, overwrite: bool = False) -> None:
    """Write the dense checkpoint inside a MoH one: the bytes of its dense tensors, without routers and fallbacks.

    Tensors that the base's architecture does not have were left out in the conversion, and are not restored.

    Raises:
        UserError: not a MoH model; bad input or output as in `convert`.
    """
    check_output_folder(output, overwrite, reads=[base.folder])
    records = read_base_records(base)
    config, name = base.config, base.name
    if not base.is_moh:
        raise UserError(f"{name} is no MoH model (model_type {config.model_type!r}): it is dense already")
    if (score := read_config(base.folder).get("router_score", "quantized")) != "quantized":
        raise UserError(f"{name} weighs heads by their scores (router_score {score}): there is no dense model inside")
    with lock_folder(output), new_folder(output, overwrite) as folder:
        config.architectures = config.architectures or [
            transformers.AutoModelForCausalLM._model_mapping[type(config)].__name__
        ]
        weight_map = write_weights(folder, base, {})
        if records.chain.runs:
            records.chain.write(folder / LINEAGE)
        write_description(folder, base, config, weight_map, remote_code=False)
        write_seal(folder, hash_model(folder))


def read_base_records(base: BaseCheckpoint) -> FolderRecords:
    """Read the records in the base's folder, and print its warnings."""
    records = read_records(base.folder)
    if base.note:
        say_aside(f"warning: {base.name}: {base.note}")
    say_aside(*records.lines(base.name))
    return records


def _rows(length: int) -> int:
    """Sequences of `length` tokens in a batch."""
    return max(1, _BATCH_TOKENS // length)


def calibration_batches(sources: Sequence[TokenizedSource], length: int, tokens: int) -> list[Batch]:
    """Batches of sequences of `length` tokens, about `tokens` in all. Raises UserError if the text has no sequence."""
    streams, shares = [s.train for s in sources], [s.weight for s in sources]
    batches = fixed_batches(streams, shares, length, tokens, _rows(length))
    if not batches:
        held = ", ".join(f"{source.name} has {len(source.train)}" for source in sources)
        raise UserError(f"the calibration text has no window of {length} tokens: {held}")
    return batches
