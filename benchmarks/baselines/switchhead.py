"""SwitchHead: Csordás et al., "SwitchHead: Accelerating Transformers with Mixture-of-Experts Attention", NeurIPS 2024
(arXiv 2312.07987).

Few heads h, each with dense queries and keys, and E experts in its value and output projections. Experts of values are
selected by s = sigmoid(W_S^h x), those of outputs by sigmoid(W_D^h x): the K largest of each, so that
V^h = sum over selected e of s_e x W_V^{h,e} and y = sum over h and selected e of s_e A^h V^h W_O^{h,e}. There is no
auxiliary loss. Rotary embedding turns all of a head, as in LLaMA (the authors' code turns a half), and weights are
initialised as LLaMA's.
"""

import torch
from torch import nn
from transformers import LlamaConfig

from .layers import Attend, BaselineAttention


class SwitchHeadAttention(BaselineAttention):
    """`config.num_attention_heads` heads of `config.head_dim`, each with `active` of `experts` per token."""

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
