"""What the baselines' attention layers share: rotary causal attention, the balance loss, the model around them.

Shapes: B batch, T tokens, C hidden size, H heads, D head size, E experts.
"""

from collections.abc import Callable

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, eager_attention_forward

# Queries [B, T, H, D], keys and values [B, T, H or 1, D] to head outputs [B, T, H, D].
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class BaselineAttention(nn.Module):
    """An attention layer in the place of `LlamaAttention`; `auxiliary_loss` is that of the last forward pass."""

    is_causal = True

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.config, self.head_dim = config, config.head_dim
        self.num_key_value_groups = 1  # of the current call of the attention function, which reads it
        self.auxiliary_loss: torch.Tensor | float = 0.0

    def mix(self, hidden_states: torch.Tensor, attend: Attend) -> tuple[torch.Tensor, torch.Tensor | float]:
        """The layer's output `[B, T, C]`, and its auxiliary loss, weighted."""
        raise NotImplementedError

    def multiply_adds(self, context: float) -> float:
        """Multiply-adds of the matrix products of one token that attends to `context` positions, by the paper."""
        raise NotImplementedError

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, None]:
        """Attention over `hidden_states` `[B, T, C]`, without weights. Raises ValueError for a cache."""
        if past_key_values is not None:
            raise ValueError("the baselines have no cache: pass use_cache=False")
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)

        def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            self.num_key_value_groups = queries.shape[2] // keys.shape[2]
            queries, keys = apply_rotary_pos_emb(queries.transpose(1, 2), keys.transpose(1, 2), *position_embeddings)
            scaling = self.head_dim**-0.5
            return attention(self, queries, keys, values.transpose(1, 2), attention_mask, scaling=scaling, **kwargs)[0]

        output, self.auxiliary_loss = self.mix(hidden_states, attend)
        return output, None


class BaselineForCausalLM(LlamaForCausalLM):
    """LLaMA with another attention layer, whose auxiliary losses, summed over layers, are added to the loss."""

    def __init__(self, config: LlamaConfig, attention: Callable[[LlamaConfig], BaselineAttention]):
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn = attention(config)
        self.post_init()

    def forward(self, *args, **kwargs) -> CausalLMOutputWithPast:
        """As `LlamaForCausalLM`."""
        outputs = super().forward(*args, **kwargs)
        if outputs.loss is not None:
            outputs.loss = outputs.loss + sum(layer.self_attn.auxiliary_loss for layer in self.model.layers)
        return outputs


def switch_loss(probabilities: torch.Tensor, selected: torch.Tensor) -> torch.Tensor:
    """E * sum over experts of f_i P_i, of experts in the last dimension of `[B, T, ..., E]`; `[...]`.

    f_i is the share of the tokens that select expert i, P_i the mean of its probability. `selected` is 0 or 1.
    """
    return probabilities.shape[-1] * (selected.mean((0, 1)) * probabilities.mean((0, 1))).sum(-1)
