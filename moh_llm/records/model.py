"""The folder of a model: what a name may refer to, its config and its weights."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from moh_llm.errors import UserError
from moh_llm.reading import read_json
from moh_llm.records.base import Record

CONFIG = "config.json"
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
FLOATS = ("BF16", "F16", "F32", "F64")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
# Names of the texts that accompany the weights begin with one of these.
LICENCE_NAMES = ("LICENSE", "LICENCE", "NOTICE", "USE_POLICY")


def may_be_hub_id(name: str) -> bool:
    """Whether to ask the Hub for a name that is no folder: ``name`` or ``owner/name``, and no folder ``owner`` here.

    Without this a mistyped path would wait for the network first.
    """
    owner, slash, rest = name.partition("/")
    plain = all(part and not part.startswith((".", "~", "-")) for part in ((owner, rest) if slash else (owner,)))
    return plain and "/" not in rest and not (slash and Path(owner).exists())


def licence_texts(folder: Path) -> list[Path]:
    """The files of ``folder`` that accompany its weights: licence, notice, use policy."""
    return sorted(file for file in folder.iterdir() if file.name.startswith(LICENCE_NAMES) and file.is_file())


# ---- config


class _Rope(Record):
    rope_theta: float | None = Field(None, gt=0, lt=1e30)
    factor: float | None = Field(None, gt=0, lt=1e30)


_Dtype = Literal["float32", "float16", "bfloat16", "float64"]


class _Numbers(_Rope):
    """Fields of a `config.json`. The bounds are far above the largest published models."""

    num_hidden_layers: int | None = Field(None, ge=1, le=2000)
    num_attention_heads: int | None = Field(None, ge=1, le=4096)
    num_key_value_heads: int | None = Field(None, ge=1, le=4096)
    hidden_size: int | None = Field(None, ge=1, le=1 << 20)
    intermediate_size: int | None = Field(None, ge=1, le=1 << 22)
    head_dim: int | None = Field(None, ge=1, le=1 << 14)
    vocab_size: int | None = Field(None, ge=1, le=1 << 24)
    max_position_embeddings: int | None = Field(None, ge=1, le=1 << 40)
    moh_format: int | None = Field(None, ge=1, le=1 << 20)
    num_local_experts: int | None = Field(None, ge=0, le=1 << 16)
    num_experts_per_tok: int | None = Field(None, ge=1, le=1 << 16)
    # -1, the last row, is what early LLaMA checkpoints have for "none".
    pad_token_id: int | None = Field(None, ge=-1)
    rms_norm_eps: float | None = Field(None, gt=0, lt=1e30)
    rope_parameters: _Rope | None = None
    rope_scaling: _Rope | None = None
    dtype: _Dtype | None = None
    torch_dtype: _Dtype | None = None

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        heads, hidden = self.num_attention_heads, self.hidden_size
        if heads and self.num_key_value_heads and heads % self.num_key_value_heads:
            groups = self.num_key_value_heads
            raise ValueError(f"num_attention_heads={heads} must be a multiple of num_key_value_heads={groups}")
        if heads and hidden and self.head_dim is None and hidden % heads:
            raise ValueError(f"hidden_size={hidden} must be a multiple of num_attention_heads={heads}")
        experts, selected = self.num_local_experts, self.num_experts_per_tok
        if experts and selected and selected > experts:
            raise ValueError(f"num_experts_per_tok={selected} must be at most num_local_experts={experts}")
        if self.vocab_size and (self.pad_token_id or 0) >= self.vocab_size:
            raise ValueError(f"pad_token_id={self.pad_token_id} must be below vocab_size={self.vocab_size}, or null")
        return self


def read_config(folder: Path) -> dict[str, Any]:
    """A model folder's `config.json`.

    Raises:
        UserError: it cannot be read, is no object, or has a number that no model can have. Fields that are absent or
            null are not checked: which ones a family needs is asked elsewhere.
    """
    fields = read_json(folder / CONFIG)
    if not isinstance(fields, dict):
        raise UserError(f"{folder / CONFIG} is not an object; is {folder} a model's folder?")
    _Numbers.of(fields, str(folder / CONFIG))
    return fields


def read_moh_config(folder: Path, name: str = "") -> dict[str, Any]:
    """As `read_config`; raises UserError for a model that is not MoH, too, which it calls ``name``."""
    fields = read_config(folder)
    if (kind := fields.get("model_type")) != "moh_llama":
        raise UserError(f"{name or folder} has model_type={kind}, not moh_llama; convert it first (moh-llm convert)")
    return fields


# ---- weights


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
            given = repr(file)[:40]
            raise UserError(f"{path}: weight_map gives {given} for {tensor[:80]}, no file's name; download it again")
    return weight_map


def check_tensors(name: str, shards: Sequence[Path], config: Any) -> None:
    """Compare the tensors in `shards` with those that the architecture of `config` has; headers only are read.

    transformers would fill a gap with random numbers, and stop at a wrong shape with a traceback.

    Args:
        name: what to call the model in an error.
        shards: its safetensors files; they may hold more tensors.
        config: a config of transformers.

    Raises:
        UserError: the config makes no model, or a tensor is missing, has another shape, or holds other than
            floating-point numbers of 16 bits or more.
    """
    import torch
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.initialization import no_init_weights

    try:
        # The class itself: `from_config` under DeepSpeed's ZeRO-3 partitions the weights, which have no shape then.
        with torch.device("meta"), no_init_weights():
            model = AutoModelForCausalLM._model_mapping[type(config)](config)
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{name}: its {CONFIG} makes no model ({' '.join(str(error).split())})") from error
    stored = revert_weight_conversion(model, model.state_dict())  # by their names in files
    needed = {tensor: list(value.shape) for tensor, value in stored.items()}
    if config.tie_word_embeddings:
        needed.pop("lm_head.weight", None)
    for shard in shards:
        with safe_open(shard, framework="np") as file:
            for tensor in sorted(needed.keys() & set(file.keys())):
                header, shape = file.get_slice(tensor), needed.pop(tensor)
                if (dtype := header.get_dtype()) not in FLOATS:
                    raise UserError(
                        f"{shard}: {tensor} holds {dtype} numbers, not {', '.join(FLOATS)}; "
                        "save the weights in one of these first"
                    )
                if (found := header.get_shape()) != shape:
                    raise UserError(f"{name}: {tensor} in {shard.name} has shape {found}, {CONFIG} asks for {shape}")
    if missing := sorted(needed):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(
            f"{name}: the weights lack {missing[0]}{more}, which {CONFIG} asks for; download or convert it again"
        )


def save_tensors(tensors: dict[str, Any], path: Path) -> None:
    """Write torch tensors as safetensors. Raises UserError when the disk refuses."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # how the library reports a full disk
        raise UserError(f"cannot write {path.name} ({error}); free some space or name another place") from error
