"""The tensors of a model's folder: which of them its architecture loads, and in which dtypes."""

import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moh_llm.errors import UserError
from moh_llm.records.model import CONFIG, making_model

if TYPE_CHECKING:
    import torch

# Floating dtypes of weights by their names in a safetensors header; others hold quantised weights.
FLOATS = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# In attention of text models, of vision transformers, and of DiT.
_ROUTING = re.compile(r"\.(self_attn|attention|attn1\.processor)\.(router|fallback)\.")


@dataclass(frozen=True)
class Tensors:
    """The tensors of a folder that an architecture loads.

    Attributes:
        weight_map: the file of each tensor that is loaded.
        unknown: names of the other tensors, without rotary frequencies of old checkpoints, which are computed today.
        tied: whether the output projection is the embedding, as transformers decides: the config says so, and the
            files hold no projection, or an equal one.
    """

    weight_map: dict[str, str]
    unknown: list[str]
    tied: bool

    @property
    def note(self) -> str | None:
        """A remark for the user on the unknown tensors."""
        if not self.unknown:
            return None
        more = f" and {len(self.unknown) - 3} more" if len(self.unknown) > 3 else ""
        return (
            f"{len(self.unknown)} tensors are left out, which the architecture does not have and transformers does not "
            f"load: {', '.join(self.unknown[:3])}{more}"
        )


def is_routing_weight(name: str) -> bool:
    """Whether a tensor of that name belongs to a router or a fallback, which a MoH model has beside its dense base."""
    return _ROUTING.search(name) is not None


def is_fallback_weight(name: str) -> bool:
    """Whether a tensor of that name belongs to a fallback."""
    return (found := _ROUTING.search(name)) is not None and found[2] == "fallback"


def check_tensors(name: str, folder: Path, weight_map: Mapping[str, str], config: Any) -> Tensors:
    """Compare a folder's tensors with those of the architecture; only headers are read.

    transformers would initialise a missing tensor at random, and stop at a wrong shape with a traceback. ``weight_map``
    may have more tensors than the architecture; errors call the model ``name``.

    Raises:
        UserError: the config makes no model, or a tensor is missing, has another shape, is not floating-point with 16
            bits or more, or would be loaded in place of another tensor.
    """
    from transformers.core_model_loading import revert_weight_conversion

    model = empty_model(config, name)
    known = model.state_dict()
    needed = {tensor: list(value.shape) for tensor, value in revert_weight_conversion(model, known).items()}
    if config.tie_word_embeddings and HEAD not in weight_map:
        needed.pop(HEAD, None)
    found = {tensor: file for tensor, file in weight_map.items() if tensor in needed}
    unknown = sorted(weight_map.keys() - found.keys())
    for tensor in unknown:
        # transformers takes names with and without the prefix, and those of its modules.
        for other in (tensor, f"model.{tensor}", tensor.removeprefix("model.")):
            if other in known or other in needed:
                raise UserError(
                    f"{name}: transformers loads {tensor} as {other}; save the model again with its save_pretrained"
                )
    for tensor, dtype, given in read_headers(folder, found):
        where, shape = found[tensor], needed.pop(tensor)
        if dtype not in FLOATS:
            raise UserError(
                f"{folder / where}: {tensor} holds {dtype} numbers, not {', '.join(FLOATS)}; "
                "save the weights in one of these first"
            )
        if given != shape:
            raise UserError(f"{name}: {tensor} in {where} has shape {given}, {CONFIG} asks for {shape}")
    if missing := sorted(needed):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(f"{name}: the weights lack {missing[0]}{more} that {CONFIG} needs; download or convert again")
    unknown = [tensor for tensor in unknown if not re.search(r"rotary_emb\.inv_freq$", tensor)]
    return Tensors(found, unknown, is_tied(folder, found, config.tie_word_embeddings))


def empty_model(config: Any, name: str) -> Any:
    """The causal language model of a config of transformers, on the meta device.

    Raises:
        UserError: the config, of the model that is called ``name``, makes none, or transformers would not save it.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    config = copy.deepcopy(config)
    config._attn_implementation = None  # a saved one may not be installed here
    with making_model(name):
        if validate := getattr(config, "validate", None):  # as `save_pretrained` does, which is after the training
            validate()
        # The class itself: `from_config` under DeepSpeed's ZeRO-3 partitions the weights, which have no shape then.
        with torch.device("meta"), no_init_weights():
            return AutoModelForCausalLM._model_mapping[type(config)](config)


def is_tied(folder: Path, weight_map: Mapping[str, str], asked: bool) -> bool:
    """Whether the output projection is the embedding (`Tensors.tied`); where both are stored they are compared.

    ``asked`` is what the config says (`tie_word_embeddings`).
    """
    from safetensors import safe_open

    if not asked or not {EMBEDDING, HEAD} <= weight_map.keys():
        return asked
    with (
        safe_open(folder / weight_map[EMBEDDING], framework="pt") as inputs,
        safe_open(folder / weight_map[HEAD], framework="pt") as outputs,
    ):
        embedding, head = inputs.get_slice(EMBEDDING), outputs.get_slice(HEAD)
        if embedding.get_shape() != head.get_shape():
            return False
        rows = range(0, embedding.get_shape()[0], 4096)  # in parts, to save memory
        return all(bool((embedding[at : at + 4096] == head[at : at + 4096]).all()) for at in rows)


def tensor_dtypes(folder: Path, weight_map: Mapping[str, str]) -> dict[str, "torch.dtype"]:
    """The floating dtypes of stored tensors, by name."""
    import torch

    return {
        name: getattr(torch, FLOATS[dtype]) for name, dtype, _ in read_headers(folder, weight_map) if dtype in FLOATS
    }


def matrix_dtype(folder: Path, weight_map: Mapping[str, str]) -> "torch.dtype | None":
    """The widest dtype of a model's matrices, in which none is rounded; None where none is floating-point.

    Vectors do not count: some checkpoints hold norms or rotary frequencies in float32 beside bfloat16 matrices, others
    norms in bfloat16 beside float32 matrices.
    """
    import torch

    found = {
        FLOATS[dtype] for _, dtype, shape in read_headers(folder, weight_map) if dtype in FLOATS and len(shape) > 1
    }
    return reduce(torch.promote_types, (getattr(torch, name) for name in found)) if found else None


def cast_weight(tensor: "torch.Tensor", dtype: "torch.dtype", where: str) -> "torch.Tensor":
    """Cast a floating-point weight.

    Raises:
        UserError: a finite value would overflow in ``dtype``; ``where`` names the weight.
    """
    import torch

    cast = tensor.to(dtype)
    most = torch.finfo(dtype).max
    if tensor.numel() and most < torch.finfo(tensor.dtype).max and not is_finite(cast) and is_finite(tensor):
        name, other = str(dtype).removeprefix("torch."), "bfloat16" if dtype == torch.float16 else "float32"
        largest = float(max(abs(value) for value in tensor.aminmax()))
        limit = f"{name} cannot hold ({most:.6g} at most); take {other}"
        raise UserError(f"{where} has a value of {largest:.6g}, which {limit}")
    return cast


def is_finite(values: "torch.Tensor") -> bool:
    """Whether no value is NaN or infinite. `aminmax` takes one pass without a mask, and is NaN where a value is."""
    import torch

    return bool(torch.isfinite(torch.stack(values.aminmax())).all())


def read_headers(folder: Path, weight_map: Mapping[str, str]) -> Iterator[tuple[str, str, list[int]]]:
    """Name, dtype in safetensors' terms, and shape of each tensor, from the headers."""
    from safetensors import safe_open

    by_file: dict[str, list[str]] = {}
    for name, file_name in weight_map.items():
        by_file.setdefault(file_name, []).append(name)
    for file_name, names in sorted(by_file.items()):
        with safe_open(folder / file_name, framework="np") as file:
            for name in names:
                header = file.get_slice(name)
                yield name, header.get_dtype(), header.get_shape()
