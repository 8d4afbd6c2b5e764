"""LLaMA with Mixture-of-Head attention ("MoH: Multi-Head Attention as Mixture-of-Head Attention").

All of LLaMA's weights keep their names and meaning; learned routers add a few tensors under
`self_attn.router`. The gate multiplies head outputs after the attention call, so every attention
backend works unchanged. With all heads active and quantised scores the model is LLaMA, bit for bit.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.modeling_outputs import BaseModelOutputWithPast, MoeCausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaModel,
    LlamaPreTrainedModel,
    LlamaRMSNorm,
    apply_rotary_pos_emb,
    eager_attention_forward,
)
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder

from .cache_moh import MoHCache
from .configuration_moh_llama import MoHLlamaConfig
from .local_attention_moh import Band, MoHLocalFallback, Requests
from .routing_moh import (
    HeadShard,
    IndexedModule,
    MoHFallback,
    MoHLinear,
    MoHRouter,
    document_starts,
    load_balancing_loss,
)
from .selected_attention_moh import has_flash_attention, is_faster, selected_attention

HEAD_SPARSE = "moh_sparse"  # the attention implementation that `moh_llm.kernels` registers
GATE_GRADIENTS = ("exact", "selected")


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
        band: Band | Requests | None = None,
        whole_documents: bool = False,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention over `hidden_states` `[B, T, C]`; returns the output `[B, T, C]` and the weights, if any.

        `document_starts` is what the function of that name gives; fallbacks need it, and so does "moh_sparse". `band`
        is that of local fallbacks; None: all heads are on for these tokens. `whole_documents` says that the
        mask shows each token all of its document up to itself.
        """
        input_shape = hidden_states.shape[:-1]
        head_shape = (*input_shape, -1, self.head_dim)

        queries, shard = self.q_proj(hidden_states), None
        if (width := queries.shape[-1]) != self.config.num_attention_heads * self.head_dim:
            shard = HeadShard.of(self.q_proj.weight, width / self.head_dim, self.config)
            if isinstance(past_key_values, MoHCache):
                raise ValueError("a MoHCache does not work with tensor parallelism; use a DynamicCache")
        queries = queries.view(head_shape)
        keys = self.k_proj(hidden_states).view(head_shape)
        if self.normed:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        keys = keys.transpose(1, 2)
        own_values = self.v_proj(hidden_states).view(head_shape)
        values = own_values.transpose(1, 2)
        if document_starts is None and self.fallback is not None:
            raise ValueError("fallbacks need document_starts, which MoHLlamaModel.forward gives to its layers")
        is_local = isinstance(self.fallback, MoHLocalFallback)
        band = band if is_local else None
        # With local fallbacks a document's first tokens have all heads on: their result is the base's.
        _, gate = self.router(hidden_states, queries, is_local and (band is None or band.all_on), shard=shard)
        gate = gate if shard is None else shard.take(gate)

        cos, sin = position_embeddings
        queries, keys = apply_rotary_pos_emb(queries.transpose(1, 2), keys, cos, sin)
        near = kept = None
        if isinstance(past_key_values, MoHCache):
            layer = past_key_values.layers[self.layer_idx]
            needs_all = band is None or (band.early != 0 and self._has_early_heads)
            how = {"starts": None if document_starts is None else document_starts[1], "all": needs_all}
            keys, values = past_key_values.update(keys, values, self.layer_idx, how)
            near = layer.take_near()
            if near is not None:
                kept = torch.tensor(layer.kept_groups, dtype=torch.long, device=keys.device)
            if layer.local_groups and band is not None:
                if self.router.num_active == self.router.num_heads:
                    raise ValueError("a MoHCache lacks keys that all heads read; use a DynamicCache")
                if self.config._attn_implementation in ("eager", HEAD_SPARSE):
                    raise ValueError(
                        f"attn_implementation={self.config._attn_implementation!r} does not work with a MoHCache; use "
                        "'sdpa' or a DynamicCache"
                    )
        elif past_key_values is not None:
            keys, values = past_key_values.update(keys, values, self.layer_idx)

        read = band.read if isinstance(band, Requests) else None
        if isinstance(band, Requests) and read is None:  # what SDPA does with a paged cache
            keys, values = kwargs.pop("cache").update(keys, values, self.layer_idx, kwargs)

        gates_itself = self.config._attn_implementation == HEAD_SPARSE
        if gates_itself:
            kwargs["head_gate"] = gate
            if past_key_values is None:  # documents are distinguished without a cache only
                positions, starts = document_starts
                kwargs["is_first"] = positions == starts
            elif past_key_values.is_compileable:
                raise ValueError(f"attn_implementation={HEAD_SPARSE!r} does not work with static caches; use 'sdpa'")
        attention: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        dropout = self.attention_dropout if self.training else 0.0
        is_selected = whole_documents and not dropout and is_faster(gate, keys)
        heads = None  # those that are computed; None: all
        if kept is not None:
            heads = kept[:, None] * self.num_key_value_groups
            heads = (heads + torch.arange(self.num_key_value_groups, device=kept.device)).flatten()
        elif band is not None and not is_selected and read is None and self._skips_heads(queries.shape[2], band.early):
            heads = self.router.used_heads(shard)
        own, own_gate, attn_weights, early_outputs = queries, gate, None, None
        if heads is not None and band.early and self._has_early_heads:
            unused = self.router.unused_heads(shard)
            if len(unused):  # else all heads of this shard may be on later
                given = queries, keys, values, attention_mask, band.early, dropout
                early_outputs = self._early_outputs(attention, unused, *given)
        if heads is not None:
            own = queries.transpose(1, 2).index_select(2, heads).transpose(1, 2)  # outputs get its strides
            own_gate = gate.index_select(-1, heads)
            if early_outputs is None:  # the fallbacks of the others are these heads where all are on
                gate = torch.zeros_like(gate).index_copy(-1, heads, own_gate)
        if not own.shape[1]:
            head_outputs = own
        elif is_selected:
            head_outputs = selected_attention(own, keys, values, own_gate != 0, *document_starts, self.scaling)
        else:
            module, read_keys, read_values = self, keys, values
            if heads is not None:
                module, read_keys, read_values, attention_mask = self._for_heads(heads, keys, values, attention_mask)
            head_outputs, attn_weights = attention(
                module, own, read_keys, read_values, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs
            )
        # Backends of serving engines return the heads flattened, hence the reshape before the gate.
        head_outputs = head_outputs.reshape(*input_shape, own.shape[1], self.head_dim)
        if heads is not None:
            every = head_outputs.new_zeros(head_shape[:-2] + queries.shape[1::2])
            head_outputs = every.index_copy(2, heads, head_outputs)
        if early_outputs is not None:
            early = head_outputs[:, : band.early].index_copy(2, unused, early_outputs)
            head_outputs = torch.cat([early, head_outputs[:, band.early :]], dim=1)
        gate = gate.to(head_outputs.dtype)
        # Where the gate is 1 a fallback adds an exact zero.
        if self.fallback is not None and not is_local:
            positions, starts = document_starts
            is_first = positions == starts
            head_outputs = self.fallback(head_outputs, gate, hidden_states, own_values, is_first, gates_itself, shard)
        elif not (gates_itself or (is_local and band is None)):
            head_outputs = head_outputs * gate.unsqueeze(-1)
        is_step = queries.shape[2] == 1 and has_flash_attention(gate)
        if band is not None and not (is_step and bool((gate == 1).all())):  # to ask costs nothing on a CPU
            if read is not None:
                keys, values = read(self)
            late, late_states = queries[:, :, band.lead :], hidden_states[:, band.lead :]
            given = late, keys, values, late_states, band, self.scaling, dropout
            local = self.fallback(*given, near=near, kept=kept, shard=shard)
            heads = self.fallback.heads(shard)
            off = 1 - gate[:, band.lead :].index_select(-1, heads)
            first, rest = head_outputs[:, : band.lead], head_outputs[:, band.lead :]
            rest = rest.index_add(2, heads, local * off.unsqueeze(-1))
            head_outputs = torch.cat([first, rest], dim=1) if band.lead else rest
        return self.o_proj(head_outputs.reshape(*input_shape, -1).contiguous()), attn_weights

    def _skips_heads(self, length: int, early: int | None) -> bool:
        """Whether full attention is computed for the heads alone that some token of a pass may have on.

        `early` is that of the pass's `Band`: for these queries the other heads are computed, too.
        """
        router = self.router
        return (
            (router.local_groups > 0 or (router.router_type == "none" and router.routed_groups > 0))
            and router.num_active < router.num_heads
            and length > self.config.all_heads_until  # up to there the result is the base's bit for bit
            and self.config._attn_implementation not in ("eager", HEAD_SPARSE)  # one returns weights of all heads
            and (not self._has_early_heads or early == 0 or self._can_split(length, early))
        )

    def _can_split(self, length: int, early: int | None) -> bool:
        """Whether attention can be called for the first `early` queries alone; others than SDPA read more of kwargs."""
        return early is not None and early < length and self.config._attn_implementation == "sdpa"

    @property
    def _has_early_heads(self) -> bool:
        """Whether tokens have all heads on whose local attention is not the head's own."""
        return (
            isinstance(self.fallback, MoHLocalFallback)
            and self.config.all_heads_until > self.fallback.window + self.fallback.sinks
        )

    def _early_outputs(
        self,
        attention: Callable,
        heads: torch.Tensor,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        attention_mask: torch.Tensor | None,
        early: int,
        dropout: float,
    ) -> torch.Tensor:
        """Outputs `[B, early, heads, D]` of the first `early` queries, of heads that no later token may have on."""
        seen = keys.shape[2] - (queries.shape[2] - early)
        keys, values = keys[:, :, :seen], values[:, :, :seen]
        if attention_mask is not None:
            attention_mask = attention_mask[:, :, :early, :seen]
        module, keys, values, attention_mask = self._for_heads(heads, keys, values, attention_mask)
        own = queries[:, :, :early].index_select(1, heads)
        return attention(module, own, keys, values, attention_mask, dropout=dropout, scaling=self.scaling)[0]

    def _for_heads(
        self, heads: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, attention_mask: torch.Tensor | None
    ) -> tuple["MoHLlamaAttention | _HeadsAlone", torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Module, keys, values and mask to call attention with for these heads, given those of all or of theirs."""
        if isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 4 and attention_mask.shape[1] > 1:
            attention_mask = attention_mask.index_select(1, heads)
        if keys.shape[1] * self.num_key_value_groups == len(heads):
            return self, keys, values, attention_mask
        groups = heads // self.num_key_value_groups
        return _HeadsAlone(self), keys.index_select(1, groups), values.index_select(1, groups), attention_mask


class _HeadsAlone:
    """An attention module for attention functions, where each query head comes with its own key-value head."""

    num_key_value_groups = 1

    def __init__(self, attention: MoHLlamaAttention):
        self._attention = attention

    def __getattr__(self, name: str):
        return getattr(self._attention, name)


class MoHLlamaPreTrainedModel(LlamaPreTrainedModel):
    """Loading, initialisation and the head budget that all MoH models share."""

    config: MoHLlamaConfig
    _can_record_outputs = LlamaPreTrainedModel._can_record_outputs | {"router_logits": OutputRecorder(MoHRouter)}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, MoHLinear):
            init.normal_(module.weight, mean=0.0, std=self.config.initializer_range)
        if isinstance(module, MoHLinear | MoHFallback) and module.bias is not None:
            init.zeros_(module.bias)
        if isinstance(module, MoHLocalFallback):
            init.zeros_(module.distant_value)
        if isinstance(module, IndexedModule):
            module.reset_index()

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        """The attention implementation to use; "moh_sparse" raises ImportError where MoH-LLM is not installed."""
        if requested_attention == HEAD_SPARSE:
            try:
                importlib.import_module("moh_llm.kernels")
            except ImportError as error:
                raise ImportError(
                    f"attn_implementation={HEAD_SPARSE!r} needs kernels of MoH-LLM: pip install moh-llm, or use 'sdpa'"
                ) from error
        return super().get_correct_attn_implementation(requested_attention, is_init_check)

    @property
    def routers(self) -> list[MoHRouter]:
        """The routers, one per layer, first layer first."""
        model = getattr(self, self.base_model_prefix, self)
        return [layer.self_attn.router for layer in model.layers]

    def set_active_heads(self, num_active_heads: int | Sequence[int] | None) -> None:
        """Change how many heads a token uses, shared + Top-K, until the next call; the config keeps its numbers.

        One number for all layers or one per layer; `None` goes back to the config's. Raises ValueError for a number
        below a layer's shared heads, above its heads, or not of whole groups.
        """
        if num_active_heads is None:
            num_active_heads = self.config.active_heads_per_layer
        elif isinstance(num_active_heads, int):
            num_active_heads = [num_active_heads] * len(self.routers)
        top_k = [router.top_k_of(active) for router, active in zip(self.routers, num_active_heads, strict=True)]
        for router, active, k in zip(self.routers, num_active_heads, top_k, strict=True):
            router.num_active, router.top_k = active, k

    @torch.no_grad()
    def token_heads(
        self,
        input_ids: torch.LongTensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        **kwargs,
    ) -> torch.Tensor:
        """Which heads each token has on, bool `[B, layers, T, H]`, from one forward pass of the decoder.

        It is what the gates of the attention layers are made of: shared heads are on, those that are never on are off,
        and a document's first tokens have all heads on with local fallbacks. Padding has entries, too, which mean
        nothing. Arguments are those of `forward`, `past_key_values` included; without a mask documents begin where
        `position_ids` restart.
        """
        found: list[torch.Tensor] = []

        def keep(router: MoHRouter, args: tuple, output: tuple) -> None:
            found.append(router.heads_on(output[0], *args[2:]).to(input_ids.device))

        handles = [router.register_forward_hook(keep) for router in self.routers]
        try:
            decoder = getattr(self, self.base_model_prefix, self)
            decoder(input_ids, attention_mask, position_ids, use_cache=False, **kwargs)
        finally:
            for handle in handles:
                handle.remove()
        return torch.stack(found, dim=1)

    def make_cache(self) -> MoHCache:
        """An empty cache for `past_key_values` that keeps of key-value groups that are never on only what is read."""
        return MoHCache(self.config)

    def set_sparse_gate_gradient(self, kind: str) -> None:
        """Set which gradient the gate of a head that is off gets from that head's output, with "moh_sparse".

        `"exact"` (default), for which a training step computes these outputs in its forward pass, or `"selected"`:
        none, so that it computes heads that are on only. Raises ValueError for another word.
        """
        if kind not in GATE_GRADIENTS:
            raise ValueError(f"sparse_gate_gradient={kind!r} must be one of {', '.join(GATE_GRADIENTS)}")
        for module in self.modules():
            if isinstance(module, MoHLlamaAttention):
                module.sparse_gate_gradient = kind

    @contextlib.contextmanager
    def all_heads_active(self) -> Iterator[None]:
        """Within the block every head is on: with quantised scores the model is its dense base."""
        before = [router.num_active for router in self.routers]
        self.set_active_heads(self.config.num_attention_heads)
        try:
            yield
        finally:
            self.set_active_heads(before)


class MoHLlamaModel(MoHLlamaPreTrainedModel, LlamaModel):
    """The decoder without a head on top; its forward pass is LLaMA's, whose layers also get the documents' starts."""

    def __init__(self, config: MoHLlamaConfig):
        super().__init__(config)
        for index, layer in enumerate(self.layers):
            layer.self_attn = MoHLlamaAttention(config, index)
        self.post_init()

    @merge_with_config_defaults
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPast | tuple:
        """Hidden states `[B, T, C]` of LLaMA's arguments."""
        inputs = input_ids if inputs_embeds is None else inputs_embeds
        implementation = self.config._attn_implementation
        own_mask = attention_mask is not None and not (
            isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 2
        )
        # What `selected_attention` can be taken for. With all heads on the base's attention gives the base's bits.
        whole_documents = implementation == "sdpa" and not own_mask and not torch.is_grad_enabled()
        whole_documents = whole_documents and any(router.num_active < router.num_heads for router in self.routers)
        if inputs is not None and (
            self.config.head_fallback != "none" or implementation == HEAD_SPARSE or whole_documents
        ):
            paged = kwargs.get("cache") is not None
            needs_band = self.config.head_fallback == "local" and kwargs.get("band") is None
            if needs_band and (
                implementation not in ALL_MASK_ATTENTION_FUNCTIONS._global_mapping
                or (paged and (implementation != "sdpa" or kwargs.get("block_table") is not None))
            ):
                way = "use 'sdpa'" if paged else "use 'sdpa', 'eager' or a flash attention of transformers"
                if implementation == "vllm":
                    way = "install MoH-LLM in vLLM's environment and leave out --model-impl"
                raise ValueError(
                    f"head_fallback='local' reads keys that attn_implementation={implementation!r} keeps to itself; "
                    + way
                )
            starts = document_starts(
                inputs, attention_mask, position_ids, past_key_values, bool(use_cache), implementation, paged
            )
            kwargs["document_starts"] = starts
            seen = self.config.local_window, self.config.local_sinks, self.config.local_start
            if needs_band and paged:
                edges = kwargs["cu_seq_lens_q"].tolist(), kwargs["cu_seq_lens_k"]["full_attention"].tolist()
                kwargs["band"] = Requests.of(position_ids, *edges, *seen)
            elif needs_band and not self._all_heads_on(inputs.shape[1], past_key_values):
                kwargs["band"] = Band.of(*starts, *seen)
            kwargs["whole_documents"] = whole_documents
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )

    def _all_heads_on(self, length: int, past_key_values: Cache | None) -> bool:
        """Whether it is known without asking the device that all tokens are first ones of their document."""
        before = 0 if past_key_values is None else past_key_values.get_seq_length()
        return isinstance(before, int) and before + length <= self.config.all_heads_until


def predicted_tokens(
    labels: torch.Tensor, shift_labels: torch.Tensor | None = None, ignore_index: int = -100, **kwargs
) -> torch.Tensor:
    """How many tokens of each row `[B]` the cross-entropy is taken over, given the arguments that it gets."""
    targets = labels[:, 1:] if shift_labels is None else shift_labels
    return (targets != ignore_index).sum(-1)


class MoHLlamaForCausalLM(MoHLlamaPreTrainedModel, GenerationMixin):
    """MoH-LLaMA with a language-modelling head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}
    _fsdp_plan = {"lm_head": "keep_full_weight"}

    def __init__(self, config: MoHLlamaConfig):
        super().__init__(config)
        self.model = MoHLlamaModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        output_router_logits: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs,
    ) -> MoeCausalLMOutputWithPast:
        """Logits `[B, T, V]` and, as asked for, the loss, the load-balance loss and router logits.

        Arguments are those of `LlamaForCausalLM`. With `output_router_logits` (default: the
        config's) the output holds `router_logits` (per layer `[B, T, U]`) and `aux_loss`, the
        load-balance loss of Eq. 7 averaged over layers and rows; given `labels`, `loss` is then
        cross-entropy + `head_balance_coef` * `aux_loss` (Eq. 8), and rows count in `aux_loss` by
        their predicted tokens. With `num_items_in_batch`, the predicted tokens of all passes that make
        one step, both terms of `loss` are this pass's part of the step's loss.
        """
        if output_router_logits is None:
            output_router_logits = self.config.output_router_logits
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_router_logits=output_router_logits,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept, :])

        loss = aux_loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        if output_router_logits:
            top_k = [router.top_k for router in self.routers]
            predicted = None if labels is None else predicted_tokens(labels, **kwargs)
            balanced = () if self.config.router_type == "threshold" else outputs.router_logits
            aux_loss = load_balancing_loss(balanced, top_k[: len(balanced)], attention_mask, predicted)
            if loss is not None:
                weight = self.config.head_balance_coef
                if (of_step := kwargs.get("num_items_in_batch")) is not None:
                    weight = weight * predicted.sum().to(loss.device) / of_step
                loss = loss + weight * aux_loss.to(loss.device)

        return MoeCausalLMOutputWithPast(
            loss=loss,
            aux_loss=aux_loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            router_logits=outputs.get("router_logits"),
        )


class MoHLlamaForSequenceClassification(GenericForSequenceClassification, MoHLlamaPreTrainedModel):
    """MoH-LLaMA with a linear head on the last token that is no padding."""

    def __init__(self, config: MoHLlamaConfig):
        # The generic __init__ would look the base model up among the Auto classes, where remote code is not listed.
        super(GenericForSequenceClassification, self).__init__(config)
        self.num_labels = config.num_labels
        self.model = MoHLlamaModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()


__all__ = ["MoHLlamaForCausalLM", "MoHLlamaForSequenceClassification", "MoHLlamaModel", "MoHLlamaPreTrainedModel"]
