"""The folder of a model: its name, its config and the files of its weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moh_llm.errors import UserError, reason
from moh_llm.files import check_links
from moh_llm.reading import read_json

CONFIG = "config.json"
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
ADAPTER = "adapter_config.json"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
# Files that are read beside the weights. Conversion copies these and licences, and no other file of a base.
DESCRIPTION = {CONFIG, *TOKENIZERS, "merges.txt", "vocab.txt", "tekken.json", "added_tokens.json"}
DESCRIPTION |= {"special_tokens_map.json", "chat_template.jinja", "chat_template.json"}
DESCRIPTION |= {"generation_config.json", "preprocessor_config.json"}
# Names of the texts that accompany the weights begin with one of these.
LICENCE_NAMES = ("LICENSE", "LICENCE", "NOTICE", "USE_POLICY")


def may_be_hub_id(name: str) -> bool:
    """Whether to ask the Hub for a name that is no folder: ``name``, or ``owner/name`` without a folder ``owner``.

    A mistyped path, or BASE copied from a page, would otherwise wait for the network.
    """
    owner, slash, rest = name.partition("/")
    plain = all(part and not part.startswith((".", "~", "-")) for part in ((owner, rest) if slash else (owner,)))
    return plain and "/" not in rest and (slash != "" or not name.isupper()) and not (slash and Path(owner).exists())


def check_place(name: str | Path) -> None:
    """Raise UserError for a name that is neither a folder nor `may_be_hub_id`."""
    place = Path(name)
    if not place.is_dir() and (place.exists() or not may_be_hub_id(str(name))):
        fault = f"{name} is a file" if place.exists() else f"folder {name} does not exist"
        raise UserError(f"{fault}; name a model's folder or a Hub id such as owner/name")


def licence_texts(folder: Path) -> list[Path]:
    """The files of ``folder`` that accompany its weights: licence, notice, use policy.

    Raises:
        UserError: one is a link that leads out of the folder.
    """
    texts = sorted(file for file in folder.iterdir() if file.name.startswith(LICENCE_NAMES) and file.is_file())
    check_links(folder, texts)
    return texts


def check_no_adapter(folder: Path) -> None:
    """Raise UserError where the folder holds an adapter, which transformers would put on top of the weights."""
    if (folder / ADAPTER).exists():
        rest = ", or move adapter_config.json out to use the weights without it" if (folder / CONFIG).exists() else ""
        raise UserError(
            f"{folder} holds an adapter ({ADAPTER}): merge it into the weights (peft's merge_and_unload, then "
            f"save_pretrained) and name the merged model{rest}"
        )


# ---- config


_COUNTS = (
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", "intermediate_size"),
    *("head_dim", "vocab_size", "max_position_embeddings", "moh_format", "num_experts_per_tok"),
)
_DTYPES = ("float32", "float16", "bfloat16", "float64")


def _check_fields(fields: dict[str, Any], where: str) -> None:
    """Raise UserError for what transformers would meet with a traceback, hours of work, or a wrong model."""
    for name in _COUNTS:
        value = fields.get(name)
        most = 10_000 if name == "num_hidden_layers" else 1 << 40  # each layer is built, without its weights
        if value is not None and (type(value) is not int or not 0 < value <= most):
            raise UserError(f"{where} has {name} = {value!r}, which must be a whole number from 1 to {most:,}")
    for name in ("rms_norm_eps", "rope_theta"):
        value = fields.get(name)
        if value is not None and (type(value) not in (int, float) or not 0 < value < float("inf")):
            raise UserError(f"{where} has {name} = {value!r}, which must be a number above 0")
    for name in ("dtype", "torch_dtype"):
        if fields.get(name) not in (None, *_DTYPES):
            raise UserError(f"{where} has {name} = {fields[name]!r}, which must be one of {', '.join(_DTYPES)}")
    heads, groups, rows = (fields.get(name) for name in ("num_attention_heads", "num_key_value_heads", "vocab_size"))
    if heads and groups and heads % groups:
        raise UserError(f"{where}: num_attention_heads={heads} must be a multiple of num_key_value_heads={groups}")
    padding = fields.get("pad_token_id")
    if rows and isinstance(padding, int) and padding >= rows:
        raise UserError(f"{where}: pad_token_id={padding} must be below vocab_size={rows}, or null")


def read_config(folder: Path) -> dict[str, Any]:
    """A model folder's `config.json`.

    Raises:
        UserError: it is missing, cannot be read, is no object, or has a number that no model can have. Absent and null
            fields are not checked here, since families need different ones.
    """
    if not (folder / CONFIG).exists():
        check_no_adapter(folder)
        inside = f", such as {folder / 'model'}" if (folder / "model" / CONFIG).exists() else ""
        raise UserError(f"{folder} holds no {CONFIG}; name a model's folder{inside}")
    fields = read_json(folder / CONFIG)
    if not isinstance(fields, dict):
        raise UserError(f"{folder / CONFIG} is not an object; is {folder} a model's folder?")
    _check_fields(fields, str(folder / CONFIG))
    return fields


def read_moh_config(folder: Path, name: str = "") -> dict[str, Any]:
    """`read_config` of a MoH model of text or images. Raises UserError for another one, which it calls ``name``."""
    if not is_moh(fields := read_config(folder)):
        kind = fields.get("model_type", fields.get("_class_name"))
        raise UserError(f"{name or folder} has model_type={kind}, not moh_llama; convert it first (moh-llm convert)")
    return fields


def is_moh(fields: dict[str, Any]) -> bool:
    """Whether a `config.json` is of a MoH model of text or images."""
    kind = fields.get("model_type", fields.get("_class_name"))
    return kind == "moh_llama" or (str(kind).lower().startswith("moh") and is_image_model(fields))


def is_image_model(fields: dict[str, Any]) -> bool:
    """Whether a `config.json` is of a model of images: a ViT, DeiT or DINOv2, a DiT of diffusers, or a MoH one."""
    kind = str(fields.get("model_type")).removeprefix("moh_")
    return kind in ("vit", "deit", "dinov2") or "DiTTransformer2DModel" in str(fields.get("_class_name"))


@contextmanager
def making_model(name: str | Path) -> Iterator[None]:
    """Raise UserError where transformers refuses, in the block, the config of the model that is called ``name``."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        yield
    except (ValueError, TypeError, KeyError, StrictDataclassError) as error:
        raise UserError(f"{name}: its {CONFIG} makes no model ({reason(error)})") from error


# ---- weights


def weight_names(folder: Path) -> tuple[str, str]:
    """Names of a folder's file of weights and of the index of several: transformers', or diffusers' if it has these."""
    diffusers = [name.replace("model", "diffusion_pytorch_model", 1) for name in (SINGLE_NAME, INDEX_NAME)]
    single, index = diffusers if any((folder / name).is_file() for name in diffusers) else (SINGLE_NAME, INDEX_NAME)
    return single, index


def read_weight_map(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """The files that transformers loads from `folder`, in order, and the file of each tensor.

    transformers prefers a single file to an index beside it, and loads all tensors of the files, in the index or not.

    Raises:
        UserError: there are no safetensors files; one is missing, damaged or truncated; two hold the same tensor; the
            index names a tensor that its file does not hold; or transformers would load other files, too: an adapter,
            a checkpoint of `torch.distributed`, files that config.json names.
    """
    from safetensors import SafetensorError, safe_open

    check_no_adapter(folder)
    single, index_name = weight_names(folder)
    index = {} if (folder / single).is_file() else read_index(folder)
    if not index and not (folder / single).is_file():
        pickled = sorted(folder.glob("*.bin")) + sorted(folder.glob("*.pth"))
        if pickled:
            raise UserError(f"{folder} has weights only as {pickled[0].name}; save them as safetensors first")
        raise UserError(f"{folder} has no weights: neither {single} nor {index_name} is there")
    if others := sorted(folder.glob("shard-?????-model-?????-of-?????.safetensors")):
        raise UserError(
            f"{folder} has two sets of weights: transformers reads {others[0].name}, of a distributed checkpoint; "
            "move one set out"
        )
    if (folder / CONFIG).exists() and (named := read_config(folder).get("transformers_weights")):
        raise UserError(
            f"{folder / CONFIG} names other weights (transformers_weights={str(named)[:80]!r}); remove this field, or "
            "save the model again with save_pretrained"
        )
    shards = [folder / file for file in sorted(set(index.values()) or {single})]
    weight_map: dict[str, str] = {}
    for shard in shards:
        # A name in an index that came from elsewhere must not lead out of the folder.
        if shard.parent.resolve() != folder.resolve() or not shard.exists():
            raise UserError(f"{folder / index_name} names {shard.name}, which is not there; download it again")
        try:
            with safe_open(shard, framework="np") as file:
                held = set(file.keys())
        except (SafetensorError, OSError) as error:
            raise UserError(f"{shard} is damaged or truncated ({error}); download it again") from error
        if absent := [name for name, file in index.items() if file == shard.name and name not in held]:
            raise UserError(f"{folder / index_name} places {absent[0]} in {shard.name}, which does not hold it")
        if twice := sorted(weight_map.keys() & held):
            raise UserError(f"{folder} has two tensors {twice[0]}, in {weight_map[twice[0]]} and {shard.name}")
        weight_map |= dict.fromkeys(sorted(held), shard.name)
    return shards, weight_map


def read_index(folder: Path) -> dict[str, str]:
    """The file of each tensor by a folder's index; empty where there is none. Raises UserError for a malformed one."""
    path = folder / weight_names(folder)[1]
    if not path.exists():
        return {}
    index = read_json(path)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{path} has no weight_map; download it again")
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or not 0 < len(file) < 256 or "\0" in file:
            given = repr(file)[:40]
            raise UserError(f"{path}: weight_map gives {given} for {tensor[:80]}, no file's name; download it again")
    return weight_map


def save_tensors(tensors: dict[str, Any], path: Path) -> None:
    """Write torch tensors as safetensors. Raises UserError when the disk refuses."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # how the library reports a full disk
        raise UserError(f"cannot write {path.name} ({error}); free some space or name another place") from error
