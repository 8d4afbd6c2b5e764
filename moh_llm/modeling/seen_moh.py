"""Which keys the queries of a pass see: those of their document or of a window of it, less what masks hide.

Shapes: B batch, T queries, S keys (of the cache and of this pass), H query heads.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import Cache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

_HIDDEN = -1e4  # what is added to the score of a key that a query does not see, or less


def can_be_read(tensor: Tensor) -> bool:
    """Whether Python may depend on the tensor's numbers: it has some, and no compiler or CUDA graph records."""
    if torch.compiler.is_compiling() or tensor.is_meta or type(tensor) is not Tensor:  # fake tensors have none
        return False
    return tensor.device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def keeps_keys(implementation: str) -> bool:
    """Whether an attention keeps keys and values itself: it has registered no way to make a mask (serving engines)."""
    return implementation not in ALL_MASK_ATTENTION_FUNCTIONS._global_mapping


def visible_keys(mask: Tensor) -> Tensor:
    """Which keys a mask of attention shows: one of padding, a boolean one, or one that is added to scores."""
    return mask > _HIDDEN if mask.dim() == 4 and mask.is_floating_point() else mask != 0


class Seen(NamedTuple):
    """The keys that the queries of one forward pass see: what all layers have in common.

    A head that is on sees the keys from `start` to `last`. A head that is off sees those from `near` to `last`, those
    from `start` to before `sink_end`, and one distant token for the `hidden` others. The first five fields are int64
    `[B or 1, T, 1]`, or `[B, T, H]` where a mask differs between heads.

    Attributes:
        last: the last key that a query sees: its own, unless a mask shows later ones.
        start: the first key of its document.
        near: the first key of its window; `last + 1` where heads that are off see nothing.
        sink_end: the key after its sinks; `start` where there are none.
        hidden: how many keys a head that is off does not see; zero or less where none.
        window: how many keys, up to a query's own, a head that is off sees at most; 0: none.
        sinks: how many sinks.
        all_on: which tokens have all heads on whatever their scores, bool `[B or 1, T]`; None: none of them.
        lead: how many first queries of each row are known to have all heads on.
        is_causal: whether it is known that each row is one document from key 0 on, of T = S tokens.
        is_consecutive: whether the numbers in `last` are consecutive, and the same for all rows.
        visible: which keys a mask shows, bool `[B, S]` or `[B, 1 or H, T, S]`, or what it adds to scores; None: all.
            With a mask, window, sinks and hidden keys are counts of visible keys.
        scratch: what faster forms of attention keep for all layers of the pass.
    """

    last: Tensor
    start: Tensor
    near: Tensor
    sink_end: Tensor
    hidden: Tensor
    window: int
    sinks: int
    all_on: Tensor | None = None
    lead: int = 0
    is_causal: bool = False
    is_consecutive: bool = True
    visible: Tensor | None = None
    scratch: dict | None = None

    def first(self, on: Tensor) -> Tensor:
        """The first key of each query and head, `[B, T, H]`, given which heads are on, bool `[B, T, H]`."""
        return torch.where(on, self.start, self.near)

    @classmethod
    def from_positions(
        cls,
        positions: Tensor,
        starts: Tensor,
        window: int = 0,
        sinks: int = 0,
        all_on_until: int = 0,
        visible: Tensor | None = None,
    ) -> "Seen":
        """Of causal attention within documents; `window`, `sinks` are the attributes.

        Args:
            positions: index of each query among the keys, `[1, T]`.
            starts: index of the first key of each query's document, `[B or 1, T]`. A start after the query, as padding
                may have, counts as the query's own index.
            all_on_until: how many first tokens of a document have all heads on; those that see every key have, too.
            visible: which keys a mask of padding shows, bool `[B, S]`, where it has holes.
        """
        last, start = positions[..., None], torch.minimum(starts, positions)[..., None]
        if not window:
            return cls(last, start, last + 1, start, last * 0, 0, 0, visible=visible, scratch={})
        counts = None if visible is None else visible.cumsum(-1)
        own, first = positions, start[..., 0]
        if counts is not None:  # numbers of visible keys; that of a hidden query is of the last visible key before it
            end = counts.shape[1] - 1
            own = counts[:, positions[0].clamp_max(end)] - 1
            first = (counts.gather(1, starts.expand(len(counts), -1).clamp_max(end)) - 1).clamp_min(0)

        def key_of(number: Tensor) -> Tensor:
            """The index of the visible key of that number; of any visible key where there is none."""
            if counts is None:
                return number
            return torch.searchsorted(counts, (number + 1).clamp_min(1).minimum(counts[:, -1:]))

        hidden = own - first + 1 - window - sinks
        near = key_of(torch.maximum(own - window + 1, first))
        sink_end = key_of(first + sinks - 1) + 1 if sinks else first * 0
        all_on, lead = hidden <= max(0, all_on_until - window - sinks), 0
        if positions.shape[1] > 1 and can_be_read(all_on):  # a step on a GPU is not worth waiting for it
            others = (~all_on.all(0)).nonzero()
            lead = int(others[0]) if len(others) else positions.shape[1]
        near, sink_end, hidden = (tensor[..., None] for tensor in (near, sink_end, hidden))
        return cls(last, start, near, sink_end, hidden, window, sinks, all_on, lead, visible=visible, scratch={})

    @classmethod
    def from_mask(cls, mask: Tensor, positions: Tensor, window: int, sinks: int, all_on_until: int) -> "Seen":
        """Of any mask of attention `[B, 1 or H, T, S]`; the other arguments are those of `from_positions`.

        Of the keys that the mask shows to a query, a head that is off sees the first ones, the last ones up to the
        query, and those after it. A query that sees no key sees itself.
        """
        shown, own_key = visible_keys(mask), positions[:, None, :, None]
        sees_nothing = ~shown.any(-1, keepdim=True)
        shown = shown | (sees_nothing & (own_key == torch.arange(mask.shape[-1], device=mask.device)))
        numbers = shown.cumsum(-1, dtype=torch.int32)
        own = numbers.gather(-1, own_key.expand(*numbers.shape[:3], 1))

        def key_of(number: Tensor | int) -> Tensor:
            """The first key up to which so many are visible, `[B, T, 1 or H]`."""
            wanted = torch.as_tensor(number, dtype=torch.int32, device=mask.device).expand(own.shape)
            return torch.searchsorted(numbers, wanted.contiguous())[..., 0].transpose(1, 2)

        last, start = key_of(numbers[..., -1:]), key_of(1)
        own_place = positions[..., None]
        begins = (start[:, 1:] == start[:, :-1]) | (start[:, 1:] == own_place[:, 1:])
        is_plain = (last == own_place) & (own[..., 0].transpose(1, 2) == last - start + 1)
        is_plain = mask.shape[1] == 1 and can_be_read(mask) and bool(is_plain.all() & begins.all())
        if is_plain and not (mask.is_floating_point() and bool((mask[shown & ~sees_nothing] != 0).any())):
            return cls.from_positions(positions, start[..., 0], window, sinks, all_on_until)
        # Fallbacks of values ask whether a query sees nothing but itself. What lies before the first key is hidden.
        start = start - ((start == last) & (start != own_place)).long()
        if mask.is_floating_point():
            shown = mask.masked_fill(~visible_keys(mask), 0).masked_fill(~shown, -torch.inf)
        if not window:
            return cls(last, start, last + 1, start, last * 0, 0, 0, visible=shown)
        near, sink_end = key_of((own - window + 1).clamp_min(1)), key_of(sinks) + 1 if sinks else start
        hidden = (own - window - sinks)[..., 0].transpose(1, 2).long()
        by_some = visible_keys(mask).any(1).cumsum(-1).gather(-1, own_key[:, 0].expand(*own.shape[::2], 1))
        all_on = by_some[..., 0] <= max(all_on_until, window + sinks)
        return cls(last, start, near, sink_end, hidden, window, sinks, all_on, visible=shown)


def seen_keys(
    inputs: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    past_key_values: Cache | None,
    use_cache: bool,
    implementation: str,
    *seen: int,
) -> Seen:
    """What transformers' masks make of the arguments of LLaMA's decoder.

    `inputs` are ids or embeddings `[B, T, ...]`; `use_cache` says whether the call makes a cache where there is none;
    `seen` are the window, sinks and `all_on_until` of `Seen.from_positions`. What padding's queries see is unspecified.
    """
    given = attention_mask, position_ids, past_key_values, use_cache, implementation
    positions, starts = document_starts(inputs, *given)
    if not isinstance(attention_mask, Tensor):
        is_new = past_key_values is None or not (past_key_values.is_compileable or past_key_values.get_seq_length())
        is_whole = is_new and can_be_read(starts) and not bool(starts.any())
        return Seen.from_positions(positions, starts, *seen)._replace(is_causal=is_whole)
    mask = attention_mask.to(inputs.device)
    if mask.dim() == 4 and (mask.dtype != torch.bool or mask.shape[1:3] != (1, 1) or inputs.shape[1] > 1):
        return Seen.from_mask(mask, positions, *seen)
    shown = mask[:, 0, 0] if mask.dim() == 4 else mask != 0  # the former of one query per row
    has_holes = True  # where the mask cannot be read it may
    if can_be_read(shown) and can_be_read(positions):
        before = pad(shown[:, : int(positions[0, -1]) + 1], (1, 0))
        has_holes = bool(((before[:, 1:] & ~before[:, :-1]).sum(-1) > 1).any())
    return Seen.from_positions(positions, starts, *seen, shown if has_holes else None)


def document_starts(
    inputs: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    past_key_values: Cache | None,
    use_cache: bool,
    implementation: str,
) -> tuple[Tensor, Tensor]:
    """Where tokens are among the keys, `[1, T]`, and the first token that attention shows to each, `[B or 1, T]`.

    - With a mask: the row's first token that is no padding. With a cache: the row's first token.
    - With neither: the document's first token; documents begin where positions do not go on by one.
    - Flash attention: likewise in a batch of one row without padding, even with a cache, and in no other batch.
    - Attention that keeps keys itself (serving engines, masks that are no tensors): position 0.
    """
    before = 0 if past_key_values is None else past_key_values.get_seq_length()
    before = before.to(inputs.device) if isinstance(before, Tensor) else before  # that of a static cache
    positions = torch.arange(inputs.shape[1], device=inputs.device)[None] + before
    is_tensor, masked = isinstance(attention_mask, Tensor), attention_mask is not None
    if position_ids is not None and (keeps_keys(implementation) or (masked and not is_tensor)):
        return positions, positions - position_ids
    starts = torch.zeros_like(positions)
    if is_tensor:
        shown = visible_keys(attention_mask).to(inputs.device)
        shown = shown.any(1).any(1) if shown.dim() == 4 else shown
        starts = shown.int().argmax(-1, keepdim=True).expand(-1, inputs.shape[1])
    is_flash = "flash" in implementation
    tells_apart = inputs.shape[0] == 1 if is_flash else not (masked or use_cache or past_key_values is not None)
    if tells_apart and position_ids is not None:
        restarts = pad(position_ids.diff(dim=-1) != 1, (1, 0))
        if is_tensor:
            restarts &= shown.all()
        starts = torch.maximum(starts, torch.where(restarts, positions, 0)).cummax(-1).values
    return positions, starts


def paged_keys(position_ids: Tensor, token_edges: Tensor, key_edges: Tensor, *seen: int) -> Seen:
    """Of requests whose tokens lie side by side in one row, and so do their keys (continuous batching).

    `position_ids` `[1, T]` count in each request. Edges are the first token, or key, of each request and the end of the
    last one; tokens after it are padding. `seen` are the last arguments of `seen_keys`.
    """
    tokens = torch.arange(position_ids.shape[1], device=position_ids.device)
    request = torch.searchsorted(token_edges, tokens, right=True) - 1
    starts = key_edges[request.clamp_max(len(key_edges) - 2)].long()[None]
    return Seen.from_positions(starts + position_ids, starts, *seen)._replace(is_consecutive=False)
