"""Hashes that identify a model, and whether the records in its folder describe it.

`identify` hashes everything that decides what a model answers: runs and stored scores belong to it. `hash_model` hashes
the tensors, however they are laid out in files, and the head plan: records of figures and lineages belong to these.

A folder may change after its records were written: a file is damaged or edited, another program saves the weights, or a
record comes from another folder. `read_records` then says so, and gives no figures.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moh_llm.files import once_per_file, sha256
from moh_llm.modeling import MoHLlamaConfig
from moh_llm.records.conversion import (
    CONVERSION,
    LINEAGE,
    Chain,
    Conversion,
    ConversionEntry,
    read_chain,
    read_conversion,
)
from moh_llm.records.model import CONFIG, TOKENIZERS, making_model, read_config, read_weight_map
from moh_llm.records.seal import WeightHashes, describe_changes, find_changes, read_seal
from moh_llm.records.tensors import is_routing_weight

# What besides the weights decides what a model answers.
_SETTINGS = (CONFIG, "generation_config.json", *TOKENIZERS, "special_tokens_map.json", "added_tokens.json")
_SETTINGS += ("preprocessor_config.json",)
# Fields of a MoH config that decide what a layer computes from given weights.
_PLAN = (
    # The same plan may be written as one number, or as one for each layer.
    *("shared_heads_per_layer", "active_heads_per_layer", "never_on_heads_per_layer"),
    *("router_type", "router_score", "routing_granularity"),
    *("head_fallback", "local_window", "local_sinks", "local_start", "query_key_norm", "num_experts_per_tok"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "num_hidden_layers"),
    *("hidden_act", "rms_norm_eps", "rope_parameters"),
)
_CHUNK = 1 << 22  # bytes read at once, by each thread
_THREADS = 8  # that hash a file


@dataclass(frozen=True)
class Identity:
    """Hashes that identify a model.

    Attributes:
        sha256: hash of weights, config and tokenizer; for a model on the Hub, of its id and commit.
        weights: hash of dense and routing `WeightHashes`; None for a model on the Hub.
        revision: commit of a model on the Hub; None for a folder.
        plan: `WeightHashes.plan`; None for a dense model and on the Hub.
    """

    sha256: str
    weights: str | None
    revision: str | None
    plan: str | None = None


def identify(model: str) -> Identity:
    """Hash a model's folder, about a second per GB, or look up the commit of a model on the Hub.

    Raises:
        UserError: the folder's weights cannot be read.
    """
    folder = Path(model)
    if not folder.is_dir():
        from transformers import AutoConfig

        commit = getattr(AutoConfig.from_pretrained(model, trust_remote_code=False), "_commit_hash", None)
        return Identity(_digest([f"{model} {commit}"]), None, commit)
    hashes = hash_model(folder)
    weights = _digest([hashes.dense, hashes.routing])
    settings = [f"{sha256(folder / name)} {name}" for name in _SETTINGS if (folder / name).is_file()]
    return Identity(_digest([weights, *settings]), weights, None, hashes.plan)


def hash_model(folder: Path) -> WeightHashes:
    """Hash the tensors and the head plan of a model's folder, about a second per GB.

    A folder whose files are as they were sealed has the hashes of its seal.

    Raises:
        UserError: a file is missing or damaged, or the config makes no model.
    """
    seal = read_seal(folder)
    if seal is not None and not find_changes(folder, seal):
        return seal.model
    return hash_weights(folder).model_copy(update={"plan": hash_plan(folder)})


def hash_plan(folder: Path) -> str | None:
    """SHA-256 over the fields of a MoH model's config that decide what its layers compute; None for another model.

    Raises:
        UserError: the config cannot be read or makes no model.
    """
    fields = read_config(folder)
    if fields.pop("model_type", None) != MoHLlamaConfig.model_type:
        return None
    with making_model(folder):
        config = MoHLlamaConfig(**fields)
    return _digest([json.dumps({name: getattr(config, name) for name in _PLAN}, sort_keys=True)])


def hash_weights(folder: Path, weight_map: Mapping[str, str] | None = None) -> WeightHashes:
    """Hash all weights of a model's folder, about a second per GB; ``weight_map`` replaces the folder's own index.

    Raises:
        UserError: a file is missing or damaged.
    """
    if weight_map is None:
        weight_map = read_weight_map(folder)[1]
    lines: dict[bool, list[str]] = {True: [], False: []}
    for shard in sorted(set(weight_map.values())):
        for name, line in _describe_tensors(folder / shard):
            if weight_map.get(name) == shard:
                lines[is_routing_weight(name)].append(line)
    dense, routing = (hashlib.sha256("".join(sorted(lines[of])).encode()).hexdigest() for of in (False, True))
    return WeightHashes(dense=dense, routing=routing)


@once_per_file
def _describe_tensors(shard: Path) -> tuple[tuple[str, str], ...]:
    """Name of each tensor of a safetensors file, and a line that tells it from any other."""
    with shard.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)

    def describe(entry: tuple[str, dict[str, Any]]) -> tuple[str, str]:
        name, about = entry
        first, last = about["data_offsets"]
        digest, left = hashlib.sha256(), last - first
        with shard.open("rb", buffering=0) as file:
            file.seek(8 + length + first)
            while left and (chunk := file.read(min(left, _CHUNK))):
                digest.update(chunk)
                left -= len(chunk)
        return name, f"{name} {about['dtype']} {about['shape']} {digest.hexdigest()}\n"

    # hashlib computes beside other threads.
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as threads:
        return tuple(threads.map(describe, header.items()))


def _digest(lines: list[str]) -> str:
    return hashlib.sha256("".join(f"{line}\n" for line in lines).encode()).hexdigest()


# ---- records of a folder


@dataclass(frozen=True)
class FolderRecords:
    """The records of a model's folder, as far as they describe the model in it.

    Attributes:
        model: hashes of that model.
        conversion: its conversion; without figures where `changed`, and None where it may name a wrong base.
        chain: its lineage.
        changed: why the records do not describe this model; None where they do.
    """

    model: WeightHashes
    conversion: Conversion | None
    chain: Chain
    changed: str | None = None

    def lines(self, name: str) -> list[str]:
        """Lines for the user; ``name`` is what the model is called."""
        if self.changed is None:
            return []
        return [f"warning: {name}: {self.changed}; of its records only the base's name is used"]


def read_records(folder: Path) -> FolderRecords:
    """Hash a model's folder, and read its records.

    Raises:
        UserError: weights or config cannot be read, or a record that nobody changed is malformed.
    """
    seal = read_seal(folder)
    changes = find_changes(folder, seal) if seal else {}
    conversion = None if CONVERSION in changes else read_conversion(folder)
    chain = Chain(entries=[]) if LINEAGE in changes else read_chain(folder)
    model = hash_model(folder)
    why = [describe_changes(changes)] if changes else []
    why += [mismatch] if (mismatch := _find_mismatch(model, conversion, chain)) else []
    changed = ", and ".join(why) or None
    if conversion and changed:
        conversion = Conversion(base=conversion.base, vocabulary=conversion.vocabulary, set_aside=changed)
    return FolderRecords(model, conversion, chain, changed)


def _find_mismatch(model: WeightHashes, conversion: Conversion | None, chain: Chain) -> str | None:
    """Why conversion or lineage do not describe the model with these hashes; None where they do."""
    last = chain.entries[-1].made if chain.entries else conversion and conversion.made
    if last and model.plan is None:  # the dense model inside, which goes by the lineage of the MoH one
        last = WeightHashes(dense=last.dense, routing=model.routing)
    if last and (part := last.difference(model)):
        return f"it has {part} other than {LINEAGE if chain.entries else CONVERSION} says"
    conversions = [entry for entry in chain.entries if isinstance(entry, ConversionEntry)]
    if conversion and conversion.made and conversions and (part := conversions[-1].made.difference(conversion.made)):
        return f"{CONVERSION} is of a model with {part} other than that of {LINEAGE}"
    return None
