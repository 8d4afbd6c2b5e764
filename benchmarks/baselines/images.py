"""Parts of vision transformers that are compared with MoH by `benchmarks/vision.py`; nothing of it is in the package.

Shapes: B batch, T tokens, C hidden size, H heads, D head size, E experts.
"""

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from moh_llm.modeling.routing_moh import MoHLinear, MoHRouter, select_top_k, straight_through
from moh_llm.vision.modeling_moh_vit import MoHViTForImageClassification

from .attention import switch_loss


def attend_to_fewer_keys(model: MoHViTForImageClassification, share: float) -> None:
    """Sparse attention: each query of each head attends to the `share` of the keys that it scores highest."""

    def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, scaling: float, **__: Any):
        scores = query @ key.transpose(2, 3) * scaling
        kept = select_top_k(scores, math.ceil(share * key.shape[2]))
        weights = scores.masked_fill(kept == 0, -torch.inf).softmax(-1)
        return (weights @ value).transpose(1, 2), weights

    ALL_ATTENTION_FUNCTIONS[f"keys_{share:g}"] = attend
    model.set_attn_implementation(f"keys_{share:g}")


class SwitchFeedForward(nn.Module):
    """Switch Transformer (Fedus et al., arXiv 2101.03961): p_i F_i(x) of the expert i that has the highest probability
    p = softmax(W x); `auxiliary_loss` is 0.01 E sum_i f_i P_i of the last forward pass. All experts are computed."""

    def __init__(self, one: nn.Module, width: int, experts: int):
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(copy.deepcopy(one) for _ in range(experts))

    def forward(self, hidden_states: Tensor) -> Tensor:
        probabilities = self.router(hidden_states).softmax(-1)
        selected = select_top_k(probabilities, 1)
        self.auxiliary_loss = 0.01 * switch_loss(probabilities, selected)
        gates = (probabilities * selected).unbind(-1)
        return sum(gate.unsqueeze(-1) * own(hidden_states) for gate, own in zip(gates, self.experts, strict=True))


def add_experts(model: MoHViTForImageClassification, experts: int = 2) -> None:
    """Put feed-forward experts, of which a token selects one, in the place of each feed-forward network."""
    for layer in model.base_model.layers:
        layer.mlp = SwitchFeedForward(layer.mlp, model.config.hidden_size, experts)
        for module in layer.mlp.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=model.config.initializer_range)


class LearnedSharedRouter(MoHRouter):
    """Two-stage routing in the authors' form, where the shared heads S are learned: those of the highest m, `[H]`.

    The gate is s A + (1 - s) B: s is 1 in S and 0 elsewhere, with the gradient of |S| softmax(m); A is what a head
    weighs as a shared one, B what it weighs as a routed one. The model's plan has no shared heads.
    """

    def __init__(self, config: Any, layer_idx: int, shared: int):
        super().__init__(config, layer_idx)
        self.count, self.top_k = shared, self.num_active - shared
        self.own = MoHLinear(config.hidden_size, self.num_heads, bias=False)
        self.stages = MoHLinear(config.hidden_size, 2, bias=False)
        self.preference = nn.Parameter(torch.zeros(self.num_heads))

    def forward(self, hidden_states: Tensor, query_states: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        """Logits of all heads, the lowest number for shared ones, and gates, both `[B, T, H]`."""
        chosen = select_top_k(self.preference, self.count)
        logits = self.routed(hidden_states).masked_fill(chosen > 0, torch.finfo(hidden_states.dtype).min)
        routed = self.top_k * nn.functional.normalize(self.select(logits) * logits.softmax(-1), p=1, dim=-1)
        scores = self.own(hidden_states)
        of_shared = scores.masked_fill(chosen == 0, -torch.inf).logsumexp(-1, keepdim=True)
        first, second = (2 * self.stages(hidden_states).softmax(-1)).split(1, -1)
        share = straight_through(chosen, self.count * self.preference.softmax(0))
        return logits, share * first * self.count * (scores - of_shared).exp() + (1 - share) * second * routed


def learn_shared_heads(model: MoHViTForImageClassification, shared: int = 2) -> None:
    """Give each layer a `LearnedSharedRouter`."""
    for number, layer in enumerate(model.base_model.layers):
        layer.attention.router = LearnedSharedRouter(model.config, number, shared)
