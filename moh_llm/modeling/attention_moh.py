"""Mixture-of-Head attention of one layer: project, route, `interval_attention`, output projection.

Shapes: B batch, T queries, S keys, H query heads, KV key-value heads, D head size, C hidden size.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama as llama

from .configuration_moh_llama import MoHLlamaConfig
from .heads_moh import MoHFallback
from .interval_attention_moh import Distant, interval_attention
from .routing_moh import HeadShard, IndexedModule, MoHLinear, MoHRouter
from .seen_moh import Seen, keeps_keys

GATE_GRADIENTS = ("exact", "none")


class MoHLlamaAttention(llama.LlamaAttention):
    """LLaMA attention with a gate per token and head: sum_i g_i H_i W_O^i (Eq. 4).

    With fallbacks S_i it is sum_i (g_i H_i + (1 - g_i) S_i) W_O^i.
    """

    gate_gradient = "exact"  # see `MoHLlamaPreTrainedModel.set_gate_gradient`

    def __init__(self, config: MoHLlamaConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        if config.attention_output_bias not in (None, config.attention_bias):
            width = config.num_attention_heads * self.head_dim
            self.o_proj = nn.Linear(width, config.hidden_size, bias=config.attention_output_bias)
        if config.query_key_norm:
            self.q_norm = llama.LlamaRMSNorm(self.head_dim, eps=config.rms_norm_eps)
            self.k_norm = llama.LlamaRMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.router = MoHRouter(config, layer_idx)
        kind = {"value": MoHFallback, "local": MoHLocalFallback}.get(config.head_fallback)
        self.fallback = kind(config, layer_idx) if kind and self.router.num_shared < self.router.num_heads else None

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        seen: Seen | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend over `hidden_states` `[B, T, C]`; return the output `[B, T, C]` and the attention weights, if any.

        `seen` comes from `seen_keys`. If it is None, or if all heads are on, this is LLaMA's attention, bit for bit.
        """
        query, key, own_value, shard = self._project(hidden_states)
        gate = self._route(hidden_states, query, seen, shard)
        query, key = _rotate(query.transpose(1, 2), key.transpose(1, 2), *position_embeddings)
        key, value = self._update_cache(past_key_values, key, own_value.transpose(1, 2), gate, seen, kwargs)
        how = {"scaling": self.scaling, "dropout": self.attention_dropout if self.training else 0.0}
        implementation, weights = self.config._attn_implementation, None
        if gate is not None:
            replaced, distant = self._fallback_of(hidden_states, own_value, seen, shard)
            more = {"distant": distant, "kinds": self.router.kinds(shard), "module": self} | how | kwargs
            attend = functools.partial(interval_attention, query, key, value, seen=seen, **more)
        if gate is None or self.router.is_full or (keeps_keys(implementation) and not seen.window):
            attention: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, llama.eager_attention_forward)
            out, weights = attention(self, query, key, value, attention_mask, **how, **kwargs)
        elif kwargs.get("output_attentions", self.config.output_attentions):
            way = "use all_heads_active() with attn_implementation='eager', or heads_on of moh_llm.analysis.heads"
            raise ValueError(f"output_attentions=True: layers with heads off give no attention weights; {way}")
        else:
            out = attend(first=seen.first(gate != 0))
            if distant is not None and self.training:  # a gradient, also where no query sees a distant token
                out = out + sum((0 * part).sum() for part in distant)
        out = out.reshape(*hidden_states.shape[:-1], -1, self.head_dim)
        if gate is not None:
            out = self._gated(out, gate, replaced, attend, seen)
        return self.o_proj(out.flatten(-2).contiguous()), weights

    def _project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, HeadShard | None]:
        """Queries `[B, T, H, D]`, keys and values `[B, T, KV, D]`, and with tensor parallelism this process's shard."""
        head_shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, shard = self.q_proj(hidden_states), None
        if (width := query.shape[-1]) != self.config.num_attention_heads * self.head_dim:
            shard = HeadShard.from_weight(self.q_proj.weight, width / self.head_dim, self.config)
        query, key = query.view(head_shape), self.k_proj(hidden_states).view(head_shape)
        if self.config.query_key_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        return query, key, self.v_proj(hidden_states).view(head_shape), shard

    def _route(self, hidden_states: Tensor, query: Tensor, seen: Seen | None, shard: HeadShard | None) -> Tensor | None:
        """The gate `[B, T, H]`, or None if all heads are on. `query` `[B, T, H, D]` is not rotated yet."""
        router, has_gradient = self.router, torch.is_grad_enabled()
        # No shortcut in training: a process whose documents are all short would leave modules out.
        all_on = seen is None or (0 < seen.lead == query.shape[1] and not (has_gradient and self.training))
        is_one = not has_gradient and (all_on or (router.is_full and router.router_score == "quantized"))
        if is_one and not any(part._forward_hooks for part in router.modules()):  # the scores are not needed
            return None
        _, gate = router(hidden_states, query, all_on or seen.all_on, shard=shard)
        if all_on or is_one:
            return None
        return gate if shard is None else shard.take(gate)

    def _update_cache(
        self, past: Cache | None, key: Tensor, value: Tensor, gate: Tensor | None, seen: Seen | None, kwargs: dict
    ) -> tuple[Tensor, Tensor]:
        """Add keys and values `[B, KV, T, D]` to the cache, if there is one; return all of them, `[B, KV, S, D]`."""
        if past is not None:
            return past.update(key, value, self.layer_idx, {"seen": seen, "all_on": gate is None})
        if gate is not None and not self.router.is_full and kwargs.get("cache") is not None:
            return kwargs.pop("cache").update(key, value, self.layer_idx, kwargs)  # as SDPA does (continuous batching)
        return key, value

    def _fallback_of(
        self, hidden_states: Tensor, own_value: Tensor, seen: Seen, shard: HeadShard | None
    ) -> tuple[Tensor | None, Distant | None]:
        """The fallbacks: values `[B, T, H, D]`, or distant tokens for local attention, or neither."""
        if self.fallback is None:
            return None, None
        if self.config.head_fallback == "local":
            return None, self.fallback(hidden_states, shard)
        return self.fallback(hidden_states, own_value, (seen.start == seen.last).all(-1), shard), None

    def _gated(self, out: Tensor, gate: Tensor, replaced: Tensor | None, attend: Callable, seen: Seen) -> Tensor:
        """g H + (1 - g) S `[B, T, H, D]`; `out` holds H where the gate `[B, T, H]` is not 0, else S.

        The gradient of a gate of 0 or 1 is <dO, H - S>, whose other half `attend` computes; see `set_gate_gradient`.
        """
        on, dtype = (gate != 0).unsqueeze(-1), out.dtype
        is_local, value = self.config.head_fallback == "local", 0.0 if replaced is None else replaced.to(dtype)
        out = out if is_local else torch.where(on, out, value)
        if self.router.router_score != "quantized":
            return out * gate.unsqueeze(-1).to(dtype)
        if self.gate_gradient == "none" or not (gate.requires_grad and self.router.is_trained):
            return out
        with torch.no_grad():
            other = attend(first=seen.first(~on[..., 0]))  # H where heads are off, else S
            other = other if is_local else torch.where(on, value, other)
            difference = (out - other) * torch.where(on, 1.0, -1.0).to(dtype)
        return out + (gate - gate.detach()).unsqueeze(-1).to(dtype) * difference


def _rotate(*states: Tensor) -> tuple[Tensor, Tensor]:
    """LLaMA's rotary embedding, by a faster function with the same result if one is registered."""
    return ALL_ATTENTION_FUNCTIONS.get("moh_rotary", llama.apply_rotary_pos_emb)(*states)


class MoHLocalFallback(IndexedModule):
    """The distant token of each head that is not shared: one entry that stands for all keys out of sight.

    Its value is a vector per head; its score is linear in the layer's input. `index` holds the heads.
    """

    def __init__(self, config: MoHLlamaConfig, layer_idx: int):
        shared = config.shared_heads_per_layer[layer_idx]
        super().__init__(head for head in range(config.num_attention_heads) if head not in shared)
        self.num_heads = config.num_attention_heads
        self.distant_score = MoHLinear(config.hidden_size, len(self._ids))
        self.distant_value = nn.Parameter(torch.zeros(len(self._ids), config.head_dim))

    def forward(self, hidden_states: Tensor, shard: HeadShard | None = None) -> Distant:
        """Scores `[B, T, H]` and values `[H, D]` of the distant tokens; 0 for shared heads."""
        score = self.of_heads(self.distant_score(hidden_states), -1, self.num_heads, shard)
        return score, self.of_heads(self.distant_value, 0, self.num_heads, shard)
