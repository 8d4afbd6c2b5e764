"""Mixtral's feed-forward experts in place of a layer's MLP: their names in checkpoints, and their load-balance loss."""

from collections.abc import Sequence

from torch import Tensor
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter, WeightRenaming
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from .configuration_moh_llama import MoHLlamaConfig

# As transformers' own for Mixtral, but of whole names: an MLP's names stay as they are.
_EXPERTS = ".block_sparse_moe.experts.*."
register_checkpoint_conversion_mapping(
    MoHLlamaConfig.model_type,
    [
        WeightRenaming(".block_sparse_moe.gate.weight", ".mlp.gate.weight"),
        WeightConverter(
            [f"{_EXPERTS}w1.weight", f"{_EXPERTS}w3.weight"],
            ".mlp.experts.gate_up_proj",
            operations=[MergeModulelist(dim=0), Concatenate(dim=1)],
        ),
        WeightConverter([f"{_EXPERTS}w2.weight"], ".mlp.experts.down_proj", operations=[MergeModulelist(dim=0)]),
    ],
    overwrite=True,
)


def expert_balancing_loss(
    expert_logits: Sequence[Tensor], config: MoHLlamaConfig, attention_mask: Tensor | None = None
) -> Tensor | float:
    """Mixtral's load-balance loss, given logits `[B * T, E]` of each layer; a mask that is not `[B, T]` is ignored."""
    if not expert_logits:
        return 0.0
    mask = attention_mask if attention_mask is not None and attention_mask.dim() == 2 else None
    return load_balancing_loss_func(tuple(expert_logits), config.num_local_experts, config.num_experts_per_tok, mask)
