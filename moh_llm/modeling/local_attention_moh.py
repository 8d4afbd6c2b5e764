"""Local attention: each token sees the first tokens of its document, the last tokens, and a distant token for the rest.

The distant token is a score and a value per head. It stands for the tokens that are out of sight: its score grows with
the logarithm of their number, as their sum in the softmax does. Time and memory are linear in the number of tokens:
queries are taken in blocks, and a block of queries sees the keys of its band and the document's first ones. It runs on
`scaled_dot_product_attention` alone.

Shapes: B batch, T queries, S keys (of the cache and of this pass), H query heads, KV key-value heads, D head size.
"""

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import pad, scaled_dot_product_attention

from .configuration_moh_llama import MoHLlamaConfig
from .routing_moh import HeadShard, IndexedModule, MoHLinear
from .selected_attention_moh import flash_attention, has_flash_attention

_BLOCK = 128  # queries of a block at most: fewer read fewer keys that they do not see, but copy each key more often
_WIDER = 8  # entries that the distant token adds to queries, keys and values: kernels want multiples of 8


def out_of_sight(positions: torch.Tensor, starts: torch.Tensor, window: int, sinks: int) -> torch.Tensor:
    """How many keys of causal attention local attention leaves out, `[B or 1, T]`; zero or less where none."""
    return positions - starts + 1 - window - sinks


def _can_be_read(tensor: torch.Tensor) -> bool:
    """Whether Python may depend on the tensor's numbers: it has some, and no compiler or CUDA graph records."""
    if torch.compiler.is_compiling() or tensor.is_meta or type(tensor) is not torch.Tensor:  # fake tensors have none
        return False
    return tensor.device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


class Band(NamedTuple):
    """Which keys each block of queries sees: what all layers have in common.

    It leaves out `lead` queries of each row, so that T' = T - lead are left.

    Attributes:
        index: keys of each block, the document's first ones and those of the band, `[B or 1, N, K]`. What lies outside
            of the keys that there are, is not visible.
        visible: whether a query sees a key of its block and, last, the distant token, `[B or 1, N, block, K + 1]`.
        hidden: how many keys of causal attention a query does not see, zero or less where none, `[B or 1, T']`.
        all_on: whether a query has all heads on, which its document's first ones have, `[B or 1, T]`.
        early: how many first queries have all of these among them; None where finding out is not worth its cost.
        lead: how many first queries are all of this kind, in each row, and are left out.
    """

    index: torch.Tensor
    visible: torch.Tensor
    hidden: torch.Tensor
    all_on: torch.Tensor
    early: int | None
    lead: int

    @classmethod
    def of(
        cls, positions: torch.Tensor, starts: torch.Tensor, window: int, sinks: int, all_on_until: int = 0
    ) -> "Band | None":
        """The band of queries at p: keys j with s <= j <= p and (j > p - window or j < s + sinks).

        Args:
            positions: index of each query among the keys, consecutive numbers `[1, T]`.
            starts: index s of the first key of each query's document, `[B or 1, T]`, not decreasing. A start after the
                query's own position, as padding has, counts as the query's position.
            window: how many tokens a query sees up to itself.
            sinks: how many first tokens of its document it sees.
            all_on_until: how many first tokens of a document have all heads on; those that see every key have, too.

        Returns:
            None where all queries are such first tokens.
        """
        all_on = positions - starts < max(all_on_until, window + sinks)
        early, lead = None, 0
        if _can_be_read(all_on):
            some = all_on.any(0).nonzero()
            early = int(some[-1]) + 1 if len(some) else 0
            if early and all_on_until > window + sinks:  # else local attention is what a head that is skipped has there
                others = (~all_on.all(0)).nonzero()
                if not len(others):
                    return None
                lead = int(others[0])
        positions, starts = positions[:, lead:], starts[:, lead:]
        hidden = out_of_sight(positions, starts, window, sinks)
        length = positions.shape[1]
        block = min(length, window, _BLOCK)
        count, missing = -(-length // block), -length % block
        starts = torch.minimum(starts, positions)
        if missing:  # the last block repeats the last query
            positions = torch.cat([positions, positions[:, -1:].expand(-1, missing)], dim=1)
            starts = torch.cat([starts, starts[:, -1:].expand(-1, missing)], dim=1)

        # Keys of a block: the document's first ones where they lie before the band, then the band.
        first = positions.view(1, count, block)[:, :, :1]  # [1, N, 1]
        steps = torch.arange(window + block - 1, device=positions.device)
        band = first - window + 1 + steps
        begin = starts.view(-1, count, block)[:, :, :1]
        sink = begin + torch.arange(sinks, device=positions.device)
        index = torch.cat([sink, band.expand(begin.shape[0], -1, -1)], dim=-1)

        p, s = (tensor.view(-1, count, block, 1) for tensor in (positions, starts))
        j = index.unsqueeze(-2)
        visible = (j >= s) & (j <= p) & ((j > p - window) | (j < s + sinks))
        # In the band a sink is seen there. A document that begins before the band is that of the block's first query.
        is_sink = torch.arange(index.shape[-1], device=positions.device) < sinks
        visible &= ~is_sink | (j < band[..., :1].unsqueeze(-2))
        return cls(index, torch.cat([visible, p - s >= window + sinks], dim=-1), hidden, all_on, early, lead)

    def near(self, begin: int, sinks: int) -> "Band":
        """The band of keys that are the documents' first ones, `sinks`, and then those from the index `begin` on."""
        steps = torch.arange(self.index.shape[-1], device=self.index.device)
        index = torch.where(steps < sinks, steps, (self.index - begin).clamp_min(0) + sinks)
        return self._replace(index=index)

    def blocks(self, queries: torch.Tensor, groups: int) -> torch.Tensor:
        """Queries `[B, H, T, D]` by blocks and key-value heads, `[B, N, groups, H / groups, block, D]`."""
        count, block = self.visible.shape[1:3]
        missing = count * block - queries.shape[2]
        if missing:
            queries = pad(queries, (0, 0, 0, missing))
        return queries.unflatten(2, (count, block)).unflatten(1, (groups, -1)).permute(0, 3, 1, 2, 4, 5)

    def take(self, tensor: torch.Tensor, groups: torch.Tensor | None = None) -> torch.Tensor:
        """Keys or values `[B, KV, S, D]`, of these `groups` alone, by blocks, `[B, N, KV, K, D]`.

        What lies outside is any entry.
        """
        rows, count, width = self.index.shape
        if groups is not None and count * width > tensor.shape[2]:
            tensor, groups = tensor.index_select(1, groups), None
        heads, length = tensor.shape[1:3]
        index = self.index.clamp(0, length - 1).flatten(1)
        if rows == 1:
            taken = tensor.index_select(2, index[0])
        else:
            tensor = tensor.expand(rows, -1, -1, -1)
            taken = tensor.gather(2, index[:, None, :, None].expand(-1, heads, -1, tensor.shape[-1]))
        taken = taken.unflatten(2, (count, width)).transpose(1, 2)
        return taken if groups is None else taken.index_select(2, groups)


class Requests(NamedTuple):
    """Bands of requests whose tokens lie side by side in one row, and so do their keys (continuous batching).

    Attributes:
        parts: tokens of each request of which some may have heads off, and their band; or one token of each of some
            requests, which are the rows of one band.
        all_on: as in `Band`, `[1, T]`.
        early, lead: as in `Band`.
        read: gives the keys and values `[1, KV, S, D]` that the bands count, of an attention layer, after its
            attention, where a serving engine has the cache; None: the cache that the layer is given has them.
    """

    parts: list[tuple[slice | torch.Tensor, Band]]
    all_on: torch.Tensor
    early: int | None = None
    lead: int = 0
    read: Callable[[nn.Module], tuple[torch.Tensor, torch.Tensor]] | None = None

    @classmethod
    def of(
        cls,
        position_ids: torch.Tensor,
        token_edges: list[int],
        key_edges: list[int],
        window: int,
        sinks: int,
        all_on_until: int,
    ) -> "Requests":
        """Bands of the tokens at `position_ids` `[1, T]` of their requests.

        The edges are the first token, or key, of each request and the end of the last one; tokens after it are padding.
        """
        parts, all_on = [], torch.ones_like(position_ids, dtype=torch.bool)
        for first, last, begin in zip(token_edges[:-1], token_edges[1:], key_edges[:-1], strict=True):
            if first == last:
                continue
            positions = position_ids[:, first:last] + begin
            band = Band.of(positions, torch.full_like(positions, begin), window, sinks, all_on_until)
            if band is not None:
                parts.append((slice(first + band.lead, last), band))
                all_on[:, first:last] = band.all_on
        return cls(parts, all_on)


def local_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    band: Band,
    scaling: float,
    dropout: float = 0.0,
    distant: tuple[torch.Tensor, torch.Tensor] | None = None,
    groups: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of each query to the keys that `band` shows it.

    With n keys out of sight the softmax has one more entry where n > 0, the distant token's: its score is that given
    plus log n. Query heads that share keys and values are queries of one attention, so that keys are copied once.

    Args:
        queries: `[B, H, T, D]`, after rotary embedding. As many heads in a row share each key-value head.
        keys, values: `[B, KV, S, D]`, those of a cache included; entries after a query are not read.
        band: of these queries.
        scaling: factor of the scores.
        dropout: probability.
        distant: scores of the distant token `[B, H, T]` (already scaled) and its values `[H, D]`.
        groups: ids of the key-value heads that these queries share; None: all of them.

    Returns:
        Head outputs `[B, T, H, D]`.
    """
    batch, heads, length, size = queries.shape
    taken, visible = [band.take(tensor, groups) for tensor in (keys, values)], band.visible
    count = taken[0].shape[2]
    blocks = band.blocks(queries, count)
    scores = None
    if distant is not None:
        scores = distant[0] + band.hidden.clamp_min(1).log().unsqueeze(1)
        scores = band.blocks(scores.unsqueeze(-1), count)
    merges = has_flash_attention(queries) and not dropout
    if merges or distant is None:
        visible = visible[..., :-1]
    else:
        # One more entry of the queries is the score, and one of the values the weight of the distant token.
        scores = (scores / scaling).to(queries.dtype)
        blocks = torch.cat([blocks, scores, scores.new_zeros(1).expand(*scores.shape[:-1], _WIDER - 1)], dim=-1)
        taken = [pad(tensor, (0, _WIDER, 0, 1)) for tensor in taken]
        for tensor in taken:
            tensor[..., -1, size] = 1
    shared = heads // count
    mask = visible.unsqueeze(2).expand(batch, -1, shared, -1, -1).flatten(2, 3).flatten(0, 1).unsqueeze(1)
    given = [tensor.flatten(0, 1) for tensor in (blocks.flatten(3, 4), *taken)]
    if merges:
        mask = queries.new_zeros(mask.shape).masked_fill_(~mask, -torch.inf)
        out, sums = flash_attention(*given, attn_mask=mask, scale=scaling)
    else:
        out = scaled_dot_product_attention(*given, attn_mask=mask, dropout_p=dropout, scale=scaling)
    # [B, N, KV, H / KV, block, D] to [B, T, H, D]
    out = out.view(blocks.shape[:-1] + out.shape[-1:])
    if merges and scores is not None:
        weights = torch.sigmoid(scores - sums.view(scores.shape)) * band.blocks(band.hidden[:, None, :, None] > 0, 1)
        out = out.lerp(distant[1].to(out.dtype).view(count, shared, 1, size), weights.to(out.dtype))
    out = out.permute(0, 1, 4, 2, 3, 5).reshape(batch, -1, heads, out.shape[-1])[:, :length]
    if merges or distant is None:
        return out
    return out[..., :size] + out[..., size : size + 1] * distant[1].to(out.dtype)


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
        self.order = IndexedModule(sorted(range(len(heads)), key=kinds.__getitem__))
        self.kinds = sorted(Counter(kinds).items())  # and how many heads are of the kind
        self.window, self.sinks = config.local_window, config.local_sinks
        self.distant_score = MoHLinear(config.hidden_size, len(heads))
        self.distant_value = nn.Parameter(torch.zeros(len(heads), config.head_dim))

    def heads(self, shard: HeadShard | None = None) -> torch.Tensor:
        """Ids of the heads in the order of outputs; with `shard` those of its heads, by their numbers there."""
        heads = self.index.index_select(0, self.order.index)
        return heads if shard is None else shard.own(heads)

    def forward(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        hidden_states: torch.Tensor,
        band: Band | Requests,
        scaling: float,
        dropout: float,
        near: tuple[torch.Tensor, torch.Tensor, int] | None = None,
        kept: torch.Tensor | None = None,
        shard: HeadShard | None = None,
    ) -> torch.Tensor:
        """Outputs `[B, T, len(heads), D]` of `heads(shard)`.

        `queries` are those of all heads or of the shard's, `hidden_states` `[B, T, C]` is the layer's input; see
        `local_attention`. With a `MoHCache` `near` is what its layer keeps of groups that are never on, and `keys` and
        `values` are those of the other groups, `kept`.
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
        if len(self.kinds) == 1 and len(self.index) == self.num_heads and near is None and shard is None:
            return local_attention(queries, keys, values, band, scaling, dropout, (scores, self.distant_value))
        outputs = []
        for ((never_on, count), _), places in zip(
            self.kinds, self.order.index.split([n for _, n in self.kinds]), strict=True
        ):
            heads = self.index.index_select(0, places)
            if shard is not None:
                places, heads = places[shard.has(heads)], shard.own(heads)
                if not len(heads):
                    continue
            distant = scores.index_select(1, places), self.distant_value.index_select(0, places)
            own, groups = queries.index_select(1, heads), heads[::count] // self.num_key_value_groups
            read = keys, values, band
            if near is not None and never_on:
                read, groups = (*near[:2], band.near(near[2], self.sinks)), None
            elif kept is not None:
                groups = torch.searchsorted(kept, groups)
            outputs.append(local_attention(own, *read, scaling, dropout, distant, groups))
        return torch.cat(outputs, dim=2) if outputs else queries.transpose(1, 2)[:, :, :0]
