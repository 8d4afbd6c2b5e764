"""LLaMA with Mixture-of-Head attention ("MoH: Multi-Head Attention as Mixture-of-Head Attention").

All of LLaMA's weights keep their names and meaning; routers and fallbacks add a few tensors to each `self_attn`. With
all heads active and quantised scores the model is LLaMA, bit for bit.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter, WeightRenaming
from transformers.generation import GenerationMixin
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.modeling_outputs import BaseModelOutputWithPast, MoeCausalLMOutputWithPast
from transformers.models.llama.modeling_llama import LlamaModel, LlamaPreTrainedModel
from transformers.models.mixtral.modeling_mixtral import (
    MixtralExperts,
    MixtralSparseMoeBlock,
    MixtralTopKRouter,
    load_balancing_loss_func,
)
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder

from .attention_moh import GATE_GRADIENTS, MoHLlamaAttention, MoHLocalFallback
from .configuration_moh_llama import MoHLlamaConfig
from .head_plan_moh import HeadPlan  # noqa: F401 (transformers 5.2 copies what this file imports)
from .heads_moh import RoutedModel
from .interval_attention_moh import interval_attention  # noqa: F401 (transformers 5.2 copies what this file imports)
from .routing_moh import MoHRouter, load_balancing_loss
from .seen_moh import Seen, keeps_keys, paged_keys, seen_keys

# Mixtral's feed-forward experts, as transformers names them, but by whole names: an MLP's names stay as they are.
_EXPERTS = ".block_sparse_moe.experts.*."
register_checkpoint_conversion_mapping(
    MoHLlamaConfig.model_type,
    [
        WeightRenaming(".block_sparse_moe.gate.weight", ".mlp.gate.weight"),
        WeightConverter(
            [f"{_EXPERTS}w1.weight", f"{_EXPERTS}w3.weight"],
            ".mlp.experts.gate_up_proj",
            operations=[MergeModulelist(dim=0), Concatenate(dim=1)],
        ),
        WeightConverter([f"{_EXPERTS}w2.weight"], ".mlp.experts.down_proj", operations=[MergeModulelist(dim=0)]),
    ],
    overwrite=True,
)


def expert_balancing_loss(
    expert_logits: Sequence[Tensor], config: MoHLlamaConfig, attention_mask: Tensor | None = None
) -> Tensor | float:
    """Mixtral's load-balance loss, given logits `[B * T, E]` of each layer; a mask that is not `[B, T]` is ignored."""
    if not expert_logits:
        return 0.0
    mask = attention_mask if attention_mask is not None and attention_mask.dim() == 2 else None
    return load_balancing_loss_func(tuple(expert_logits), config.num_local_experts, config.num_experts_per_tok, mask)


class MoHLlamaPreTrainedModel(RoutedModel, LlamaPreTrainedModel):
    """Loading, initialisation and the head budget that all MoH models share."""

    config: MoHLlamaConfig
    _can_record_outputs = LlamaPreTrainedModel._can_record_outputs | {
        "router_logits": OutputRecorder(MoHRouter),
        "expert_logits": OutputRecorder(MixtralTopKRouter),
    }

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, (MixtralTopKRouter, MixtralExperts)):
            for weight in module.parameters():
                init.normal_(weight, mean=0.0, std=self.config.initializer_range)
        if isinstance(module, MoHLocalFallback):
            init.zeros_(module.distant_value)

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True  # transformers looks for Mixtral's experts in this file's text

    @property
    def routers(self) -> list[MoHRouter]:
        """The routers, one per layer, first layer first."""
        return [layer.self_attn.router for layer in getattr(self, self.base_model_prefix, self).layers]

    def set_gate_gradient(self, kind: str) -> None:
        """Set how the gate's gradient <dO, H - S> is computed, of a head's output H and its fallback S.

        The forward pass computes H or S. `"exact"` (default) also computes the other one, without gradients of its own.
        `"none"` leaves the gradient out. Frozen routers cost nothing. Raises ValueError for another word.
        """
        if kind not in GATE_GRADIENTS:
            raise ValueError(f"gate_gradient={kind!r} must be one of {', '.join(GATE_GRADIENTS)}")
        for layer in getattr(self, self.base_model_prefix, self).layers:
            layer.self_attn.gate_gradient = kind


class MoHLlamaModel(MoHLlamaPreTrainedModel, LlamaModel):
    """The decoder without a head on top. Its forward pass is LLaMA's; layers also get `seen`."""

    def __init__(self, config: MoHLlamaConfig):
        super().__init__(config)
        if config.num_local_experts and config._attn_implementation == "vllm":
            raise ValueError("MoH models with experts (num_local_experts) are not served by vLLM; use transformers")
        for index, layer in enumerate(self.layers):
            layer.self_attn = MoHLlamaAttention(config, index)
            if config.num_local_experts:
                layer.mlp = MixtralSparseMoeBlock(config)
        self.post_init()

    @merge_with_config_defaults
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPast | tuple:
        """Hidden states `[B, T, C]`, given the arguments of `LlamaModel`."""
        if kwargs.get("output_router_logits"):
            self.check_checkpointing()
        inputs = input_ids if inputs_embeds is None else inputs_embeds
        given = {"attention_mask": attention_mask, "position_ids": position_ids, "past_key_values": past_key_values}
        if inputs is not None and kwargs.get("seen") is None:
            kwargs["seen"] = self._seen(inputs, use_cache=bool(use_cache), **given, **kwargs)
        return super().forward(input_ids=input_ids, inputs_embeds=inputs_embeds, use_cache=use_cache, **given, **kwargs)

    def _seen(
        self,
        inputs: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        past_key_values: Cache | None,
        use_cache: bool,
        cache: Any = None,
        block_table: Tensor | None = None,
        **kwargs: Any,
    ) -> Seen:
        """Which keys the queries of this pass see. `cache` and what follows are arguments of continuous batching."""
        implementation, seen = self.config._attn_implementation, (0, 0, 0)
        if self.config.head_fallback == "local":
            seen = self.config.local_window, self.config.local_sinks, self.config.local_start
        is_paged = cache is not None and (implementation != "sdpa" or block_table is not None)
        if seen[0] and (keeps_keys(implementation) or is_paged):
            way = "use 'sdpa'" if cache is not None else "use 'sdpa', 'eager' or a flash attention of transformers"
            if implementation == "vllm":
                way = "install MoH-LLM in vLLM's environment and leave out --model-impl"
            raise ValueError(
                f"head_fallback='local' reads keys that attn_implementation={implementation!r} keeps to itself; {way}"
            )
        if cache is not None:
            edges = kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"]["full_attention"]
            return paged_keys(position_ids, *edges, *seen)
        return seen_keys(inputs, attention_mask, position_ids, past_key_values, use_cache, implementation, *seen)


def predicted_tokens(labels: Tensor, shift_labels: Tensor | None = None, ignore_index: int = -100, **kwargs) -> Tensor:
    """Number of tokens in each row `[B]` that enter the cross-entropy, given its arguments."""
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
        attention_mask: Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        output_router_logits: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs,
    ) -> MoeCausalLMOutputWithPast:
        """Logits `[B, T, V]` and, as asked for, the loss, the load-balance loss and router logits.

        Arguments are those of `LlamaForCausalLM`. With `output_router_logits` (default: the config's) the output holds
        `router_logits` (per layer `[B, T, U]`) and `aux_loss`, the load-balance loss of Eq. 7, in which rows count by
        their predicted tokens. `loss` is then cross-entropy + `head_balance_coef` * `aux_loss` (Eq. 8) + the experts'
        term. With `num_items_in_batch`, the predicted tokens of one step, `loss` is this pass's part of the step's.
        """
        asked_for = self.config.output_router_logits if output_router_logits is None else output_router_logits
        asked = {"output_router_logits": asked_for, "output_expert_logits": asked_for}
        given = {"past_key_values": past_key_values, "inputs_embeds": inputs_embeds, "use_cache": use_cache}
        outputs = self.model(input_ids, attention_mask, position_ids, **given, **asked, **kwargs)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept, :])

        loss = aux_loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        if asked_for:
            top_k = [router.top_k for router in self.routers]
            predicted = None if labels is None else predicted_tokens(labels, **kwargs)
            balanced = () if self.config.router_type == "threshold" else outputs.router_logits
            aux_loss = load_balancing_loss(
                balanced, top_k[: len(balanced)], attention_mask, predicted, self.config.router_score
            )
            if loss is not None:
                experts = expert_balancing_loss(outputs.expert_logits, self.config, attention_mask)
                balance = self.config.head_balance_coef * aux_loss + self.config.expert_balance_coef * experts
                if (of_step := kwargs.get("num_items_in_batch")) is not None:
                    balance = balance * predicted.sum().to(balance.device) / of_step
                loss = loss + balance.to(loss.device)

        states = {key: outputs.get(key) for key in ("past_key_values", "hidden_states", "attentions", "router_logits")}
        return MoeCausalLMOutputWithPast(loss=loss, aux_loss=aux_loss, logits=logits, **states)


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
