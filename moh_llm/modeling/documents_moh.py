"""What tokens see: the document that each one is of, and the keys that local attention shows it.

Shapes: B batch, T queries, S keys (of the cache and of this pass), H query heads, KV key-value heads, D head size.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import pad
from transformers.cache_utils import Cache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from .cache_moh import can_be_read
from .masks_moh import keys_of_ranks, ranks_of, visible_keys

_BLOCK = 128  # queries of a block at most: fewer read fewer keys that they do not see, but copy each key more often
_MULTIPLE = 16  # keys of a block are a multiple of this: with others AMX and masks of bfloat16 take 1.4 times as long


def document_starts(
    inputs: torch.Tensor,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    past_key_values: Cache | None,
    use_cache: bool,
    implementation: str,
    paged: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each token and the first one that attention shows it are among the keys, without waiting for the device.

    This is what transformers' masks make of the model's arguments: what a query sees counts, and not the number of
    its position. Where padding is, the start may be any, since nothing reads it.

    - A mask `[B, S]` of all keys: the first token of a row that is no padding. Documents are not distinguished.
    - A mask `[B, 1 or H, T, S]` (boolean, or added to the scores): the first key that a query sees. A query that sees
      later tokens is not the first one of a document: where it would be, the start is the key before it.
    - No mask and no cache: the first token of a row, and where positions do not go on by one. With a
      cache the first token of a row only.
    - Flash attention distinguishes documents in a batch of one row without padding, with a cache, too, and in no other.
    - Attention that keeps keys itself (serving engines, `paged` caches, masks that are no tensors): position 0.

    `inputs` are ids or embeddings `[B, T, ...]`, `use_cache` says whether the call makes a cache where there is none.

    Returns:
        Indices of the tokens `[1, T]`, and of their documents' first tokens `[B or 1, T]`.
    """
    is_tensor = isinstance(attention_mask, torch.Tensor)
    before = 0 if past_key_values is None else past_key_values.get_seq_length()
    if isinstance(before, torch.Tensor):  # that of a static cache
        before = before.to(inputs.device)
    positions = torch.arange(inputs.shape[1], device=inputs.device)[None] + before
    if paged and position_ids is not None:  # its mask counts the keys of all requests
        return positions, positions - position_ids
    if is_tensor and attention_mask.dim() == 4:
        visible = visible_keys(attention_mask).any(1).to(inputs.device)
        places = torch.arange(visible.shape[-1], device=inputs.device)
        starts, sees_later = visible.int().argmax(-1), (visible & (places > positions[..., None])).any(-1)
        return positions, torch.where(sees_later & (starts == positions), positions - 1, starts)
    # As create_causal_mask has it: there is no mask for an attention that has registered no way to make one.
    keeps_keys = implementation not in ALL_MASK_ATTENTION_FUNCTIONS._global_mapping
    masked = attention_mask is not None
    if position_ids is not None and (keeps_keys or (masked and not is_tensor)):
        return positions, positions - position_ids
    starts = torch.zeros_like(positions)
    if is_tensor:
        starts = (attention_mask != 0).int().argmax(-1, keepdim=True).to(inputs.device).expand(-1, inputs.shape[1])
    is_flash = "flash" in implementation
    tells_apart = inputs.shape[0] == 1 if is_flash else not (masked or use_cache or past_key_values is not None)
    if tells_apart and position_ids is not None:
        restarts = pad(position_ids.diff(dim=-1) != 1, (1, 0))
        if is_tensor:
            restarts &= (attention_mask != 0).all().to(inputs.device)
        starts = torch.maximum(starts, torch.where(restarts, positions, 0)).cummax(-1).values
    return positions, starts


def out_of_sight(positions: torch.Tensor, starts: torch.Tensor, window: int, sinks: int) -> torch.Tensor:
    """How many keys of causal attention local attention leaves out, `[B or 1, T]`; zero or less where none."""
    return positions - starts + 1 - window - sinks


def block_shape(length: int, window: int, sinks: int) -> tuple[int, int]:
    """Queries of a block of local attention, of so many queries, and keys that it reads, one of which none sees."""
    block = min(length, window, _BLOCK)
    return block, ((sinks + window + block - 1) // _MULTIPLE + 1) * _MULTIPLE


class Band(NamedTuple):
    """Which keys each block of queries sees: what all layers have in common.

    It leaves out `lead` queries of each row, so that T' = T - lead are left.

    Attributes:
        index: keys of each block, the document's first ones and those of the band, `[B or 1, N, K]`. Where a mask hides
            keys, these are the ones that it shows. Indices below 0 or beyond the last key are not visible. The last key
            of a block never is.
        visible: whether a query sees a key of its block and, last, the distant token, `[B or 1, N, block, K + 1]`.
        hidden: how many keys of causal attention a query does not see, zero or less where none, `[B or 1, T']`.
        all_on: whether a query has all heads on, which its document's first ones have, `[B or 1, T]`.
        early: how many first queries have all of these among them; None where finding out is not worth its cost.
        lead: how many first queries are all of this kind, in each row, and are left out.
        step: where keys are, the document's first ones and those of the band, in a step of decoding on a CPU whose rows
            all see the same ones, as many as local attention shows; else None. `index` and `visible` are not read then.
        masks: what `mask` gave, so that each is made once for all layers.
    """

    index: torch.Tensor
    visible: torch.Tensor
    hidden: torch.Tensor
    all_on: torch.Tensor
    early: int | None
    lead: int
    step: tuple[slice, slice] | None = None
    masks: dict[tuple, torch.Tensor] | None = None
    read = None  # keys and values are those that layers are given; see `Requests.read`

    @classmethod
    def of(
        cls,
        positions: torch.Tensor,
        starts: torch.Tensor,
        window: int,
        sinks: int,
        all_on_until: int = 0,
        counts: torch.Tensor | None = None,
    ) -> "Band | None":
        """The band of queries at p: keys j with s <= j <= p and (j > p - window or j < s + sinks).

        With `counts` these are numbers among the visible keys: the band is that of the text without the others.

        Args:
            positions: index of each query among the keys, consecutive numbers `[1, T]`.
            starts: index s of the first key of each query's document, `[B or 1, T]`, not decreasing. A start after the
                query's own position, as padding has, counts as the query's position.
            window: how many tokens a query sees up to itself.
            sinks: how many first tokens of its document it sees.
            all_on_until: how many first tokens of a document have all heads on; those that see every key have, too.
            counts: what `visible_counts` gives.

        Returns:
            None where all queries are such first tokens.
        """
        positions, starts = ranks_of(positions, starts, counts)
        all_on = positions - starts < max(all_on_until, window + sinks)
        early, lead = None, 0
        if can_be_read(all_on):
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
        block, width = block_shape(length, window, sinks)
        count, missing = -(-length // block), -length % block
        starts = torch.minimum(starts, positions)
        if missing:  # the last block repeats the last query
            positions = torch.cat([positions, positions[:, -1:].expand(-1, missing)], dim=1)
            starts = torch.cat([starts, starts[:, -1:].expand(-1, missing)], dim=1)

        # Keys of a block: the document's first ones where they lie before the band, then the band.
        first = positions.view(-1, count, block)[:, :, :1]  # [B or 1, N, 1]
        steps = torch.arange(width - sinks, device=positions.device)
        band = first - window + 1 + steps
        begin = starts.view(-1, count, block)[:, :, :1]
        sink = begin + torch.arange(sinks, device=positions.device)
        index = torch.cat([sink, band.expand(sink.shape[0], -1, -1)], dim=-1)

        p, s = (tensor.view(-1, count, block, 1) for tensor in (positions, starts))
        j = index.unsqueeze(-2)
        visible = (j >= s) & (j <= p) & ((j > p - window) | (j < s + sinks))
        # In the band a sink is seen there. A document that begins before the band is that of the block's first query.
        is_sink = torch.arange(index.shape[-1], device=positions.device) < sinks
        visible &= ~is_sink | (j < band[..., :1].unsqueeze(-2))
        visible = torch.cat([visible, p - s >= window + sinks], dim=-1)
        index, step = keys_of_ranks(index, counts), None
        if length == 1 and index.device.type == "cpu" and can_be_read(index) and int(hidden.min()) > 0:
            step = _slices(index[:, 0, : sinks + window], sinks)
        return cls(index, visible, hidden, all_on, early, lead, step, {})

    def near(self, begin: int, sinks: int) -> "Band":
        """The band of keys that are the documents' first ones, `sinks`, and then those from the index `begin` on."""
        if self.step is not None:
            _, band = self.step
            moved = slice(band.start - begin + sinks, band.stop - begin + sinks)
            return self._replace(step=(slice(0, sinks), moved))  # `index` is not read
        steps = torch.arange(self.index.shape[-1], device=self.index.device)
        index = torch.where(steps < sinks, steps, (self.index - begin).clamp_min(0) + sinks)
        return self._replace(index=index)

    def mask(self, batch: int, heads: int, distant: bool, dtype: torch.dtype | None) -> torch.Tensor:
        """`visible` for `heads` that share keys, `[B * N, 1, heads * block, K]`; with a `dtype` added to scores.

        With `distant` the distant token takes the place of the last key.
        """
        how = batch, heads, distant, dtype
        if self.masks is not None and how in self.masks:
            return self.masks[how]
        mask = self.visible[..., :-1]
        if distant:
            mask = torch.cat([self.visible[..., :-2], self.visible[..., -1:]], dim=-1)
        mask = mask.unsqueeze(2).expand(batch, -1, heads, -1, -1).flatten(2, 3).flatten(0, 1).unsqueeze(1)
        if dtype is not None:
            mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
        if self.masks is not None and not torch.compiler.is_compiling():
            self.masks[how] = mask
        return mask

    def blocks(self, queries: torch.Tensor, groups: int) -> torch.Tensor:
        """Queries `[B, H, T, D]` by blocks and key-value heads, `[B, N, groups, H / groups, block, D]`."""
        count, block = self.visible.shape[1:3]
        missing = count * block - queries.shape[2]
        if missing:
            queries = pad(queries, (0, 0, 0, missing))
        return queries.unflatten(2, (count, block)).unflatten(1, (groups, -1)).permute(0, 3, 1, 2, 4, 5)

    def take(self, tensor: torch.Tensor, groups: torch.Tensor | slice | None = None) -> torch.Tensor:
        """Keys or values `[B, KV, S, D]`, of these `groups` alone, by blocks, `[B, N, KV, K, D]`.

        Entries for indices outside of the keys are arbitrary; `visible` hides them.
        """
        if isinstance(groups, slice):
            tensor, groups = tensor[:, groups], None
        if self.step is not None:
            taken = torch.cat([tensor[:, :, part] for part in self.step], dim=2)
            return (taken if groups is None else taken.index_select(1, groups)).unsqueeze(1)
        rows, count, width = self.index.shape
        if groups is not None and count * width > tensor.shape[2]:
            tensor, groups = tensor.index_select(1, groups), None
        heads, length = tensor.shape[1:3]
        index, by_token = self.index.clamp(0, length - 1).flatten(1), tensor.transpose(1, 2)
        if rows == 1 and heads == 1:
            taken = tensor.index_select(2, index[0]).transpose(1, 2)
        elif rows == 1:
            taken = by_token.index_select(1, index[0])  # a token's keys of all heads at once
        else:
            by_token = by_token.expand(rows, -1, -1, -1)
            taken = by_token.gather(1, index[:, :, None, None].expand(-1, -1, *by_token.shape[2:]))
        taken = taken.unflatten(1, (count, width)).transpose(2, 3)
        return taken if groups is None else taken.index_select(2, groups)


def _slices(index: torch.Tensor, sinks: int) -> tuple[slice, slice] | None:
    """Keys `[B, K]`, the first `sinks` of them and the others, as slices; None where they are not, or rows differ."""
    parts = tuple(
        slice(int(part[0]), int(part[-1]) + 1) if len(part) else slice(0, 0)
        for part in (index[0, :sinks], index[0, sinks:])
    )
    is_whole = sum(part.stop - part.start for part in parts) == index.shape[1]
    return parts if is_whole and bool((index == index[0]).all()) else None


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
