"""Mixture-of-Head attention of one layer: LLaMA's attention, a gate per head and token, and fallbacks of heads off."""

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

from .cache_moh import Kept, MoHCache, NearKeys, select
from .computed_heads_moh import ComputedHeads, for_heads, in_halves, of_early_queries, of_selected_queries
from .configuration_moh_llama import MoHLlamaConfig
from .documents_moh import Band, Requests
from .fallbacks_moh import MoHFallback, MoHLocalFallback, add_where_off
from .flash_attention_moh import has_flash_attention
from .masks_moh import Shown
from .routing_moh import HeadShard, MoHRouter
from .selected_attention_moh import is_faster

HEAD_SPARSE = "moh_sparse"  # the attention implementation that `moh_llm.kernels` registers


class MoHLlamaAttention(LlamaAttention):
    """LLaMA attention whose head outputs are gated per token: sum_i g_i H_i W_O^i (Eq. 4).

    With fallbacks S_i for heads that are off: sum_i (g_i H_i + (1 - g_i) S_i) W_O^i.
    """

    sparse_gate_gradient = "exact"  # see `MoHLlamaPreTrainedModel.set_sparse_gate_gradient`

    def __init__(self, config: MoHLlamaConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        if config.attention_output_bias not in (None, config.attention_bias):
            width = config.num_attention_heads * self.head_dim
            self.o_proj = nn.Linear(width, config.hidden_size, bias=config.attention_output_bias)
        if config.query_key_norm:
            self.q_norm = LlamaRMSNorm(self.head_dim, eps=config.rms_norm_eps)
            self.k_norm = LlamaRMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.normed = config.query_key_norm
        self.router = MoHRouter(config, layer_idx)
        kinds = {"value": MoHFallback, "local": MoHLocalFallback}
        has_fallback = config.head_fallback in kinds and self.router.num_shared < config.num_attention_heads
        self.fallback = kinds[config.head_fallback](config, layer_idx) if has_fallback else None

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        document_starts: tuple[torch.Tensor, torch.Tensor] | None = None,
        band: Band | Shown | Requests | None = None,
        whole_documents: bool = False,
        kept: Kept | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention over `hidden_states` `[B, T, C]`; returns the output `[B, T, C]` and the weights, if any.

        `document_starts` is what the function of that name gives; fallbacks need it, and so does "moh_sparse". `band`
        is that of local fallbacks; None: all heads are on for these tokens. `whole_documents` says that the
        mask shows each token all of its document up to itself. `kept` is what a `MoHCache` needs to know.
        """
        if document_starts is None and self.fallback is not None:
            raise ValueError("fallbacks need document_starts, which MoHLlamaModel.forward gives to its layers")
        band = band if self._is_local else None
        queries, keys, own_values, shard = self._project(hidden_states)
        gate = None if self._needs_no_gate(band) else self._route(hidden_states, queries, band, shard)

        cos, sin = position_embeddings
        queries, keys = apply_rotary_pos_emb(queries.transpose(1, 2), keys.transpose(1, 2), cos, sin)
        values = own_values.transpose(1, 2)
        keys, values, near = self._update_cache(past_key_values, keys, values, kept, band, kwargs)
        if self.config._attn_implementation == HEAD_SPARSE:
            kwargs |= self._head_sparse_arguments(gate, past_key_values, document_starts)

        attention: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        dropout = self.attention_dropout if self.training else 0.0
        is_selected = gate is not None and whole_documents and not dropout and is_faster(gate, keys)
        is_selected = is_selected and (queries.shape[2] == 1 or self.router.has_routed_heads)
        computed = self._computed_heads(queries.shape[2], band, near, is_selected, shard)
        own, attn_weights, early_outputs = computed.queries(queries), None, None
        if computed.early:
            early_outputs = of_early_queries(
                self, attention, computed, queries, keys, values, attention_mask, dropout=dropout
            )
        if not own.shape[1]:  # under autocast queries may be wider than what attention returns
            head_outputs = own if early_outputs is None else own.to(early_outputs.dtype)
        elif is_selected:
            selected = (gate if computed.ids is None else gate.index_select(-1, computed.ids)) != 0
            lead = 0 if attention_mask is not None or band is None else band.lead
            head_outputs = of_selected_queries(
                self, attention, own, keys, values, selected, document_starts, attention_mask, lead
            )
        else:
            module, *states = for_heads(self, computed.ids, keys, values, attention_mask)
            head_outputs = None if dropout else in_halves(self, computed.ids, own, *states)
            if head_outputs is None:  # serving engines look for a call of this form
                head_outputs, attn_weights = attention(
                    module, own, *states, dropout=dropout, scaling=self.scaling, **kwargs
                )
        # Backends of serving engines return the heads flattened, hence the reshape before the gate.
        head_outputs = head_outputs.reshape(*hidden_states.shape[:-1], own.shape[1], self.head_dim)
        is_fixed = self._is_fixed(computed, band, near)
        head_outputs = computed.expand(head_outputs, early_outputs, queries.shape[1], is_fixed)
        if is_fixed:
            gate = None
        elif gate is not None:
            gate = computed.mask_gate(gate).to(head_outputs.dtype)
            head_outputs = self._gate(head_outputs, gate, hidden_states, own_values, document_starts, band, shard)
        if band is not None:
            head_outputs = self._add_local_fallbacks(
                head_outputs, gate, hidden_states, queries, keys, values, band, dropout, near, shard
            )
        return self.o_proj(head_outputs.flatten(-2).contiguous()), attn_weights

    @property
    def _is_local(self) -> bool:
        return isinstance(self.fallback, MoHLocalFallback)

    def _project(
        self, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, HeadShard | None]:
        """Queries `[B, T, H, D]`, keys and values `[B, T, KV, D]` of this process, and its shard of the heads."""
        head_shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        queries, shard = self.q_proj(hidden_states), None
        if (width := queries.shape[-1]) != self.config.num_attention_heads * self.head_dim:
            shard = HeadShard.of(self.q_proj.weight, width / self.head_dim, self.config)
        queries, keys = queries.view(head_shape), self.k_proj(hidden_states).view(head_shape)
        if self.normed:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        return queries, keys, self.v_proj(hidden_states).view(head_shape), shard

    def _needs_no_gate(self, band: Band | Shown | Requests | None) -> bool:
        """Whether all heads are on for all tokens, in inference, and no hook of the router asks for its logits."""
        if band is not None or torch.is_grad_enabled() or self.config._attn_implementation == HEAD_SPARSE:
            return False
        return self._is_local and not self.router._forward_hooks

    def _route(
        self,
        hidden_states: torch.Tensor,
        queries: torch.Tensor,
        band: Band | Shown | Requests | None,
        shard: HeadShard | None,
    ) -> torch.Tensor:
        """The gate `[B, T, H]` of this process's heads, given queries `[B, T, H, D]` before rotary embedding."""
        # With local fallbacks a document's first tokens have all heads on: their result is the base's.
        all_on = self._is_local and (band is None or (band.early != 0 and band.all_on))
        _, gate = self.router(hidden_states, queries, all_on, shard=shard)
        return gate if shard is None else shard.take(gate)

    def _update_cache(
        self,
        past_key_values: Cache | None,
        keys: torch.Tensor,
        values: torch.Tensor,
        kept: Kept | None,
        band: Band | Shown | Requests | None,
        kwargs: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor, NearKeys | None]:
        """All keys and values, given those of this pass `[B, KV, T, D]`, and what a `MoHCache` keeps apart."""
        near = None
        if isinstance(past_key_values, MoHCache):
            layer = past_key_values.layers[self.layer_idx]
            if keys.shape[1] != self.config.num_key_value_heads:
                raise ValueError("a MoHCache does not work with tensor parallelism; use a DynamicCache")
            if layer.local_groups and band is not None:
                if self.router.num_active == self.router.num_heads:
                    raise ValueError("a MoHCache lacks keys that all heads read; use a DynamicCache")
                if self.config._attn_implementation in ("eager", HEAD_SPARSE):
                    raise ValueError(
                        f"attn_implementation={self.config._attn_implementation!r} does not work with a MoHCache; use "
                        "'sdpa' or a DynamicCache"
                    )
            needs_all = band is None or isinstance(band, Shown) or (band.early != 0 and self._has_early_heads)
            keys, values = past_key_values.update(keys, values, self.layer_idx, {"kept": kept, "all": needs_all})
            near = layer.take_near()
        elif past_key_values is not None:
            keys, values = past_key_values.update(keys, values, self.layer_idx)
        if isinstance(band, Requests) and band.read is None:  # what SDPA does with a paged cache
            keys, values = kwargs.pop("cache").update(keys, values, self.layer_idx, kwargs)
        return keys, values, near

    def _head_sparse_arguments(
        self, gate: torch.Tensor, past_key_values: Cache | None, document_starts: tuple[torch.Tensor, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Arguments of "moh_sparse" beside those of all attention functions."""
        if past_key_values is None:  # documents are distinguished without a cache only
            positions, starts = document_starts
            return {"head_gate": gate, "is_first": positions == starts}
        if past_key_values.is_compileable:
            raise ValueError(f"attn_implementation={HEAD_SPARSE!r} does not work with static caches; use 'sdpa'")
        return {"head_gate": gate}

    def _computed_heads(
        self,
        length: int,
        band: Band | Shown | Requests | None,
        near: NearKeys | None,
        is_selected: bool,
        shard: HeadShard | None,
    ) -> ComputedHeads:
        """Which heads to compute for so many queries: those that some token may have on, where that saves work."""
        if near is not None:  # the cache has the keys of the others no more
            steps = torch.arange(self.num_key_value_groups, device=near.kept_groups.device)
            return ComputedHeads((near.kept_groups[:, None] * self.num_key_value_groups + steps).flatten())
        if band is None or is_selected or band.read is not None or not self._skips_heads(length, band.early):
            return ComputedHeads()
        used = self.router.used_heads(shard)
        if band.early and self._has_early_heads:
            unused = self.router.unused_heads(shard)
            if len(unused):  # else all heads of this shard may be on later
                return ComputedHeads(used, band.early, unused)
        return ComputedHeads(used)

    def _is_fixed(self, computed: ComputedHeads, band: Band | Shown | Requests | None, near: NearKeys | None) -> bool:
        """Whether heads with a fallback are off after `band.lead`, and the others are on, in inference."""
        if computed.ids is None or near is not None or torch.is_grad_enabled():
            return False
        return self._is_local and not self.router.has_routed_heads and band.early == band.lead

    def _skips_heads(self, length: int, early: int | None) -> bool:
        """Whether full attention is computed for the heads alone that some token of a pass may have on.

        `early` is that of the pass's `Band`: for these queries the other heads are computed, too.
        """
        router = self.router
        # Other attention functions than SDPA read more of kwargs.
        can_split = early is not None and early < length and self.config._attn_implementation == "sdpa"
        return (
            (router.local_groups > 0 or (router.router_type == "none" and router.routed_groups > 0))
            and router.num_active < router.num_heads
            and length > self.config.all_heads_until  # up to there the result is the base's bit for bit
            and self.config._attn_implementation not in ("eager", HEAD_SPARSE)  # one returns weights of all heads
            and (not self._has_early_heads or early == 0 or can_split)
        )

    @property
    def _has_early_heads(self) -> bool:
        """Whether tokens have all heads on whose local attention is not the head's own."""
        return self._is_local and self.config.all_heads_until > self.fallback.window + self.fallback.sinks

    def _gate(
        self,
        head_outputs: torch.Tensor,
        gate: torch.Tensor,
        hidden_states: torch.Tensor,
        own_values: torch.Tensor,
        document_starts: tuple[torch.Tensor, torch.Tensor] | None,
        band: Band | Shown | Requests | None,
        shard: HeadShard | None,
    ) -> torch.Tensor:
        """Head outputs `[B, T, H, D]` times the gate, plus value fallbacks, which are exact zeros where it is 1."""
        gates_itself = self.config._attn_implementation == HEAD_SPARSE
        if isinstance(self.fallback, MoHFallback):
            positions, starts = document_starts
            return self.fallback(
                head_outputs, gate, hidden_states, own_values, positions == starts, gated=gates_itself, shard=shard
            )
        if gates_itself or (self._is_local and band is None):
            return head_outputs
        return head_outputs * gate.unsqueeze(-1)

    def _add_local_fallbacks(
        self,
        head_outputs: torch.Tensor,
        gate: torch.Tensor | None,
        hidden_states: torch.Tensor,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        band: Band | Shown | Requests,
        dropout: float,
        near: NearKeys | None,
        shard: HeadShard | None,
    ) -> torch.Tensor:
        """Gated head outputs `[B, T, H, D]` plus local fallbacks, which queries before `band.lead` have none of.

        Without a gate heads that have a fallback are off.
        """
        is_step = gate is not None and gate.shape[:2] == (1, 1) and has_flash_attention(gate)
        if is_step and bool((gate == 1).all()):  # to ask costs little on a CPU; of several rows one has a head off
            return head_outputs
        if band.read is not None:
            keys, values = band.read(self)
        lead = band.lead
        local = self.fallback(
            queries[:, :, lead:], keys, values, hidden_states[:, lead:], band, self.scaling, dropout, near, shard
        )
        heads, local = self.fallback.heads(shard), local.to(head_outputs.dtype)
        if gate is None:
            head_outputs[:, lead:].index_copy_(2, heads, local)
            return head_outputs
        off = (1 - select(gate[:, lead:], 2, heads)).unsqueeze(-1)
        return add_where_off(head_outputs, local, off, heads, lead)
