"""Numbers of weights by kind, and the hashes of a model, from its files."""

from collections.abc import Callable
from pathlib import Path

from safetensors import safe_open

from moh_llm.records.identity import hash_plan, hash_weights


def count(folder: Path, of: Callable[[str], bool] = lambda name: True) -> int:
    """Numbers in the tensors whose names ``of`` takes."""
    total = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            total += sum(tensors.get_tensor(name).numel() for name in tensors.keys() if of(name))  # noqa: SIM118
    return total


def model_hashes(folder: Path) -> dict[str, str]:
    """Hashes by which records name a model, from its weights and not from its seal."""
    return hash_weights(folder).content() | {"plan": hash_plan(folder)}
