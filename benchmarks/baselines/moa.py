"""MoA: Zhang et al., "Mixture of Attention Heads: Selecting Attention Heads Per Token", EMNLP 2022 (arXiv 2210.05144).

Heads are experts with their own projections of queries and outputs; all share one head of keys and values. Of E experts
a token selects the K of the highest probability p = softmax(W_g x) and adds up w_i E_i(x), with
w_i = p_i / sum over selected j of p_j; the denominator gets no gradient (the authors' code, github.com/yikangshen/MoA,
leaves it out). The loss has 0.01 E sum_i f_i P_i, where the shares f of the selections sum to 1, and 0.001 times the
mean square of log sum_i exp(W_g x)_i, of each layer: the weights that the authors' code is run with. Rotary embedding
takes the place of the paper's positions, and weights are initialised as LLaMA's, routers too.
"""

import torch
from torch import nn
from transformers import LlamaConfig

from .layers import Attend, BaselineAttention, switch_loss

BALANCE, Z = 0.01, 0.001  # weights of the two auxiliary losses


class MoAAttention(BaselineAttention):
    """`active` of `experts` heads of `config.head_dim` per token."""

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
