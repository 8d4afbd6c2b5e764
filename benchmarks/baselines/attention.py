"""Attention layers of other papers in the place of LLaMA's: MoA, SwitchHead, and static sparse heads.

They share rotary causal attention, the balance loss and the model around them. They train and score whole sequences:
there is no cache. Projections of experts that a token does not select are computed and left out; `multiply_adds` counts
what a token needs. Weights are initialised as LLaMA's, routers too.

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

BALANCE, Z = 0.01, 0.001  # weights of MoA's two auxiliary losses
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


class MoAAttention(BaselineAttention):
    """MoA: `active` of `experts` heads of `config.head_dim` per token.

    Zhang et al., "Mixture of Attention Heads: Selecting Attention Heads Per Token", EMNLP 2022 (arXiv 2210.05144).
    Heads are experts with their own projections of queries and outputs; all share one head of keys and values. Of E
    experts a token selects the K of the highest probability p = softmax(W_g x) and adds up w_i E_i(x), with
    w_i = p_i / sum over selected j of p_j; the denominator gets no gradient (the authors' code, yikangshen/MoA, leaves
    it out). The loss has 0.01 E sum_i f_i P_i, where the shares f of the selections sum to 1, and 0.001 times the mean
    square of log sum_i exp(W_g x)_i, of each layer: the weights that the authors' code is run with. Rotary embedding
    takes the place of the paper's positions.
    """

    def __init__(self, config: LlamaConfig, experts: int, active: int):
        super().__init__(config)
        self.experts, self.active = experts, active
        self.router = nn.Linear(config.hidden_size, experts, bias=False)
        self.q_proj = nn.Linear(config.hidden_size, experts * self.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, self.head_dim, bias=False)
        self.o_proj = nn.Linear(experts * self.head_dim, config.hidden_size, bias=False)

    def mix(self, hidden_states: torch.Tensor, attend: Attend) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.router(hidden_states)
        probabilities = logits.softmax(-1)
        chosen, experts = probabilities.topk(self.active)
        weights = chosen / chosen.sum(-1, keepdim=True).detach()
        index = experts.unsqueeze(-1).expand(-1, -1, -1, self.head_dim)
        queries = self.q_proj(hidden_states).unflatten(-1, (self.experts, self.head_dim))
        # One head of attention per selection, not per expert: keys and values are the same for all.
        keys, values = self.k_proj(hidden_states).unsqueeze(2), self.v_proj(hidden_states).unsqueeze(2)
        outputs = attend(queries.gather(2, index), keys, values)
        by_expert = torch.zeros_like(queries).scatter(2, index, (outputs * weights.unsqueeze(-1)).to(queries.dtype))
        selected = torch.zeros_like(probabilities).scatter(-1, experts, 1.0)
        balance = switch_loss(probabilities, selected / self.active)
        z = logits.logsumexp(-1).square().mean()
        return self.o_proj(by_expert.flatten(-2)), BALANCE * balance + Z * z

    def multiply_adds(self, context: float) -> float:
        hidden, size = self.config.hidden_size, self.head_dim
        return 2 * (self.active + 1) * hidden * size + self.active * 2 * size * context + hidden * self.experts


class SwitchHeadAttention(BaselineAttention):
    """SwitchHead: `config.num_attention_heads` heads of `config.head_dim`, each with `active` of `experts` per token.

    Csordás et al., "SwitchHead: Accelerating Transformers with Mixture-of-Experts Attention", NeurIPS 2024
    (arXiv 2312.07987). Few heads h, each with dense queries and keys, and E experts in its value and output
    projections. Experts of values are selected by s = sigmoid(W_S^h x), those of outputs by sigmoid(W_D^h x): the K
    largest of each, so that V^h = sum over selected e of s_e x W_V^{h,e} and y = sum over h and selected e of
    s_e A^h V^h W_O^{h,e}. There is no auxiliary loss. Rotary embedding turns all of a head, as in LLaMA (the authors'
    code turns a half).
    """

    def __init__(self, config: LlamaConfig, experts: int, active: int):
        super().__init__(config)
        self.heads, self.experts, self.active = config.num_attention_heads, experts, active
        hidden, width = config.hidden_size, self.heads * self.head_dim
        self.q_proj = nn.Linear(hidden, width, bias=False)
        self.k_proj = nn.Linear(hidden, width, bias=False)
        self.v_proj = nn.Linear(hidden, experts * width, bias=False)
        self.o_proj = nn.Linear(experts * width, hidden, bias=False)
        self.v_router = nn.Linear(hidden, self.heads * experts, bias=False)
        self.o_router = nn.Linear(hidden, self.heads * experts, bias=False)

    def mix(self, hidden_states: torch.Tensor, attend: Attend) -> tuple[torch.Tensor, float]:
        queries, keys = (
            project(hidden_states).unflatten(-1, (self.heads, self.head_dim)) for project in (self.q_proj, self.k_proj)
        )
        values = self.v_proj(hidden_states).unflatten(-1, (self.heads, self.experts, self.head_dim))
        values = (values * self._scores(self.v_router, hidden_states)).sum(-2)
        outputs = attend(queries, keys, values).unsqueeze(-2) * self._scores(self.o_router, hidden_states)
        return self.o_proj(outputs.flatten(-3)), 0.0

    def _scores(self, router: nn.Linear, hidden_states: torch.Tensor) -> torch.Tensor:
        """Scores of the selected experts of each head, and 0 of the others, `[B, T, H, E, 1]`."""
        scores = router(hidden_states).sigmoid().unflatten(-1, (self.heads, self.experts))
        chosen, experts = scores.topk(self.active)
        return torch.zeros_like(scores).scatter(-1, experts, chosen).unsqueeze(-1)

    def multiply_adds(self, context: float) -> float:
        hidden, width = self.config.hidden_size, self.heads * self.head_dim
        projected = 2 * (1 + self.active) * hidden * width
        return projected + 2 * width * context + 2 * hidden * self.heads * self.experts


class StaticAttention(BaselineAttention):
    """`heads` heads of `config.head_dim`, each with keys and values of its own, on for all tokens: no others exist.

    The control of the MoH paper's claim that tokens are to choose. Heads are summed, as usual, or `averaged`: the
    control of MoH's weights, since gates that are the softmax of scores sum to 1, so that attention starts as small.
    """

    def __init__(self, config: LlamaConfig, heads: int, averaged: bool = False):
        super().__init__(config)
        self.heads, self.weight = heads, 1 / heads if averaged else 1.0
        hidden, width = config.hidden_size, heads * self.head_dim
        self.q_proj = nn.Linear(hidden, width, bias=False)
        self.k_proj = nn.Linear(hidden, width, bias=False)
        self.v_proj = nn.Linear(hidden, width, bias=False)
        self.o_proj = nn.Linear(width, hidden, bias=False)

    def mix(self, hidden_states: torch.Tensor, attend: Attend) -> tuple[torch.Tensor, float]:
        projections = (self.q_proj, self.k_proj, self.v_proj)
        outputs = attend(*(one(hidden_states).unflatten(-1, (self.heads, self.head_dim)) for one in projections))
        return self.o_proj(outputs.flatten(-2) * self.weight), 0.0

    def multiply_adds(self, context: float) -> float:
        return self.heads * self.head_dim * (4 * self.config.hidden_size + 2 * context)
