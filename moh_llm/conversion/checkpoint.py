"""Writing the converted folder: the base's shards as they are, one shard of router tensors, an index."""

import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tqdm import tqdm

import moh_llm.modeling
from moh_llm.conversion.base import BaseCheckpoint
from moh_llm.errors import UserError
from moh_llm.files import write_json
from moh_llm.model_folder import INDEX_NAME, SINGLE_NAME
from moh_llm.modeling import MoHLlamaConfig

REMOTE_CODE = ("configuration_moh_llama.py", "modeling_moh_llama.py", "routing_moh.py")
# Tokenizer, generation settings and licence go along; weights in other formats and records do not.
_KEPT_ENDINGS = (".json", ".txt", ".model", ".jinja")
_KEPT_NAMES = ("LICENSE", "NOTICE", "USE_POLICY")
_REPLACED = {"config.json", INDEX_NAME, "conversion.json"}


def write_checkpoint(
    folder: Path,
    base: BaseCheckpoint,
    config: MoHLlamaConfig,
    router_tensors: dict[str, torch.Tensor],
    dtype: torch.dtype | None = None,
) -> None:
    """Fill `folder` with a checkpoint that `from_pretrained` loads.

    Args:
        folder: an empty folder.
        base: where the weights come from; without `dtype` its files are copied byte for byte.
        config: the converted model's config.
        router_tensors: the learned router's tensors by name; may be empty.
        dtype: cast floating-point weights to it, one shard at a time.
    """
    count = len(base.shards) + bool(router_tensors)
    names = [SINGLE_NAME] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    renamed = {shard.name: name for shard, name in zip(base.shards, names, strict=False)}
    for shard in tqdm(base.shards, desc="copy weights", unit="shard", leave=False):
        if dtype is None:
            shutil.copyfile(shard, folder / renamed[shard.name])
        else:
            _cast_shard(shard, folder / renamed[shard.name], dtype)
    weight_map = {tensor: renamed[file] for tensor, file in base.weight_map.items()}
    if router_tensors:
        _save(router_tensors, folder / names[-1])
        weight_map |= dict.fromkeys(router_tensors, names[-1])
    if count > 1:
        total = sum(_tensor_bytes(folder / name) for name in names)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(folder / INDEX_NAME, index)

    config.save_pretrained(folder)
    for name in REMOTE_CODE:
        shutil.copyfile(Path(moh_llm.modeling.__file__).with_name(name), folder / name)
    for file in base.folder.iterdir():
        kept = file.name.endswith(_KEPT_ENDINGS) or file.name.startswith(_KEPT_NAMES)
        if kept and file.is_file() and file.name not in _REPLACED:
            shutil.copyfile(file, folder / file.name)


def _cast_shard(source: Path, target: Path, dtype: torch.dtype) -> None:
    with safe_open(source, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    cast = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
    _save(cast, target)


def _save(tensors: dict[str, torch.Tensor], target: Path) -> None:
    try:
        save_file(tensors, target, metadata={"format": "pt"})
    except SafetensorError as error:  # how the library reports a full disk
        raise UserError(f"cannot write {target.name} ({error}); free some space or name another place") from error


def _tensor_bytes(shard: Path) -> int:
    """Bytes of tensor data in a safetensors file: all but its length-prefixed JSON header."""
    with shard.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
    return shard.stat().st_size - 8 - header
