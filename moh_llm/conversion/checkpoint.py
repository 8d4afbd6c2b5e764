"""Writing checkpoints: copies of the base's shards, one shard of routing tensors, an index; and restoring the base.

At most one shard's tensors are in memory, and none where shards are copied or linked.
"""

import shutil
from collections.abc import Collection
from pathlib import Path

import torch
from safetensors import safe_open
from tqdm import tqdm
from transformers import PreTrainedConfig

import moh_llm.modeling
from moh_llm.conversion.base import BaseCheckpoint, accompanying
from moh_llm.files import write_json
from moh_llm.records.conversion import CONVERSION, LINEAGE
from moh_llm.records.model import INDEX_NAME, SINGLE_NAME, save_tensors
from moh_llm.records.seal import SEAL
from moh_llm.records.tensors import cast_weight

REMOTE_CODE = (
    "configuration_moh_llama.py",
    "modeling_moh_llama.py",
    "attention_moh.py",
    "interval_attention_moh.py",
    "seen_moh.py",
    "routing_moh.py",
    "experts_moh.py",
)
# Tokenizer, generation settings and licence go along; weights in other formats, the card and records do not: those of
# the base's training and evaluations are of another model.
_REPLACED = {"config.json", CONVERSION, LINEAGE, SEAL, "README.md"}
_REPLACED |= {"run.json", "evaluation.json", "report.json", "checkpoint.json"}


def write_weights(
    folder: Path,
    base: BaseCheckpoint,
    routing: dict[str, torch.Tensor],
    dtype: torch.dtype | None = None,
) -> dict[str, str]:
    """Write the weights of a converted model, or of the dense base where there is no routing tensor.

    Args:
        folder: where to.
        base: where the dense weights come from; without `dtype` their bytes are copied, and whole files where these
            hold nothing else.
        routing: the routers' and fallbacks' tensors by name; may be empty.
        dtype: cast the weights to it, one shard at a time.

    Returns:
        The index: tensor name -> file name. `write_description` writes it, last.

    Raises:
        UserError: the disk refuses, or a weight is too large for the dtype.
    """
    count = len(base.shards) + bool(routing)
    names = [SINGLE_NAME] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    renamed = {shard.name: name for shard, name in zip(base.shards, names, strict=False)}
    with tqdm(base.shards, desc="write weights", unit="shard", leave=False) as bar:
        for shard in bar:
            target = folder / renamed[shard.name]
            kept = {name for name, file in base.weight_map.items() if file == shard.name}
            with safe_open(shard, framework="np") as file:
                mixed = kept != set(file.keys())
            if mixed or dtype is not None:
                _rewrite_shard(shard, target, kept, dtype)
            else:
                shutil.copyfile(shard, target)
    weight_map = {tensor: renamed[file] for tensor, file in base.weight_map.items()}
    if routing:
        save_tensors(routing, folder / names[-1])
        weight_map |= dict.fromkeys(routing, names[-1])
    return weight_map


def write_description(
    folder: Path, base: BaseCheckpoint, config: PreTrainedConfig, weight_map: dict[str, str], remote_code: bool = True
) -> None:
    """Write all that is not a weight: config, tokenizer, remote code, and last the index of the shards."""
    config.save_pretrained(folder)
    if remote_code:
        for name in REMOTE_CODE:
            shutil.copyfile(Path(moh_llm.modeling.__file__).with_name(name), folder / name)
    for file in accompanying(base.folder):
        if file.name not in _REPLACED:
            target = folder / file.relative_to(base.folder)
            target.parent.mkdir(exist_ok=True)  # of the chat templates beside the default one
            shutil.copyfile(file, target)
    files = sorted(set(weight_map.values()))
    if files != [SINGLE_NAME]:
        total = sum(_tensor_bytes(folder / name) for name in files)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(folder / INDEX_NAME, index)


def _rewrite_shard(source: Path, target: Path, kept: Collection[str], dtype: torch.dtype | None) -> None:
    with safe_open(source, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys() if name in kept}  # noqa: SIM118 (not a dict)
    if dtype is not None:
        tensors = {name: cast_weight(t, dtype, f"{source}: {name}") for name, t in tensors.items()}
    save_tensors(tensors, target)


def _tensor_bytes(shard: Path) -> int:
    """Bytes of tensor data in a safetensors file: all but its length-prefixed JSON header."""
    with shard.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
    return shard.stat().st_size - 8 - header
