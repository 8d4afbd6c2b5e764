"""GQE: Tripathi and Kumar, "Grouped Query Experts: Mixture-of-Experts on GQA Self-Attention", 2026 (arXiv 2606.20945).

On grouped-query attention. In each of G groups of M query heads a token selects the k of the highest probability
p = softmax(r_g x). The output projection reads (kG + 2) D numbers (Eq. 6): the outputs of the selected heads, group by
group and not weighted; their sum weighted by p over the sum of p over all that are selected, through which the
router learns; and the output of one more head that is always on. Not stated in the paper, and as in the authors' code
(github.com/FrontiersMindAI/GQE): that head attends to the mean over groups of keys and of values; the balance loss is
0.01 M sum_m f_m P_m, averaged over groups and summed over layers; selected heads are in order of their probability.
Weights are initialised as LLaMA's, routers too.
"""

import torch
from torch import nn
from transformers import LlamaConfig

from .layers import Attend, BaselineAttention, switch_loss

BALANCE = 0.01


class GQEAttention(BaselineAttention):
    """`active` heads of each of `config.num_key_value_heads` groups per token, and one that is always on."""

    def __init__(self, config: LlamaConfig, active: int):
        super().__init__(config)
        self.groups, self.active = config.num_key_value_heads, active
        self.experts = config.num_attention_heads // self.groups  # of a group
        hidden, size = config.hidden_size, self.head_dim
        self.router = nn.Linear(hidden, self.groups * self.experts, bias=False)
        self.q_proj = nn.Linear(hidden, self.groups * self.experts * size, bias=False)
        self.shared_q_proj = nn.Linear(hidden, size, bias=False)
        self.k_proj = nn.Linear(hidden, self.groups * size, bias=False)
        self.v_proj = nn.Linear(hidden, self.groups * size, bias=False)
        self.o_proj = nn.Linear((active * self.groups + 2) * size, hidden, bias=False)

    def mix(self, hidden_states: torch.Tensor, attend: Attend) -> tuple[torch.Tensor, torch.Tensor]:
        probabilities = self.router(hidden_states).unflatten(-1, (self.groups, self.experts)).softmax(-1)
        chosen, experts = probabilities.topk(self.active)
        queries = self.q_proj(hidden_states).unflatten(-1, (self.groups, self.experts, self.head_dim))
        index = experts.unsqueeze(-1).expand(*experts.shape, self.head_dim)
        queries = queries.gather(3, index).flatten(2, 3)
        queries = torch.cat([queries, self.shared_q_proj(hidden_states).unsqueeze(2)], dim=2)
        outputs = attend(queries, *(self._of_heads(project(hidden_states)) for project in (self.k_proj, self.v_proj)))
        weights = (chosen / chosen.sum((-2, -1), keepdim=True)).flatten(2, 3).unsqueeze(-1)
        weighted = (outputs[:, :, :-1] * weights).sum(2, keepdim=True)
        slots = torch.cat([outputs[:, :, :-1], weighted, outputs[:, :, -1:]], dim=2)
        selected = torch.zeros_like(probabilities).scatter(-1, experts, 1.0)
        return self.o_proj(slots.flatten(-2)), BALANCE * switch_loss(probabilities, selected).mean()

    def _of_heads(self, projected: torch.Tensor) -> torch.Tensor:
        """Keys or values `[B, T, kG + 1, D]` of the selected heads and of the one that is always on."""
        groups = projected.unflatten(-1, (self.groups, self.head_dim))
        return torch.cat([groups.repeat_interleave(self.active, dim=2), groups.mean(2, keepdim=True)], dim=2)

    def multiply_adds(self, context: float) -> float:
        hidden, size, heads = self.config.hidden_size, self.head_dim, self.active * self.groups + 1
        projected = (heads + 2 * self.groups + heads + 1) * hidden * size
        return projected + heads * 2 * size * context + hidden * self.groups * self.experts
