"""MoH-LLM: turn a pretrained LLaMA-family model into a Mixture-of-Head model.

The names below are imported when first used, and the Auto classes of transformers learn of them when
they are, so that ``import moh_llm`` and ``moh-llm --help`` stay instant.
"""

from typing import TYPE_CHECKING, Any

from moh_llm.auto_classes import register_with_transformers

__version__ = "0.1.0"

if TYPE_CHECKING:
    from moh_llm.modeling import (
        MoHLlamaConfig,
        MoHLlamaForCausalLM,
        MoHLlamaForSequenceClassification,
        MoHLlamaModel,
    )

__all__ = [
    "MoHLlamaConfig",
    "MoHLlamaForCausalLM",
    "MoHLlamaForSequenceClassification",
    "MoHLlamaModel",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from moh_llm import modeling

        return getattr(modeling, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


register_with_transformers()
