"""MoH models of images: MoH-ViT on transformers' ViT, DeiT and DINOv2, and MoH-DiT on diffusers' DiT.

Importing this package registers the vision transformers with the Auto classes. What their configurations save includes
the files `CODE`, which load the model where MoH-LLM is not installed. DiT's classes are imported when they are used.
"""

import importlib.util
import re
from pathlib import Path
from typing import Any

import transformers
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForImageClassification

import moh_llm.modeling
from moh_llm.errors import UserError, reason
from moh_llm.records.model import read_config
from moh_llm.vision import modeling_moh_vit as _models
from moh_llm.vision.configuration_moh_vit import MoHDeiTConfig, MoHDinov2Config, MoHViTConfig

# Files of this folder and of `moh_llm.modeling`; they import torch, transformers and one another only.
CODE = ("configuration_moh_vit.py", "modeling_moh_vit.py", "gated_heads_moh.py")
CODE += ("head_plan_moh.py", "heads_moh.py", "routing_moh.py")


def read_code() -> dict[str, str]:
    """The files of the model's code by name, as they lie side by side and import one another by relative names."""
    found = {}
    for name in CODE:
        own = Path(__file__).with_name(name)
        text = (own if own.exists() else Path(moh_llm.modeling.__file__).with_name(name)).read_text(encoding="utf-8")
        found[name] = text.replace("from moh_llm.modeling.", "from .").replace("from moh_llm.vision.", "from .")
    return found


def write_code(folder: str | Path) -> None:
    """Write the files of `read_code`."""
    for name, text in read_code().items():
        Path(folder, name).write_text(text, encoding="utf-8")


def model_class(folder: Path, moh: bool | None = None) -> type[nn.Module]:
    """The class of the model in a folder; with `moh` its MoH class, or without it that of the dense model inside.

    Raises:
        UserError: no ViT, DeiT, DINOv2 or DiT, or one with another head than for classes.
    """
    fields = read_config(folder)
    name = str(fields.get("_class_name") or [*(fields.get("architectures") or []), None][0])
    found = re.fullmatch("(MoH)?((ViT|DeiT|Dinov2)(Model|ForImageClassification)|DiTTransformer2DModel)", name)
    if found is None:
        raise UserError(f"{folder} holds a {name}, and no ViT, DeiT or DINOv2 with classes or without a head, or DiT")
    moh = found[1] is not None if moh is None else moh
    if found[3] is None:
        dit = __getattr__("MoHDiTTransformer2DModel")  # which checks that diffusers is there
        return dit if moh else importlib.import_module("diffusers").DiTTransformer2DModel
    return getattr(_models, f"MoH{found[2]}") if moh else getattr(transformers, found[2])


def load_model(folder: Path, moh: bool | None = None) -> nn.Module:
    """The model of `model_class` in evaluation mode. Raises UserError where the folder's files do not make one."""
    kind = model_class(folder, moh)
    try:
        model, info = kind.from_pretrained(folder, output_loading_info=True, use_safetensors=True)
    except (ValueError, TypeError, KeyError, RuntimeError, OSError) as error:
        raise UserError(f"{folder} makes no {kind.__name__} ({reason(error)[:300]})") from error
    if info["missing_keys"]:
        raise UserError(f"{folder} lacks {sorted(info['missing_keys'])[0]}; download or convert it again")
    return model.eval()


for _config in (MoHViTConfig, MoHDeiTConfig, MoHDinov2Config):
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
    for _auto, _kind in ((AutoModel, "Model"), (AutoModelForImageClassification, "ForImageClassification")):
        _auto.register(_config, getattr(_models, _config.__name__.replace("Config", _kind)), exist_ok=True)


def __getattr__(name: str) -> Any:
    if name not in ("DiTHeadPlan", "MoHDiTTransformer2DModel"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if importlib.util.find_spec("diffusers") is None:
        raise UserError("DiT needs the package diffusers, which is not installed: pip install 'moh-llm[vision]'")
    return getattr(importlib.import_module("moh_llm.vision.modeling_moh_dit"), name)


__all__ = ["CODE", "MoHDeiTConfig", "MoHDinov2Config", "MoHViTConfig", "write_code"]
