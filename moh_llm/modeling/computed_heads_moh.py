"""Full attention of one layer for the heads and queries that need it, by the attention function that the user chose.

Shapes: B batch, T queries, S keys (of the cache and of this pass), H query heads, KV key-value heads, D head size.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from transformers.models.llama.modeling_llama import LlamaAttention

from .cache_moh import can_be_read, select
from .flash_attention_moh import (
    attention_with_halved_gradients,
    halved_attention,
    has_uneven_gradients,
    is_uneven,
)
from .selected_attention_moh import dense_heads, selected_attention


class ComputedHeads(NamedTuple):
    """The heads that full attention computes in one forward pass.

    Attributes:
        ids: heads that are computed for all queries; None: all heads.
        early: number of first queries for which the other heads are computed, too.
        early_ids: these other heads, where `early` is not 0.
    """

    ids: torch.Tensor | None = None
    early: int = 0
    early_ids: torch.Tensor | None = None

    def queries(self, queries: torch.Tensor) -> torch.Tensor:
        """Select the queries of `ids` from `[B, H, T, D]`."""
        if self.ids is None:
            return queries
        return select(queries.transpose(1, 2), 2, self.ids).transpose(1, 2)  # outputs get the strides of a copy

    def mask_gate(self, gate: torch.Tensor) -> torch.Tensor:
        """The gate `[B, T, H]` with zeros for heads that are not computed at all: they get their fallback."""
        if self.ids is None or self.early:
            return gate
        return torch.zeros_like(gate).index_copy(-1, self.ids, gate.index_select(-1, self.ids))

    def expand(
        self, outputs: torch.Tensor, early_outputs: torch.Tensor | None, num_heads: int, is_fixed: bool
    ) -> torch.Tensor:
        """Outputs `[B, T, H, D]` of all heads, given those of `ids` and `early_ids`.

        They are zero where none are computed; with `is_fixed` any value, which is overwritten.
        """
        if self.ids is None:
            return outputs
        shape = *outputs.shape[:2], num_heads, outputs.shape[-1]
        zeros = outputs.new_empty(shape) if is_fixed else outputs.new_zeros(shape)
        if not torch.is_grad_enabled():
            zeros.index_copy_(2, self.ids, outputs)
            if early_outputs is not None:
                zeros[:, : self.early].index_copy_(2, self.early_ids, early_outputs)
            return zeros
        every = zeros.index_copy(2, self.ids, outputs)
        if early_outputs is None:
            return every
        early = every[:, : self.early].index_copy(2, self.early_ids, early_outputs)
        return torch.cat([early, every[:, self.early :]], dim=1)


def in_halves(
    layer: LlamaAttention,
    heads: torch.Tensor | None,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    attention_mask: torch.Tensor | None,
) -> torch.Tensor | None:
    """What SDPA gives without dropout, given what `for_heads` gives, computed in halves; None where that saves no time.

    Outputs of all heads, which `heads` None says, are SDPA's bit for bit.
    """
    if attention_mask is not None or layer.config._attn_implementation != "sdpa":
        return None
    if has_uneven_gradients(queries, keys):
        return attention_with_halved_gradients(queries, keys, values, layer.scaling)
    if heads is None or not is_uneven(queries, keys):
        return None
    return halved_attention(queries, keys, values, layer.scaling)


def of_heads(
    layer: LlamaAttention,
    attention: Callable,
    heads: torch.Tensor | None,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Outputs `[B, T, heads, D]` of heads with these ids (None: all), given their queries `[B, heads, T, D]`.

    Keys, values and mask are those of `for_heads`.
    """
    module, *states = for_heads(layer, heads, keys, values, attention_mask)
    outputs = None if dropout else in_halves(layer, heads, queries, *states)
    if outputs is None:
        outputs = attention(module, queries, *states, dropout=dropout, scaling=layer.scaling)[0]
    return outputs


def of_selected_queries(
    layer: LlamaAttention,
    attention: Callable,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    selected: torch.Tensor,
    document_starts: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor | None,
    lead: int,
) -> torch.Tensor:
    """Outputs `[B, T, H, D]` where `selected` `[B, T, H]`, any value elsewhere.

    Without a mask the first queries, `lead`, have dense attention, and so have heads for which that is faster.
    """
    positions, starts = (tensor[:, lead:] for tensor in document_starts)
    selected, later = selected[:, lead:], queries[:, :, lead:]
    dense = dense_heads(selected, keys) if attention_mask is None and queries.shape[2] > 1 else ()
    if len(dense):
        selected = selected.index_fill(-1, dense, False)
    outputs = selected_attention(later, keys, values, selected, positions, starts, layer.scaling)
    if len(dense):
        found = of_heads(layer, attention, dense, select(queries, 1, dense), keys, values, None)
        outputs.index_copy_(2, dense, found[:, lead:])
    if not lead:
        return outputs
    first = (tensor[:, :, :lead] for tensor in (queries, keys, values))
    return torch.cat([of_heads(layer, attention, None, *first, None), outputs], dim=1)


def of_early_queries(
    layer: LlamaAttention,
    attention: Callable,
    computed: ComputedHeads,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float,
) -> torch.Tensor:
    """Outputs `[B, early, heads, D]` of the first queries, of the heads that no later token may have on."""
    early, ids = computed.early, computed.early_ids
    seen = keys.shape[2] - (queries.shape[2] - early)
    own = select(queries[:, :, :early], 1, ids)
    mask = None if attention_mask is None else attention_mask[:, :, :early, :seen]
    return of_heads(layer, attention, ids, own, keys[:, :, :seen], values[:, :, :seen], mask, dropout)


def for_heads(
    layer: LlamaAttention,
    heads: torch.Tensor | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    attention_mask: torch.Tensor | None,
) -> tuple["LlamaAttention | _HeadsAlone", torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Module, keys, values and mask to call attention with for these heads, given those of all or of theirs."""
    if heads is None:
        return layer, keys, values, attention_mask
    if isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 4 and attention_mask.shape[1] > 1:
        attention_mask = attention_mask.index_select(1, heads)
    shared = layer.num_key_value_groups
    if keys.shape[1] * shared == len(heads):
        return layer, keys, values, attention_mask
    groups = heads // shared
    if heads.device.type == "cpu" and can_be_read(heads) and _is_whole(heads.tolist(), shared):
        return layer, *(select(tensor, 1, groups[::shared]) for tensor in (keys, values)), attention_mask
    return _HeadsAlone(layer), *(tensor.index_select(1, groups) for tensor in (keys, values)), attention_mask


def _is_whole(heads: list[int], shared: int) -> bool:
    """Whether increasing ids of heads are those of whole groups of `shared` heads."""
    groups = {head // shared for head in heads}
    return len(groups) * shared == len(heads)


class _HeadsAlone:
    """An attention module for attention functions, where each query head comes with its own key-value head."""

    num_key_value_groups = 1

    def __init__(self, attention: LlamaAttention):
        self._attention = attention

    def __getattr__(self, name: str):
        return getattr(self._attention, name)
