"""Which keys each query sees: its whole document or a window of it, without the keys that a mask hides.

Shapes: B batch, T queries, S keys (of the cache and of this pass), H query heads.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import Cache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

_HIDDEN = -1e4  # additive masks hide a key by this value or a lower one


def can_be_read(tensor: Tensor) -> bool:
    """Whether Python code may read the values: the tensor has data, and no compiler or CUDA graph is recording."""
    if torch.compiler.is_compiling() or tensor.is_meta or type(tensor) is not Tensor:  # fake tensors have no data
        return False
    return tensor.device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def keeps_keys(implementation: str) -> bool:
    """Whether an attention keeps keys and values itself, as serving engines do: it has no registered mask function."""
    return implementation not in ALL_MASK_ATTENTION_FUNCTIONS._global_mapping


def visible_keys(mask: Tensor) -> Tensor:
    """The keys that an attention mask shows; the mask is one of padding, a boolean or an additive one."""
    return mask > _HIDDEN if mask.dim() == 4 and mask.is_floating_point() else mask != 0


class Seen(NamedTuple):
    """The keys that the queries of one forward pass see, shared by all layers.

    A head that is on sees the keys from `start` to `last`. A head that is off sees the keys from `near` to `last`, the
    sinks from `start` to before `sink_end`, and one distant token in place of the `hidden` other keys. The first five
    fields are int64 `[B or 1, T, 1]`, or `[B, T, H]` if a mask differs between heads.

    Attributes:
        last: last visible key: the query's own, unless a mask shows later ones.
        start: first key of the query's document.
        near: first key of the query's window; `last + 1` if heads that are off see no key.
        sink_end: the key after the sinks; `start` without sinks.
        hidden: number of keys that a head that is off does not see; zero or negative if it sees all.
        window: window size of a head that is off, including the query's own key; 0 without local attention.
        sinks: number of sinks.
        all_on: tokens that have all heads on whatever their scores, bool `[B or 1, T]`; None for no token.
        lead: number of first queries of each row that are known to have all heads on.
        is_causal: whether each row is known to be one document that starts at key 0, with T = S.
        is_consecutive: whether the values of `last` are consecutive and equal in all rows.
        visible: keys that a mask shows, bool `[B, S]` or `[B, 1 or H, T, S]`, or an additive mask; None for all keys.
            With a mask, window, sinks and hidden count visible keys.
        scratch: storage in which a backend keeps results for the other layers of the pass.
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
        """The first key of each query and head, `[B, T, H]`; `on` `[B, T, H]` says which heads are on."""
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
        """Causal attention within documents.

        Args:
            positions: index of each query among the keys, `[1, T]`.
            starts: index of the first key of each query's document, `[B or 1, T]`. A start after the query, as padding
                can have, counts as the query's own index.
            window, sinks: as the attributes.
            all_on_until: number of first tokens of a document that have all heads on. Tokens that see every key anyway
                have all heads on, too.
            visible: keys that a padding mask with holes shows, bool `[B, S]`.
        """
        last, start = positions[..., None], torch.minimum(starts, positions)[..., None]
        if not window:
            return cls(last, start, last + 1, start, last * 0, 0, 0, visible=visible, scratch={})
        counts = None if visible is None else visible.cumsum(-1)
        own, first = positions, start[..., 0]
        if counts is not None:  # count visible keys; a hidden query counts as the last visible key before it
            end = counts.shape[1] - 1
            own = counts[:, positions[0].clamp_max(end)] - 1
            first = (counts.gather(1, starts.expand(len(counts), -1).clamp_max(end)) - 1).clamp_min(0)

        def key_of(number: Tensor) -> Tensor:
            """Index of the visible key with this number; an arbitrary visible key if there is none."""
            if counts is None:
                return number
            return torch.searchsorted(counts, (number + 1).clamp_min(1).minimum(counts[:, -1:]))

        hidden = own - first + 1 - window - sinks
        near = key_of(torch.maximum(own - window + 1, first))
        sink_end = key_of(first + sinks - 1) + 1 if sinks else first * 0
        all_on, lead = hidden <= max(0, all_on_until - window - sinks), 0
        if positions.shape[1] > 1 and can_be_read(all_on):  # not worth a device synchronisation in a decoding step
            others = (~all_on.all(0)).nonzero()
            lead = int(others[0]) if len(others) else positions.shape[1]
        near, sink_end, hidden = (tensor[..., None] for tensor in (near, sink_end, hidden))
        return cls(last, start, near, sink_end, hidden, window, sinks, all_on, lead, visible=visible, scratch={})

    @classmethod
    def from_mask(cls, mask: Tensor, positions: Tensor, window: int, sinks: int, all_on_until: int) -> "Seen":
        """Attention under any mask `[B, 1 or H, T, S]`; the other arguments are those of `from_positions`.

        Of the keys that the mask shows to a query, a head that is off sees the first ones (sinks), the last ones up to
        the query (window), and all after it. A query to which the mask shows no key sees itself.
        """
        shown, own_key = visible_keys(mask), positions[:, None, :, None]
        sees_nothing = ~shown.any(-1, keepdim=True)
        shown = shown | (sees_nothing & (own_key == torch.arange(mask.shape[-1], device=mask.device)))
        numbers = shown.cumsum(-1, dtype=torch.int32)
        own = numbers.gather(-1, own_key.expand(*numbers.shape[:3], 1))

        def key_of(number: Tensor | int) -> Tensor:
            """The key up to which `number` keys are visible, `[B, T, 1 or H]`."""
            wanted = torch.as_tensor(number, dtype=torch.int32, device=mask.device).expand(own.shape)
            return torch.searchsorted(numbers, wanted.contiguous())[..., 0].transpose(1, 2)

        last, start = key_of(numbers[..., -1:]), key_of(1)
        own_place = positions[..., None]
        begins = (start[:, 1:] == start[:, :-1]) | (start[:, 1:] == own_place[:, 1:])
        is_plain = (last == own_place) & (own[..., 0].transpose(1, 2) == last - start + 1)
        is_plain = mask.shape[1] == 1 and can_be_read(mask) and bool(is_plain.all() & begins.all())
        if is_plain and not (mask.is_floating_point() and bool((mask[shown & ~sees_nothing] != 0).any())):
            return cls.from_positions(positions, start[..., 0], window, sinks, all_on_until)
        # Value fallbacks treat start == last as the first token of a document; move `start` of others to a hidden key.
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
    """Make a `Seen` from the arguments of LLaMA's decoder, as transformers makes its masks from them.

    `inputs` holds ids or embeddings `[B, T, ...]`; `use_cache` says whether the call creates a cache; `seen` holds
    window, sinks and `all_on_until` of `Seen.from_positions`. What queries of padding see is unspecified.
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
    shown = mask[:, 0, 0] if mask.dim() == 4 else mask != 0  # 4 dimensions with one query per row
    has_holes = True  # assumed if the mask cannot be read
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
    """The index of each token among the keys, `[1, T]`, and the first key that it sees, `[B or 1, T]`.

    - With a mask, the first key is the row's first token that is not padding; with a cache, the row's first token.
    - With neither, it is the first token of the document; a document begins where positions do not increase by one.
    - Flash attention tells documents apart in a batch of one row without padding, even with a cache, and in no other.
    - For attention that keeps keys itself (serving engines, masks that are not tensors), it is position 0.
    """
    before = 0 if past_key_values is None else past_key_values.get_seq_length()
    before = before.to(inputs.device) if isinstance(before, Tensor) else before  # a static cache returns a tensor
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
    """Make a `Seen` for continuous batching, where the requests' tokens, and their keys, are concatenated in one row.

    `position_ids` `[1, T]` count within each request. Edges hold the first token (or key) of each request and the end
    of the last request; later tokens are padding. `seen` is as in `seen_keys`.
    """
    tokens = torch.arange(position_ids.shape[1], device=position_ids.device)
    request = torch.searchsorted(token_edges, tokens, right=True) - 1
    starts = key_edges[request.clamp_max(len(key_edges) - 2)].long()[None]
    return Seen.from_positions(starts + position_ids, starts, *seen)._replace(is_consecutive=False)
