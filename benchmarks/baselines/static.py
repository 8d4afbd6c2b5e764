"""Static sparse heads: the same heads are on for all tokens, so that the others need not exist.

The control of the MoH paper's claim that tokens are to choose: multi-head attention with the share of the heads that a
token of MoH uses, of the same size each. Averaged heads are the control of MoH's weights: gates that are the softmax of
scores sum to 1, so that attention starts as small as that.
"""

import torch
from torch import nn
from transformers import LlamaConfig

from .layers import Attend, BaselineAttention


class StaticAttention(BaselineAttention):
    """`heads` heads of `config.head_dim`, each with keys and values of its own; `averaged` or, as usual, summed."""

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
