"""The model card that a tuned model starts with: what it is, how it was tuned, what it read."""

from typing import Any

from moh_llm.data.receipt import data_section
from moh_llm.training.config import TrainConfig
from moh_llm.training.networks import has_base

_CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- mixture-of-head
---

# {name}

A Mixture-of-Head model: in each layer every token uses some of the attention heads. It was {origin} {objective} for
{steps:,} steps{adapters}.

{data}"""


def model_card(name: str, config: TrainConfig, mixture: str, receipt: dict[str, dict[str, Any]]) -> str:
    """The card in Markdown, from the recipe and from what was read (`make_receipt`)."""
    origin = "converted from a dense checkpoint (`conversion.json`) and tuned by"
    return _CARD.format(
        name=name,
        origin=origin if has_base(config) else "trained from scratch by",
        objective={"distillation": "self-distillation", "cross_entropy": "cross-entropy"}[config.objective.kind],
        steps=config.max_steps,
        adapters="" if config.lora is None else f" with LoRA adapters of rank {config.lora.rank}, merged",
        data=data_section(mixture, config.data.block_length, receipt),
    )
