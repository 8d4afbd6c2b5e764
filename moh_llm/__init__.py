"""MoH-LLM: turn a pretrained LLM into a Mixture-of-Head model.

`moh_llm.convert`, `train`, `evaluate` and `publish` do what the commands of those names do. Classes and functions are
imported when they are first used, and the Auto classes of transformers learn of MoH models when they are asked for one,
so that ``import moh_llm`` and ``moh-llm --help`` are fast.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

from moh_llm.auto_classes import register_with_transformers

__version__ = "0.1.0"

# Operations that GPUs of Apple and Intel lack are computed on the CPU, and torch says so. It reads these when imported.
for _name in ("PYTORCH_ENABLE_MPS_FALLBACK", "PYTORCH_ENABLE_XPU_FALLBACK"):
    os.environ.setdefault(_name, "1")

if TYPE_CHECKING:
    from moh_llm.api import convert, evaluate, publish, to_dense, train
    from moh_llm.attention.cache import MoHCache
    from moh_llm.modeling import MoHLlamaConfig, MoHLlamaForCausalLM, MoHLlamaForSequenceClassification, MoHLlamaModel
    from moh_llm.training.balance import HeadBalanceMixin

__all__ = [
    "HeadBalanceMixin",
    "MoHCache",
    "MoHLlamaConfig",
    "MoHLlamaForCausalLM",
    "MoHLlamaForSequenceClassification",
    "MoHLlamaModel",
    "__version__",
    "convert",
    "evaluate",
    "publish",
    "to_dense",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    places = {"MoHCache": "attention.cache", "HeadBalanceMixin": "training.balance"}
    module = places.get(name, "modeling" if name.startswith("MoH") else "api")
    return getattr(importlib.import_module(f"moh_llm.{module}"), name)


register_with_transformers()
