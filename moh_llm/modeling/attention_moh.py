"""Mixture-of-Head attention of one layer: project, route, `interval_attention`, output projection.

Shapes: B batch, T queries, S keys (of the cache and of this pass), H query heads, KV key-value heads, D head size, C
hidden size.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaRMSNorm,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from .configuration_moh_llama import MoHLlamaConfig
from .interval_attention_moh import Distant, interval_attention, masked_attention
from .routing_moh import HeadShard, IndexedModule, MoHLinear, MoHRouter
from .seen_moh import Seen, keeps_keys

GATE_GRADIENTS = ("exact", "sampled", "none")
_SAMPLED = 1 / 16  # of the heads that are off


class MoHLlamaAttention(LlamaAttention):
    """LLaMA attention whose head outputs are gated per token: sum_i g_i H_i W_O^i (Eq. 4).

    With fallbacks S_i for heads that are off: sum_i (g_i H_i + (1 - g_i) S_i) W_O^i.
    """

    gate_gradient = "exact"  # see `MoHLlamaPreTrainedModel.set_gate_gradient`

    def __init__(self, config: MoHLlamaConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        if config.attention_output_bias not in (None, config.attention_bias):
            width = config.num_attention_heads * self.head_dim
            self.o_proj = nn.Linear(width, config.hidden_size, bias=config.attention_output_bias)
        if config.query_key_norm:
            self.q_norm = LlamaRMSNorm(self.head_dim, eps=config.rms_norm_eps)
            self.k_norm = LlamaRMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.router = MoHRouter(config, layer_idx)
        fallbacks = {"value": MoHFallback, "local": MoHLocalFallback}
        has_fallback = config.head_fallback in fallbacks and self.router.num_shared < config.num_attention_heads
        self.fallback = fallbacks[config.head_fallback](config, layer_idx) if has_fallback else None

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        seen: Seen | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention over `hidden_states` `[B, T, C]`; returns the output `[B, T, C]`, and LLaMA's attention weights.

        `seen` is what `seen_keys` gives. Without it, and where all heads are on, attention is LLaMA's.
        """
        query, key, own_value, shard = self._project(hidden_states)
        gate = self._route(hidden_states, query, seen, shard)
        query, key = apply_rotary_pos_emb(query.transpose(1, 2), key.transpose(1, 2), *position_embeddings)
        key, value = self._update_cache(past_key_values, key, own_value.transpose(1, 2), gate, seen, kwargs)
        base = functools.partial(self._base_attention, query, key, value, attention_mask, kwargs)
        if gate is None:
            out, weights = base()
        else:
            fallback = self._fallback_of(hidden_states, own_value, seen, shard)
            out, weights = self._mixture(query, key, value, gate, seen, base, fallback, shard, kwargs)
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1).contiguous()), weights

    def _project(
        self, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, HeadShard | None]:
        """Queries `[B, T, H, D]`, keys and values `[B, T, KV, D]` of this process, and its shard of the heads."""
        head_shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, shard = self.q_proj(hidden_states), None
        if (width := query.shape[-1]) != self.config.num_attention_heads * self.head_dim:
            shard = HeadShard.of(self.q_proj.weight, width / self.head_dim, self.config)
        query, key = query.view(head_shape), self.k_proj(hidden_states).view(head_shape)
        if self.config.query_key_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        return query, key, self.v_proj(hidden_states).view(head_shape), shard

    def _route(
        self, hidden_states: torch.Tensor, query: torch.Tensor, seen: Seen | None, shard: HeadShard | None
    ) -> torch.Tensor | None:
        """The gate `[B, T, H]` of this process's heads; None where it is known to be 1 and nobody asks for scores.

        `query` is `[B, T, H, D]` before rotary embedding.
        """
        router = self.router
        all_on: torch.Tensor | bool = seen is None or 0 < seen.lead == query.shape[1]
        needs_scores = torch.is_grad_enabled() or len(router._forward_hooks) > 0
        if (all_on or (router.is_full and router.router_score == "quantized")) and not needs_scores:
            return None
        _, gate = router(hidden_states, query, all_on or (False if seen.all_on is None else seen.all_on), shard=shard)
        if all_on:
            return None
        return gate if shard is None else shard.take(gate)

    def _update_cache(
        self,
        past_key_values: Cache | None,
        key: torch.Tensor,
        value: torch.Tensor,
        gate: torch.Tensor | None,
        seen: Seen | None,
        kwargs: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[B, KV, S, D]` of the cache and of this pass, given those of this pass."""
        if past_key_values is not None:
            return past_key_values.update(key, value, self.layer_idx, {"seen": seen, "all_on": gate is None})
        if gate is not None and not self.router.is_full and kwargs.get("cache") is not None:
            return kwargs.pop("cache").update(key, value, self.layer_idx, kwargs)  # as SDPA does (continuous batching)
        return key, value

    def _base_attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        kwargs: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """LLaMA's attention, by the implementation that the user chose."""
        attention: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        dropout = self.attention_dropout if self.training else 0.0
        return attention(self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs)

    def _mixture(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        gate: torch.Tensor,
        seen: Seen,
        base: Callable,
        fallback: torch.Tensor | Distant | None,
        shard: HeadShard | None,
        kwargs: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Gated heads and fallbacks `[B, T, H, D]`, given the gate `[B, T, H]`, and attention weights, if any.

        `fallback` is a value for each head and token, the distant tokens of local attention, or None.
        """
        on, weights = gate != 0, None
        distant = fallback if isinstance(fallback, tuple) else None
        dropout = self.attention_dropout if self.training else 0.0
        given = query, key, value
        how = {"seen": seen, "scaling": self.scaling, "distant": distant, "dropout": dropout}
        attend = functools.partial(
            interval_attention, *given, **how, kinds=self.router.kinds(shard), module=self, **kwargs
        )
        if self.router.is_full or (distant is None and keeps_keys(self.config._attn_implementation)):
            out, weights = base()
        elif self.config._attn_implementation == "eager":
            out, weights = masked_attention(*given, seen.first(on), **how, with_weights=True)
        else:
            out = attend(first=seen.first(on))
        out = out.reshape(*gate.shape, self.head_dim)
        if distant is None:
            out = torch.where(on.unsqueeze(-1), out, 0.0 if fallback is None else fallback.to(out.dtype))
        if self.router.router_score == "weighted":
            return out * gate.unsqueeze(-1).to(out.dtype), weights
        if gate.requires_grad and torch.is_grad_enabled() and self.gate_gradient != "none":
            difference = self._difference(out, on, attend, seen, fallback)
            out = out + (gate - gate.detach()).unsqueeze(-1).to(out.dtype) * difference
        return out, weights

    @torch.no_grad()
    def _difference(
        self,
        out: torch.Tensor,
        on: torch.Tensor,
        attend: Callable[..., torch.Tensor],
        seen: Seen,
        fallback: torch.Tensor | Distant | None,
    ) -> torch.Tensor:
        """H - S `[B, T, H, D]`, what the gate's gradient is taken with, given the one of both that a head gave.

        With `gate_gradient` "sampled" H is computed of a share of the heads that are off, and counts by as much more.
        """
        share = 1.0 if self.gate_gradient == "exact" else _SAMPLED
        compared = ~on if share == 1 else ~on & (torch.rand(on.shape, device=on.device) < share)
        other = attend(first=seen.first(compared))
        if not isinstance(fallback, tuple):
            other = torch.where(compared.unsqueeze(-1), other, 0.0 if fallback is None else fallback.to(out.dtype))
        return (out - other) * torch.where(on, 1.0, -1.0 / share).to(out.dtype).unsqueeze(-1)

    def _fallback_of(
        self, hidden_states: torch.Tensor, own_value: torch.Tensor, seen: Seen, shard: HeadShard | None
    ) -> torch.Tensor | Distant | None:
        """What heads that are off give beside attention: a value `[B, T, H, D]`, or their distant tokens."""
        if isinstance(self.fallback, MoHLocalFallback):
            return self.fallback(hidden_states, shard)
        if self.fallback is None:
            return None
        return self.fallback(hidden_states, own_value, (seen.start == seen.last).all(-1), shard)


class MoHLocalFallback(IndexedModule):
    """What a head that is off contributes: its local attention, with a distant token for what is out of sight.

    The distant token's value is a vector per head, and its score linear in the layer's input. A head that spreads its
    attention over the whole text is nearly that; a head that looks up single tokens is not. `index` holds the heads
    that are not shared, in the order of the parameters.
    """

    def __init__(self, config: MoHLlamaConfig, layer_idx: int):
        shared = config.shared_heads_per_layer[layer_idx]
        super().__init__(head for head in range(config.num_attention_heads) if head not in shared)
        self.num_heads = config.num_attention_heads
        self.distant_score = MoHLinear(config.hidden_size, len(self._ids))
        self.distant_value = nn.Parameter(torch.zeros(len(self._ids), config.head_dim))

    def forward(self, hidden_states: torch.Tensor, shard: HeadShard | None = None) -> Distant:
        """Scores `[B, T, H]` and values `[H, D]` of the distant tokens; 0 of shared heads, which have none."""
        score = self.of_heads(self.distant_score(hidden_states), -1, self.num_heads, shard)
        return score, self.of_heads(self.distant_value, 0, self.num_heads, shard)


class MoHFallback(IndexedModule):
    """What a routed head that is off contributes: b_h + a_h(x) v, with a_h linear in the layer's input x.

    v is the token's own value vector of the head's group. A head mostly attends to a few sink
    positions, whose mixture hardly varies (b_h), and to the token itself (a_h(x) v): this is that
    head without its attention to other tokens. It costs what the router costs, and goes through the
    output projection in the head's place. A document's first token attends to nothing but itself: its
    heads are v, and so are its fallbacks. What it passes on, and what later tokens use as a sink, is
    thereby the base's, bit for bit.
    """

    def __init__(self, config: MoHLlamaConfig, layer_idx: int):
        super().__init__(config.routed_heads(layer_idx))
        self.num_heads = config.num_attention_heads
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.own_value = MoHLinear(config.hidden_size, len(self._ids))
        self.bias = nn.Parameter(torch.zeros(len(self._ids), config.head_dim))

    def forward(
        self, hidden_states: torch.Tensor, own_value: torch.Tensor, is_first: torch.Tensor, shard: HeadShard | None
    ) -> torch.Tensor:
        """S_h of each head and token, `[B, T, H, D]`.

        Args:
            hidden_states: the attention layer's input `[B, T, C]`.
            own_value: values of these tokens `[B, T, KV, D]`.
            is_first: whether a token is the first of its document, `[B or 1, T]`.
            shard: the heads that these are, of all.
        """
        share = self.of_heads(self.own_value(hidden_states), -1, self.num_heads, shard)
        share = torch.where(is_first.unsqueeze(-1), 1.0, share.to(own_value.dtype)).unsqueeze(-1)
        bias = self.of_heads(self.bias, 0, self.num_heads, shard).to(own_value.dtype)
        bias = torch.where(is_first[..., None, None], 0.0, bias)
        return bias + share * own_value.repeat_interleave(self.num_key_value_groups, dim=2)
