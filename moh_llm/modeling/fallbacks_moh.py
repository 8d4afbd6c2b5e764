"""Fallbacks: what a head that is off contributes, a value per token (`MoHFallback`) or its local attention.

Shapes: B batch, T queries, S keys (of the cache and of this pass), H query heads, KV key-value heads, D head size.
"""

from collections import Counter

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from .cache_moh import NearKeys, as_slice, select, slice_of
from .configuration_moh_llama import MoHLlamaConfig
from .documents_moh import Band, Requests
from .local_attention_moh import local_attention
from .masks_moh import Shown
from .routing_moh import HeadShard, IndexedModule, MoHLinear


class MoHLocalFallback(IndexedModule):
    """What a head that is off contributes: its local attention, with a distant token for what is out of sight.

    The distant token's value is a vector per head, and its score linear in the layer's input. A head that spreads its
    attention over the whole text is nearly that; a head that looks up single tokens is not. `index` holds the heads
    that are not shared, in the order of the parameters.
    """

    def __init__(self, config: MoHLlamaConfig, layer_idx: int):
        shared = config.shared_heads_per_layer[layer_idx]
        heads = [head for head in range(config.num_attention_heads) if head not in shared]
        super().__init__(heads)
        self.num_heads = config.num_attention_heads
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        # Groups with as many heads that are not shared are computed together, those that are never on by themselves.
        groups, never_on = [head // self.num_key_value_groups for head in heads], config.local_groups(layer_idx)
        counts = Counter(groups)
        kinds = [(group in never_on, counts[group]) for group in groups]
        places = sorted(range(len(heads)), key=kinds.__getitem__)
        self.order = IndexedModule(places)
        self.ordered_heads = IndexedModule(heads[place] for place in places)
        self.kinds = sorted(Counter(kinds).items())  # and how many heads are of the kind
        # Groups of each kind as a slice of all, and of those that a `MoHCache` keeps; None where they are none.
        kept = [group for group in range(config.num_key_value_heads) if group not in never_on]
        self.slices = []
        for kind, _ in self.kinds:
            own = sorted({group for group, of in zip(groups, kinds, strict=True) if of == kind})
            self.slices.append((as_slice(own), None if kind[0] else as_slice([kept.index(group) for group in own])))
        self.window, self.sinks = config.local_window, config.local_sinks
        self.distant_score = MoHLinear(config.hidden_size, len(heads))
        self.distant_value = nn.Parameter(torch.zeros(len(heads), config.head_dim))

    def heads(self, shard: HeadShard | None = None) -> torch.Tensor:
        """Ids of the heads in the order of outputs; with `shard` those of its heads, by their numbers there."""
        heads = self.ordered_heads.index
        return heads if shard is None else shard.own(heads)

    def forward(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        hidden_states: torch.Tensor,
        band: Band | Shown | Requests,
        scaling: float,
        dropout: float,
        near: NearKeys | None = None,
        shard: HeadShard | None = None,
    ) -> torch.Tensor:
        """Outputs `[B, T, len(heads), D]` of `heads(shard)`.

        `queries` are those of all heads or of the shard's, `hidden_states` `[B, T, C]` is the layer's input; see
        `local_attention`. With a `MoHCache` `near` is what its layer keeps of groups that are never on, and `keys` and
        `values` are those of `near.kept_groups`.
        """
        if isinstance(band, Requests):
            out = queries.new_zeros(*hidden_states.shape[:2], len(self.heads(shard)), queries.shape[-1])
            for tokens, part in band.parts:
                own, states = queries[:, :, tokens], hidden_states[:, tokens]
                if not isinstance(tokens, slice):
                    own, states = own.transpose(0, 2), states.transpose(0, 1)
                local = self(own, keys, values, states, part, scaling, dropout, shard=shard)
                out[:, tokens] = local if isinstance(tokens, slice) else local.transpose(0, 1)
            return out
        scores = self.distant_score(hidden_states).transpose(1, 2)
        if isinstance(band, Shown):
            places, heads = self.order.index, self.ordered_heads.index
            if shard is not None:
                places, heads = places[shard.has(heads)], shard.own(heads)
            keys, values = (states.index_select(1, heads // self.num_key_value_groups) for states in (keys, values))
            distant = scores.index_select(1, places), self.distant_value.index_select(0, places)
            return band.attention(queries.index_select(1, heads), keys, values, heads, scaling, dropout, distant)
        if len(self.kinds) == 1 and len(self.index) == self.num_heads and near is None and shard is None:
            return local_attention(queries, keys, values, band, scaling, dropout, (scores, self.distant_value))
        places, counts = self.order.index, [number for _, number in self.kinds]
        heads = self.ordered_heads.index
        if shard is not None:
            own = shard.has(heads)
            counts = [int(part.sum()) for part in own.split(counts)]
            places, heads = places[own], shard.own(heads)
        outputs = []
        for ((never_on, shared), _), slices, own, kind, score, value in zip(
            self.kinds,
            self.slices,
            (select(queries, 1, kind) for kind in heads.split(counts)),
            heads.split(counts),
            scores.index_select(1, places).split(counts, dim=1),
            self.distant_value.index_select(0, places).split(counts),
            strict=True,
        ):
            if not len(kind):
                continue
            read, groups = (keys, values, band), None
            if near is not None and never_on:
                read = near.keys, near.values, band.near(near.begin, self.sinks)
            elif len(kind) != shared * keys.shape[1]:  # else they share all groups that there are
                groups = slices[near is not None] if shard is None else None
                if groups is None:
                    groups = kind[::shared] // self.num_key_value_groups
                    groups = groups if near is None else torch.searchsorted(near.kept_groups, groups)
            outputs.append(local_attention(own, *read, scaling, dropout, (score, value), groups))
        if len(outputs) == 1:
            return outputs[0]
        return torch.cat(outputs, dim=2) if outputs else queries.transpose(1, 2)[:, :, :0]


class _Added(torch.autograd.Function):
    """Head outputs `[B, T, H, D]` plus `local * off` for these heads, of all queries but the first `lead`.

    `local` is `[B, T - lead, len(heads), D]`, `off` `[B, T - lead, len(heads), 1]`. Without the zeros that gradients of
    slices are filled up with.
    """

    @staticmethod
    def forward(
        ctx, head_outputs: torch.Tensor, local: torch.Tensor, off: torch.Tensor, heads: torch.Tensor, lead: int
    ) -> torch.Tensor:
        """The sum."""
        ctx.save_for_backward(local, off, heads)
        ctx.lead = lead
        return _add(head_outputs.clone(), local, off, heads, lead)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of head outputs, local attention, and `off`."""
        local, off, heads = ctx.saved_tensors
        own = select(gradient[:, ctx.lead :], 2, heads)
        return gradient, own * off, (own * local).sum(-1, keepdim=True), None, None


def add_where_off(
    head_outputs: torch.Tensor, local: torch.Tensor, off: torch.Tensor, heads: torch.Tensor, lead: int
) -> torch.Tensor:
    """Head outputs `[B, T, H, D]` plus `local * off` for these heads, of all queries but the first `lead`.

    Without gradients in place. `local` is `[B, T - lead, len(heads), D]`, `off` the same with 1 for D.
    """
    if torch.is_grad_enabled():
        return _Added.apply(head_outputs, local, off, heads, lead)
    return _add(head_outputs, local, off, heads, lead)


def _add(
    head_outputs: torch.Tensor, local: torch.Tensor, off: torch.Tensor, heads: torch.Tensor, lead: int
) -> torch.Tensor:
    later, places = head_outputs[:, lead:], slice_of(heads)
    if places is None:
        later.index_add_(2, heads, local * off)
    else:
        later[:, :, places].addcmul_(local, off)  # in a third of the time
    return head_outputs


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
        routed = config.routed_heads(layer_idx)
        super().__init__(routed)
        self.num_heads = config.num_attention_heads
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.own_value = MoHLinear(config.hidden_size, len(routed))
        self.bias = nn.Parameter(torch.zeros(len(routed), config.head_dim))

    def forward(
        self,
        head_outputs: torch.Tensor,
        gate: torch.Tensor,
        hidden_states: torch.Tensor,
        value_states: torch.Tensor,
        is_first: torch.Tensor,
        gated: bool = False,
        shard: HeadShard | None = None,
    ) -> torch.Tensor:
        """Gated head outputs, with fallbacks where heads are off: g_h H_h + (1 - g_h) S_h, `[B, T, H, D]`.

        Args:
            head_outputs: `[B, T, H, D]`.
            gate: of all heads, `[B, T, H]`, in the dtype of `head_outputs`.
            hidden_states: the attention layer's input `[B, T, C]`.
            value_states: values of these tokens `[B, T, KV, D]`.
            is_first: whether a token is the first of its document, `[B or 1, T]`.
            gated: `head_outputs` are times their gate already.
            shard: the heads that these are, of all.
        """
        dtype = head_outputs.dtype
        is_first, off = is_first.unsqueeze(-1), 1 - gate
        # Numbers per head are made first, and tensors of the heads' full size are added to in place (nothing that is
        # overwritten is needed for a gradient).
        share = torch.where(is_first, 1.0, self.own_value(hidden_states).to(dtype))
        share = self._of_heads(share, -1, shard) * off
        level = torch.where(is_first, 0.0, off)
        bias = self._of_heads(self.bias.to(dtype), 0, shard)
        out = self._grouped(head_outputs, -2)
        # A tensor of its own in both cases, since what a view is added to in place costs a copy going backward.
        out = out.clone() if gated else out * self._grouped(gate).unsqueeze(-1)
        out.addcmul_(self._grouped(share).unsqueeze(-1), value_states.unsqueeze(-2))
        out.addcmul_(self._grouped(level).unsqueeze(-1), self._grouped(bias, -2))
        return out.view(head_outputs.shape)

    def _grouped(self, heads: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """The dimension of heads split into key-value heads and the query heads that share each."""
        return heads.unflatten(dim, (-1, self.num_key_value_groups))

    def _of_heads(self, routed: torch.Tensor, dim: int, shard: HeadShard | None) -> torch.Tensor:
        """Expand values of the routed heads to all heads, or a shard's, with zeros for the shared ones."""
        shape = list(routed.shape)
        shape[dim] = self.num_heads
        heads = routed.new_zeros(shape).index_copy(dim, self.index, routed)
        return heads if shard is None else shard.take(heads, dim)
