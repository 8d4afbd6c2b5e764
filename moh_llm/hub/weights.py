"""Whether a folder's weights are those that its config asks for: no tensor missing, none too many."""

import json
from pathlib import Path

from moh_llm.errors import UserError
from moh_llm.hub.problem import Problem
from moh_llm.hub.texts import find_paths, find_secrets
from moh_llm.model_folder import INDEX_NAME, SINGLE_NAME, read_weight_map

_CONVERT = "convert or save the model again"


def check_weights(folder: Path) -> list[Problem]:
    """Compare index, shards and config by names and shapes; only the shards' headers are read."""
    index = INDEX_NAME if (folder / INDEX_NAME).is_file() else SINGLE_NAME
    try:
        shards, weight_map = read_weight_map(folder)
    except UserError as error:
        return [Problem(index, _without_folder(str(error), folder), _CONVERT)]
    problems: list[Problem] = []
    shapes: dict[str, list[int]] = {}
    for shard in shards:
        metadata, held = _read_header(shard)
        if find_secrets(metadata) or find_paths(metadata):
            problems.append(Problem(shard.name, "its metadata holds a secret or a local path", _CONVERT, False))
        astray = [name for name in held if weight_map.get(name) != shard.name]
        problems += _told(shard.name, "holds {}, which the index does not place there", astray)
        shapes |= {name: shape for name, shape in held.items() if name not in astray}
    return problems + _against_config(folder, index, shapes)


def _read_header(shard: Path) -> tuple[str, dict[str, list[int]]]:
    """A file's metadata as text, and the shapes of its tensors by name."""
    from safetensors import safe_open

    with safe_open(shard, framework="np") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 (not a dict)
        return json.dumps(file.metadata() or {}), shapes


def _against_config(folder: Path, index: str, shapes: dict[str, list[int]]) -> list[Problem]:
    import torch
    from huggingface_hub.errors import StrictDataclassError

    from moh_llm.modeling import MoHLlamaConfig, MoHLlamaForCausalLM

    try:
        config = MoHLlamaConfig.from_pretrained(folder)
        with torch.device("meta"):
            model = MoHLlamaForCausalLM(config)
    except (OSError, ValueError, TypeError, KeyError, StrictDataclassError) as error:
        why = _without_folder(" ".join(str(error).split())[:200], folder)
        return [Problem("config.json", f"makes no model ({why})", _CONVERT)]
    needed = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    tied = set(model._tied_weights_keys) if config.tie_word_embeddings else set()
    # Old LLaMA checkpoints hold tables of the rotary embedding, which transformers passes over.
    extra = [name for name in sorted(shapes.keys() - needed.keys()) if not name.endswith("rotary_emb.inv_freq")]
    wrong = [name for name in sorted(shapes.keys() & needed.keys()) if shapes[name] != needed[name]]
    return [
        *_told(index, "lacks {}, which config.json asks for", sorted(needed.keys() - shapes.keys() - tied)),
        *_told(index, "has {}, which config.json does not ask for", extra),
        *_told(index, "has {} in another shape than config.json asks for", wrong),
    ]


def _told(file: str, what: str, names: list[str]) -> list[Problem]:
    """One problem for all tensors of a kind, none for none."""
    if not names:
        return []
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return [Problem(file, what.format(names[0] + more), _CONVERT)]


def _without_folder(text: str, folder: Path) -> str:
    return text.replace(f"{folder}/", "").replace(str(folder), "the folder")
