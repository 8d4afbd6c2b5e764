"""One dtype for all models of a report, chosen before any is loaded."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

from moh_llm.records.model import read_weight_map

# Floating dtypes of weights by their names in a safetensors header; others hold quantised weights.
_HEADER = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True)
class Precision:
    """The dtype of a report.

    Attributes:
        dtype: name of the torch dtype that every model is run in.
        stored: by model's label, the dtype that its weights are stored in.
        asked: what was asked for, "auto" or the dtype.
    """

    dtype: str
    stored: dict[str, str]
    asked: str

    def __str__(self) -> str:
        kept = ", ".join(f"{label} {dtype}" for label, dtype in self.stored.items())
        rule = "the widest stored dtype" if self.asked == "auto" else "as asked"
        return f"dtype: {self.dtype} for every model, {rule} (stored: {kept})"


def choose_dtype(models: Mapping[str, str], asked: str) -> Precision:
    """The dtype that all of ``models`` (label to path or Hub id) are run in.

    "auto" is the narrowest dtype that holds the weights of every model: the widest stored one, and float32 for
    float16 beside bfloat16. Then no matrix is rounded, and the choice does not depend on which model is the base.
    Raises UserError for a folder whose weights cannot be read.
    """
    import torch

    stored = {label: stored_dtype(model) for label, model in models.items()}
    if asked != "auto":
        return Precision(asked, stored, asked)
    widest = reduce(torch.promote_types, (getattr(torch, dtype) for dtype in stored.values()))
    return Precision(str(widest).removeprefix("torch."), stored, asked)


def stored_dtype(model: str) -> str:
    """The widest floating dtype among a folder's weight matrices; of a model on the Hub what its config names.

    Vectors do not count: some checkpoints hold norms or rotary frequencies in float32 beside bfloat16 matrices.
    float32 where neither tells.
    """
    import torch
    from safetensors import safe_open
    from transformers import AutoConfig

    from moh_llm.evaluation.models import register_moh

    found: set[torch.dtype] = set()
    if Path(model).is_dir():
        for shard in read_weight_map(Path(model))[0]:
            with safe_open(shard, framework="np") as file:
                parts = [file.get_slice(name) for name in set(file.keys())]
                names = {_HEADER.get(part.get_dtype()) for part in parts if len(part.get_shape()) > 1}
                found |= {getattr(torch, name) for name in names if name}
    if not found:
        register_moh()
        named = getattr(AutoConfig.from_pretrained(model), "dtype", None)
        if isinstance(named, str):
            named = getattr(torch, named, None)
        found = {named if isinstance(named, torch.dtype) and named.is_floating_point else torch.float32}
    return str(reduce(torch.promote_types, found)).removeprefix("torch.")
