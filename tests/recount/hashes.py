"""The hashes that records name models by, from the bytes of safetensors files."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from recount import costs


def tensors_of(folder: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Dtype, shape and bytes of each tensor of a folder's safetensors files."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        content = file.read_bytes()
        begin = 8 + int.from_bytes(content[:8], "little")
        for name, about in json.loads(content[8:begin]).items():
            if name != "__metadata__":
                first, last = about["data_offsets"]
                found[name] = about["dtype"], about["shape"], content[begin + first : begin + last]
    return found


def is_of_routing(name: str) -> bool:
    return ".router." in name or ".fallback." in name


def hash_tensors(folder: Path, of: Callable[[str], bool]) -> str:
    """SHA-256 over a line for each tensor that ``of`` takes, in the order of their lines."""
    lines = [
        f"{name} {dtype} {shape} {hashlib.sha256(data).hexdigest()}\n"
        for name, (dtype, shape, data) in tensors_of(folder).items()
        if of(name)
    ]
    return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()


def weight_hashes(folder: Path) -> dict[str, str]:
    """Of the dense tensors, and of those of routers and fallbacks."""
    return {
        "dense": hash_tensors(folder, lambda name: not is_of_routing(name)),
        "routing": hash_tensors(folder, is_of_routing),
    }


def model_hashes(folder: Path) -> dict[str, str]:
    """Of its weights and of its head plan, by which records name a model."""
    return {**weight_hashes(folder), "plan": plan_sha256(folder)}


def plan_sha256(folder: Path) -> str:
    """Of the fields of its config that decide what a layer computes from given weights."""
    config = json.loads((folder / "config.json").read_text())
    fields = {
        "shared_heads_per_layer": costs.shared_heads(config),
        "active_heads_per_layer": costs.per_layer(config, "num_active_heads"),
        "never_on_heads_per_layer": config["never_on_heads"] or [[]] * config["num_hidden_layers"],
    }
    names = ("router_type", "router_score", "routing_granularity", "head_fallback", "local_window", "local_sinks")
    names += ("local_start", "query_key_norm", "num_experts_per_tok", "num_attention_heads", "num_key_value_heads")
    names += ("head_dim", "num_hidden_layers", "hidden_act", "rms_norm_eps", "rope_parameters")
    content = json.dumps(fields | {name: config[name] for name in names}, sort_keys=True)
    return hashlib.sha256(f"{content}\n".encode()).hexdigest()


def files_of(folder: Path) -> dict[str, dict[str, object]]:
    """Size and hash of the files of a folder, but for its seal, by name."""
    found = {}
    for file in (path for path in sorted(folder.iterdir()) if path.is_file() and path.name != "seal.json"):
        content = file.read_bytes()
        found[file.name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    return found


def expected_seal(folder: Path) -> dict[str, object]:
    """The whole of a folder's `seal.json`."""
    return {"files": files_of(folder), "model": model_hashes(folder)}


def weights_sha256(folder: Path) -> str:
    """One hash of both."""
    return hashlib.sha256("".join(f"{value}\n" for value in weight_hashes(folder).values()).encode()).hexdigest()


def model_sha256(folder: Path) -> str:
    """Of weights, config and tokenizer."""
    names = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
    lines = [weights_sha256(folder)]
    lines += [
        f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()} {name}"
        for name in names
        if (folder / name).is_file()
    ]
    return hashlib.sha256("".join(f"{line}\n" for line in lines).encode()).hexdigest()


def fingerprint(folder: Path) -> str:
    """Of size, header and 64 samples of 16 KiB of each file."""
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        content = file.read_bytes()
        begin = 8 + int.from_bytes(content[:8], "little")
        digest.update(f"{len(content)}\n".encode() + content[8:begin])
        for sample in range(64):
            at = begin + (len(content) - begin) * sample // 64
            digest.update(content[at : at + (1 << 14)])
    return digest.hexdigest()


def count(folder: Path, of: Callable[[str], bool] = lambda name: True) -> int:
    """Numbers in the tensors that ``of`` takes."""
    sizes = {"F32": 4, "BF16": 2, "F16": 2, "F64": 8}
    return sum(len(data) // sizes[dtype] for name, (dtype, _, data) in tensors_of(folder).items() if of(name))
