"""A model's folder: what a name may mean, which files hold the weights, whether these are whole, what goes along."""

from collections.abc import Container
from pathlib import Path
from typing import Any

from moh_llm.errors import UserError
from moh_llm.reading import read_json

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
FLOATS = ("BF16", "F16", "F32", "F64")
# How the names of texts begin that go wherever the weights go.
LICENCE_NAMES = ("LICENSE", "LICENCE", "NOTICE", "USE_POLICY")


def read_weight_map(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """The safetensors files of `folder`, in order, and a map from each tensor's name to its file's name.

    Raises:
        UserError: there are none (pickled weights are not read), one is missing, damaged or
            truncated, or the index names a tensor that its file does not hold.
    """
    from safetensors import SafetensorError, safe_open

    if (folder / INDEX_NAME).exists():
        weight_map = _read_index(folder / INDEX_NAME)
        shards = [folder / file for file in sorted(set(weight_map.values()))]
    elif (folder / SINGLE_NAME).exists():
        shards, weight_map = [folder / SINGLE_NAME], {}
    elif pickled := sorted(folder.glob("*.bin")) + sorted(folder.glob("*.pth")):
        raise UserError(f"{folder} has weights only as {pickled[0].name}; save them as safetensors first")
    else:
        raise UserError(f"{folder} has no weights: neither {SINGLE_NAME} nor {INDEX_NAME} is there")

    for shard in shards:
        # A name in an index that came from elsewhere must not lead out of the folder.
        if shard.parent.resolve() != folder.resolve() or not shard.exists():
            raise UserError(f"{folder / INDEX_NAME} names {shard.name}, which is not there; download it again")
        try:
            with safe_open(shard, framework="np") as file:
                held = set(file.keys())
        except (SafetensorError, OSError) as error:
            raise UserError(f"{shard} is damaged or truncated ({error}); download it again") from error
        if not weight_map:
            weight_map = dict.fromkeys(sorted(held), shard.name)
        if absent := [name for name, file in weight_map.items() if file == shard.name and name not in held]:
            raise UserError(f"{folder / INDEX_NAME} places {absent[0]} in {shard.name}, which does not hold it")
    return shards, weight_map


def _read_index(path: Path) -> dict[str, str]:
    index = read_json(path)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{path} has no weight_map; download it again")
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or not 0 < len(file) < 256 or "\0" in file:
            shown = repr(file)[:40]
            raise UserError(f"{path}: weight_map gives {shown} for {tensor[:80]}, no file's name; download it again")
    return weight_map


def check_floats(shards: list[Path], names: Container[str]) -> None:
    """Raise UserError for a tensor of ``names`` that does not hold floating-point numbers of 16 bits or more."""
    from safetensors import safe_open

    for shard in shards:
        with safe_open(shard, framework="np") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                dtype = file.get_slice(name).get_dtype()
                if name in names and dtype not in FLOATS:
                    raise UserError(
                        f"{shard}: {name} holds {dtype} numbers, no {', '.join(FLOATS)}; "
                        "save the weights in one of these first"
                    )


def save_tensors(tensors: dict[str, Any], path: Path) -> None:
    """Write torch tensors as safetensors. Raises UserError when the disk refuses."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # how the library reports a full disk
        raise UserError(f"cannot write {path.name} ({error}); free some space or name another place") from error


def licence_texts(folder: Path) -> list[Path]:
    """The files of ``folder`` that go along with its weights: licence, notice, use policy."""
    return sorted(file for file in folder.iterdir() if file.name.startswith(LICENCE_NAMES) and file.is_file())


def may_be_hub_id(name: str) -> bool:
    """Whether to ask the Hub for a name that is no folder: ``name`` or ``owner/name``, and no folder ``owner`` here.

    Without this a mistyped path would wait for the network first.
    """
    owner, slash, rest = name.partition("/")
    plain = all(part and not part.startswith((".", "~", "-")) for part in ((owner, rest) if slash else (owner,)))
    return plain and "/" not in rest and not (slash and Path(owner).exists())
