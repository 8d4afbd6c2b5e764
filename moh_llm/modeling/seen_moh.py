"""Which keys the queries of a pass see: their document, a window of it, what masks hide.

Shapes: B batch, T queries, S keys (of the cache and of this pass), H query heads.
"""

from typing import NamedTuple

import torch
from torch.nn.functional import pad
from transformers.cache_utils import Cache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

_HIDDEN = -1e4  # what is added to the score of a key that a query does not see, or less


def can_be_read(tensor: torch.Tensor) -> bool:
    """Whether Python may depend on the tensor's numbers: it has some, and no compiler or CUDA graph records."""
    if torch.compiler.is_compiling() or tensor.is_meta or type(tensor) is not torch.Tensor:  # fake tensors have none
        return False
    return tensor.device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def keeps_keys(implementation: str) -> bool:
    """Whether an attention keeps keys and values itself: it has registered no way to make a mask (serving engines)."""
    return implementation not in ALL_MASK_ATTENTION_FUNCTIONS._global_mapping


def visible_keys(mask: torch.Tensor) -> torch.Tensor:
    """Which keys a mask of attention shows: one of padding, a boolean one, or one that is added to scores."""
    return mask > _HIDDEN if mask.dim() == 4 and mask.is_floating_point() else mask != 0


def keys_of_ranks(ranks: torch.Tensor, counts: torch.Tensor | None) -> torch.Tensor:
    """Indices of the visible keys of these ranks `[B or 1, T]`; of any visible key where there is none of the rank.

    `counts` is how many keys are visible up to each one, `[B, S]`; None: all are.
    """
    if counts is None:
        return ranks
    numbers = (ranks + 1).clamp_min(1).minimum(counts[:, -1:])
    return torch.searchsorted(counts, numbers)


class Seen(NamedTuple):
    """The keys that the queries of one forward pass see: what all layers have in common.

    A query of a head that is on sees the keys from `start` to `last`. A query of a head that is off sees those from
    `near` to `last`, those from `start` to before `sink_end`, and one distant token for the `hidden` others. All
    indices count keys. They are int64 `[B or 1, T, 1]`, or `[B, T, H]` where a mask differs between heads.

    Attributes:
        last: the last key that a query sees: its own, unless a mask shows later ones.
        start: the first key of its document.
        near: the first key of its window; `last + 1` where heads that are off see nothing.
        sink_end: the key after its sinks; `start` where there are none.
        hidden: how many keys a head that is off does not see; zero or less where none.
        window: how many keys, up to a query's own, a head that is off sees at most; 0: none.
        sinks: how many sinks.
        all_on: which tokens have all heads on whatever their scores, bool `[B or 1, T]`; None: not one.
        lead: how many first queries of each row are known to be of this kind.
        is_causal: whether it is known that each row is one document from key 0 on, of T = S tokens.
        is_consecutive: whether `last` are consecutive numbers, the same for all rows.
        visible: which keys a mask shows beside all this, bool `[B, S]` or `[B, 1 or H, T, S]`, or what it adds to
            scores; None: all. The other fields then count visible keys, as if the others were not there.
    """

    last: torch.Tensor
    start: torch.Tensor
    near: torch.Tensor
    sink_end: torch.Tensor
    hidden: torch.Tensor
    window: int
    sinks: int
    all_on: torch.Tensor | None = None
    lead: int = 0
    is_causal: bool = False
    is_consecutive: bool = True
    visible: torch.Tensor | None = None

    def first(self, on: torch.Tensor) -> torch.Tensor:
        """The first key of each query and head, `[B, T, H]`, given which heads are on, bool `[B, T, H]`."""
        return torch.where(on, self.start, self.near)

    @classmethod
    def of(
        cls,
        positions: torch.Tensor,
        starts: torch.Tensor,
        window: int = 0,
        sinks: int = 0,
        all_on_until: int = 0,
        visible: torch.Tensor | None = None,
    ) -> "Seen":
        """Of causal attention within documents.

        Args:
            positions: index of each query among the keys, `[1, T]`.
            starts: index of the first key of each query's document, `[B or 1, T]`. One after the query's own position,
                as padding has, counts as that position.
            window: how many keys a query of a head that is off sees up to its own; 0: none.
            sinks: how many first keys of its document it sees.
            all_on_until: how many first tokens of a document have all heads on; those that see every key have, too.
            visible: which keys a mask of padding shows, bool `[B, S]`, where it has holes.
        """
        last, start = positions[..., None], torch.minimum(starts, positions)[..., None]
        if not window:
            none = torch.zeros_like(last)
            return cls(last, start, last + 1, start, none, 0, 0, visible=visible)
        counts = None if visible is None else visible.cumsum(-1)
        own, first = positions, start[..., 0]
        if counts is not None:  # numbers of visible keys; that of a hidden query is of the last visible key before it
            own = counts[:, positions[0].clamp_max(counts.shape[1] - 1)] - 1
            first = (counts.gather(1, starts.expand(len(counts), -1).clamp_max(counts.shape[1] - 1)) - 1).clamp_min(0)
        hidden = own - first + 1 - window - sinks
        near = keys_of_ranks(torch.maximum(own - window + 1, first), counts)
        sink_end = keys_of_ranks(first + sinks - 1, counts) + 1 if sinks else first * 0
        all_on, lead = hidden <= max(0, all_on_until - window - sinks), 0
        if positions.shape[1] > 1 and can_be_read(all_on):  # of a step on a GPU this is not worth waiting for
            others = (~all_on.all(0)).nonzero()
            lead = int(others[0]) if len(others) else positions.shape[1]
        near, sink_end, hidden = (tensor[..., None] for tensor in (near, sink_end, hidden))
        return cls(last, start, near, sink_end, hidden, window, sinks, all_on, lead, visible=visible)

    @classmethod
    def under(cls, mask: torch.Tensor, positions: torch.Tensor, window: int, sinks: int, all_on_until: int) -> "Seen":
        """Of any mask of attention `[B, 1 or H, T, S]`; the other arguments are those of `of`.

        Of the keys that the mask shows a query these are the first ones, the last ones up to itself, and those after
        it. A query that sees no key is taken for one that sees all of them.
        """
        shown = visible_keys(mask).expand(-1, -1, positions.shape[1], -1)
        shown = shown | ~shown.any(-1, keepdim=True)
        numbers = shown.cumsum(-1, dtype=torch.int32)
        places = positions.clamp_max(mask.shape[-1] - 1)[:, None, :, None].expand(*numbers.shape[:2], -1, -1)
        own = numbers.gather(-1, places)

        def key_of(number: torch.Tensor | int) -> torch.Tensor:
            """The first key up to which so many are visible, `[B, T, 1 or H]`."""
            numbered = torch.as_tensor(number, dtype=torch.int32, device=mask.device).expand(own.shape)
            return torch.searchsorted(numbers, numbered.contiguous())[..., 0].transpose(1, 2)

        last = key_of(numbers[..., -1:])
        start, hidden = key_of(1), (own - window - sinks)[..., 0].transpose(1, 2).long()
        near = key_of((own - window + 1).clamp_min(1)) if window else last + 1
        sink_end = key_of(sinks) + 1 if sinks and window else start
        all_on = None
        if window:
            seen_by_some = shown.any(1).cumsum(-1, dtype=torch.int32).gather(-1, places[:, 0])[..., 0]
            all_on = seen_by_some <= max(all_on_until, window + sinks)
        # Fallbacks of values ask whether a query sees nothing but itself. What lies before the first key is hidden.
        start = start - ((start == last) & (start != positions[..., None])).long()
        if mask.is_floating_point():
            shown = mask.masked_fill(~visible_keys(mask), 0).masked_fill(~shown, -torch.inf)
        hidden = hidden if window else torch.zeros_like(hidden)
        return cls(last, start, near, sink_end, hidden, window, sinks if window else 0, all_on, visible=shown)


def seen_keys(
    inputs: torch.Tensor,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    past_key_values: Cache | None,
    use_cache: bool,
    implementation: str,
    window: int = 0,
    sinks: int = 0,
    all_on_until: int = 0,
) -> Seen:
    """What transformers' masks make of the arguments of LLaMA's decoder.

    `inputs` are ids or embeddings `[B, T, ...]`, `use_cache` says whether the call makes a cache where there is none;
    the last three arguments are those of `Seen.of`. What queries that are padding see may be anything.
    """
    positions, starts = document_starts(
        inputs, attention_mask, position_ids, past_key_values, use_cache, implementation
    )
    seen = window, sinks, all_on_until
    if not isinstance(attention_mask, torch.Tensor):
        is_new = past_key_values is None or not (past_key_values.is_compileable or past_key_values.get_seq_length())
        is_whole = is_new and can_be_read(starts) and not bool(starts.any())
        return Seen.of(positions, starts, *seen)._replace(is_causal=is_whole)
    mask = attention_mask.to(inputs.device)
    if mask.dim() == 4:
        if mask.dtype != torch.bool or mask.shape[1:3] != (1, 1) or inputs.shape[1] > 1:
            if _is_of_documents(mask, positions, starts := starts.cummax(-1).values):
                return Seen.of(positions, starts, *seen)
            return Seen.under(mask, positions, *seen)
        mask = mask[:, 0, 0]  # of one query per row
    shown = mask != 0
    return Seen.of(positions, starts, *seen, shown if _has_holes(shown, positions) else None)


def document_starts(
    inputs: torch.Tensor,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    past_key_values: Cache | None,
    use_cache: bool,
    implementation: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where tokens are among the keys, `[1, T]`, and the first token that attention shows each, `[B or 1, T]`.

    - A mask `[B, S]` of all keys: the first token of a row that is no padding. Documents are not distinguished.
    - A mask `[B, 1 or H, T, S]`: the first key that a query sees; the one before it where that is its own, and it sees
      later ones.
    - No mask and no cache: the first token of a row, and where positions do not go on by one. With a cache the first
      token of a row only.
    - Flash attention distinguishes documents in a batch of one row without padding, with a cache, too, and in no other.
    - Attention that keeps keys itself (serving engines, masks that are no tensors): position 0.
    """
    before = 0 if past_key_values is None else past_key_values.get_seq_length()
    before = before.to(inputs.device) if isinstance(before, torch.Tensor) else before  # that of a static cache
    positions = torch.arange(inputs.shape[1], device=inputs.device)[None] + before
    is_tensor, masked = isinstance(attention_mask, torch.Tensor), attention_mask is not None
    if is_tensor and attention_mask.dim() == 4:
        visible = visible_keys(attention_mask).any(1).to(inputs.device)
        places = torch.arange(visible.shape[-1], device=inputs.device)
        starts, sees_later = visible.int().argmax(-1), (visible & (places > positions[..., None])).any(-1)
        return positions, torch.where(sees_later & (starts == positions), positions - 1, starts)
    # As create_causal_mask has it: there is no mask for an attention that has registered no way to make one.
    if position_ids is not None and (keeps_keys(implementation) or (masked and not is_tensor)):
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


def paged_keys(position_ids: torch.Tensor, token_edges: torch.Tensor, key_edges: torch.Tensor, *seen: int) -> Seen:
    """Of requests whose tokens lie side by side in one row, and so do their keys (continuous batching).

    Args:
        position_ids: position of each token in its request, `[1, T]`.
        token_edges: the first token of each request and the end of the last one; tokens after it are padding.
        key_edges: likewise of keys.
        seen: the last three arguments of `Seen.of`.
    """
    tokens = torch.arange(position_ids.shape[1], device=position_ids.device)
    request = torch.searchsorted(token_edges, tokens, right=True) - 1
    starts = key_edges[request.clamp_max(len(key_edges) - 2)].long()[None]
    return Seen.of(starts + position_ids, starts, *seen)._replace(is_consecutive=False)


def _has_holes(shown: torch.Tensor, positions: torch.Tensor) -> bool:
    """Whether a mask `[B, S]` hides keys between others up to the last query; where it cannot be read it may."""
    if not (can_be_read(shown) and can_be_read(positions)):
        return True
    shown = pad(shown[:, : int(positions[0, -1]) + 1], (1, 0))
    return bool(((shown[:, 1:] & ~shown[:, :-1]).sum(-1) > 1).any())


def _is_of_documents(mask: torch.Tensor, positions: torch.Tensor, starts: torch.Tensor) -> bool:
    """Whether a mask `[B, 1 or H, T, S]` shows each query its document up to itself, or nothing.

    Documents begin at `starts` `[B, T]`. Where that cannot be read it is not known.
    """
    if not can_be_read(mask):
        return False
    index, visible = torch.arange(mask.shape[-1], device=mask.device), visible_keys(mask)
    first, last = (tensor[:, None, :, None] for tensor in (starts, positions))
    shown = mask == 0 if mask.is_floating_point() else visible
    is_right = torch.where((index >= first) & (index <= last), shown, ~visible) | ~visible.any(-1, keepdim=True)
    begins = (starts[:, 1:] == starts[:, :-1]) | (starts[:, 1:] == positions[:, 1:])
    return bool(is_right.all() & begins.all())
