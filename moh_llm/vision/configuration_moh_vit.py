"""Configurations of Mixture-of-Head (MoH) vision transformers: those of ViT, DeiT and DINOv2 plus a head plan."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import DeiTConfig, Dinov2Config, ViTConfig
from transformers.utils.versions import require_version

from moh_llm.modeling.head_plan_moh import HeadPlan

# The first whose vision models have the attention that the gates are set in.
require_version("transformers>=5.23", "MoH vision models need another version: pip install -U transformers")


class VisionHeadPlan(HeadPlan):
    """A head plan of whole images: heads are routed singly, and a head that is off gives zero or a value fallback."""

    def __post_init__(self, **kwargs: Any):
        super().__post_init__(**kwargs)
        family = type(self).__name__.removesuffix("Config")
        if not getattr(self, "auto_map", None):  # a model saved by any class must load through every Auto class
            self.auto_map = {
                "AutoConfig": f"configuration_moh_vit.{family}Config",
                "AutoModel": f"modeling_moh_vit.{family}Model",
                "AutoModelForImageClassification": f"modeling_moh_vit.{family}ForImageClassification",
            }
        self.complete_head_plan()

    @property
    def head_dim(self) -> int:
        """Size of a head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def num_key_value_heads(self) -> int:
        """Every head has its own keys and values."""
        return self.num_attention_heads

    def _rules(self) -> Iterator[tuple[bool, str]]:
        yield from super()._rules()
        fallback, granularity = self.head_fallback, self.routing_granularity
        yield fallback != "local", f"head_fallback={fallback!r} is for text: an image has no order of keys"
        yield granularity == "head", f"routing_granularity={granularity!r} is for text: each head has its own keys"

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:
        """Save the configuration, and beside it the code that loads the model without MoH-LLM."""
        super().save_pretrained(save_directory, **kwargs)
        if __name__.startswith("moh_llm."):  # code that was loaded from a model's folder is copied by transformers
            importlib.import_module("moh_llm.vision").write_code(save_directory)


class MoHViTConfig(VisionHeadPlan, ViTConfig):
    """A `ViTConfig` plus the fields of `HeadPlan`."""

    model_type = "moh_vit"


class MoHDeiTConfig(VisionHeadPlan, DeiTConfig):
    """A `DeiTConfig` plus the fields of `HeadPlan`."""

    model_type = "moh_deit"


class MoHDinov2Config(VisionHeadPlan, Dinov2Config):
    """A `Dinov2Config` plus the fields of `HeadPlan`."""

    model_type = "moh_dinov2"


__all__ = ["MoHDeiTConfig", "MoHDinov2Config", "MoHViTConfig"]
