"""A cache that keeps only the keys that are read: sinks and a window for key-value groups that are never on.

Shapes: B batch, T new tokens, S tokens, H query heads, KV key-value heads, D head size.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from moh_llm.attention.call import Call, Kinds
from moh_llm.modeling.configuration_moh_llama import MoHLlamaConfig
from moh_llm.modeling.seen_moh import Seen

DROPPED = "attention_mask shows tokens that this MoHCache has dropped; use a DynamicCache"
_MORE = 64  # extra tokens that are kept, so that up to this many can be cropped
_STEPS = 256  # tokens are dropped, and memory is allocated, once per this many tokens


class SplitKeys(NamedTuple):
    """Returned by `MoHCache` in place of a keys tensor.

    Each part has ids of heads, the keys and values `[B, groups, n, D]` of their groups, and the visible keys.
    """

    parts: list[tuple[list[int] | slice, Tensor, Tensor, Seen]]

    def attend(self, attention: Callable[..., Tensor], call: Call, **kwargs: Any) -> Tensor:
        """`interval_attention` `[B, T, H, D]` of these keys: one call of `attention` per part."""
        on, out = call.first <= call.seen.start, None
        for heads, keys, values, seen in self.parts:
            own = call._replace(
                query=call.query[:, heads],
                key=keys,
                value=values,
                first=seen.first(on[..., heads]),
                seen=seen,
                distant=call.distant and (call.distant[0][..., heads], call.distant[1][heads]),
                kinds=call.kinds and _of_heads(call.kinds, heads, call.query.shape[1]),
            )
            found = attention(*own, **kwargs)
            out = found.new_empty(*call.first.shape, found.shape[-1]) if out is None else out
            out[:, :, heads] = found
        return out

    def __getattr__(self, name: str) -> Any:
        raise ValueError("this attention needs a keys tensor, which a MoHCache does not keep; use a DynamicCache")


def _of_heads(kinds: Kinds, heads: list[int] | slice, count: int) -> Kinds:
    """`kinds` restricted to `heads`, with ids that count among these."""
    own = range(count)[heads] if isinstance(heads, slice) else heads
    numbers = {head: number for number, head in enumerate(own)}
    return tuple(tuple(numbers[head] for head in kind if head in numbers) for kind in kinds)


def _local_groups(config: MoHLlamaConfig, layer_idx: int) -> list[int]:
    """Sorted ids of the key-value groups whose heads are all never on."""
    if config.head_fallback != "local":
        return []
    size = config.num_attention_heads // config.num_key_value_heads
    chosen = [] if config.router_type == "none" else config.routed_heads(layer_idx)
    on = {head // size for head in (*config.shared_heads_per_layer[layer_idx], *chosen)}
    return [group for group in range(config.num_key_value_heads) if group not in on]


def _as_slice(ids: list[int]) -> list[int] | slice:
    """Ids as a slice if they are consecutive, since indexing with a slice makes no copy."""
    found = slice(ids[0], ids[-1] + 1) if ids else slice(0, 0)
    return found if ids == list(range(found.start, found.stop)) else ids


class _Room:
    """Keys and values `[B, groups, n, D]` that grow without copying at every step."""

    def __init__(self) -> None:
        self._room: list[Tensor] = []
        self.length = 0

    @property
    def states(self) -> list[Tensor]:
        return [room[:, :, : self.length] for room in self._room]

    def append(self, new: Sequence[Tensor]) -> None:
        if not self.length:
            self._room, self.length = [one.clone() for one in new], new[0].shape[2]  # a view would keep all groups
            return
        end = self.length + new[0].shape[2]
        for number, (states, old) in enumerate(zip(new, self.states, strict=True)):
            if self._room[number].shape[2] < end:
                self._room[number] = states.new_empty(*states.shape[:2], end + _STEPS, states.shape[3])
                self._room[number][:, :, : self.length] = old
            self._room[number][:, :, self.length : end] = states
        self.length = end

    def change(self, change: Callable[[Tensor], Tensor]) -> None:
        self._room = [change(states) for states in self.states]


class MoHCacheLayer(DynamicLayer):
    """Keys and values of one layer.

    `keys` and `values` `[B, groups that may be on, S, D]` hold all tokens, as in a dynamic cache, but a decoding step
    does not copy them. For the other groups the layer drops old tokens: it keeps the first `local_sinks` tokens of each
    row's document, the last `local_window` ones, and a few more. `begin` is the first recent token that is kept.
    """

    def __init__(self, config: MoHLlamaConfig, layer_idx: int):
        super().__init__()
        self.config, self.local_groups = config, _local_groups(config, layer_idx)
        kept = [group for group in range(config.num_key_value_heads) if group not in self.local_groups]
        shared = config.num_attention_heads // config.num_key_value_heads
        both = (kept, self.local_groups) if self.local_groups else (kept,)
        self._groups = [_as_slice(groups) for groups in both] if self.local_groups else [slice(None)]
        self._heads = [_as_slice([group * shared + n for group in groups for n in range(shared)]) for groups in both]
        # Slots before the recent tokens, at least one so that no window begins at key 0.
        self._sinks = max(1, config.local_sinks)
        self._recent = max(config.local_window - 1, config.local_sinks) + _MORE  # recent tokens that are always kept
        self.reset()

    def reset(self) -> None:
        self.keys = self.values = None
        self.is_initialized = False
        self._rooms = [_Room() for _ in self._groups]  # one for the groups that may be on, one for the others
        self.length = self.begin = 0
        self._late = 0  # from this token on no row has all heads on, as of the last drop
        # The first token of each row's document, as of the last drop, `[B or 1, 1, 1]`.
        self._starts: Tensor | None = None

    def near_seen(self, seen: Seen | None) -> Seen | None:
        """Translate `seen` to the kept keys of the groups that are never on.

        None if these groups read all keys, as under masks with holes. Raises ValueError if a visible key was dropped.
        """
        if seen is None or seen.visible is not None or self.config._attn_implementation == "eager":
            return None
        if not self.begin:
            return seen
        is_recent, moved = seen.start >= self.begin, self._sinks - self.begin
        if not bool((is_recent | (seen.start == self._starts)).all()):
            raise ValueError(DROPPED)
        return seen._replace(
            scratch={},  # backends cache indices of all keys there
            last=seen.last + moved,
            start=torch.where(is_recent, seen.start + moved, 0),
            near=seen.near + moved,
            sink_end=torch.where(is_recent, seen.sink_end + moved, seen.sink_end - seen.start),
            is_causal=False,
        )

    def update(
        self, key_states: Tensor, value_states: Tensor, cache_kwargs: dict[str, Any] | None = None
    ) -> tuple[Tensor, Tensor] | tuple[SplitKeys, SplitKeys]:
        """Add keys and values `[B, KV, T, D]`; return those of all tokens, or a `SplitKeys` in place of both.

        `cache_kwargs` has `seen`, the keys that the new tokens see; `near_seen`, the result of that method; and
        `all_on`, whether the new tokens have all heads on and therefore read all keys.
        """
        given = cache_kwargs or {}
        seen, near_seen = given.get("seen"), given.get("near_seen")
        reads_all = near_seen is None or given["all_on"]
        if self.local_groups:
            if key_states.shape[1] != self.config.num_key_value_heads:
                raise ValueError("a MoHCache does not work with tensor parallelism; use a DynamicCache")
            if reads_all and self.begin:
                raise ValueError(DROPPED)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        for room, groups in zip(self._rooms, self._groups, strict=True):
            room.append((key_states[:, groups], value_states[:, groups]))
        self.length += key_states.shape[2]
        found = [room.states for room in self._rooms]
        self.keys, self.values = found[0]
        if not self.local_groups:
            return self.keys, self.values
        if reads_all:
            return tuple(self._of_all_groups(tensors) for tensors in zip(*found, strict=True))
        parts = zip(self._heads, *zip(*found, strict=True), (seen, near_seen), strict=True)
        split = SplitKeys([part for part in parts if part[1].shape[1]])
        self._drop(seen)
        return split, split

    def _of_all_groups(self, parts: Sequence[Tensor]) -> Tensor:
        """Merge keys or values of both kinds of groups."""
        whole = parts[0].new_empty(len(parts[0]), self.config.num_key_value_heads, *parts[0].shape[2:])
        for groups, states in zip(self._groups, parts, strict=True):
            whole[:, groups] = states
        return whole

    def _drop(self, seen: Seen) -> None:
        """Drop the tokens that groups that are never on will not read again, once per `_STEPS` tokens."""
        begin = self.length - self._recent
        if begin - self.begin <= _STEPS:
            return
        start = seen.start[:, -1:]
        latest = int(start.max())
        late = latest + self.config.all_heads_until
        if begin < latest + self._sinks or self.length < late:
            return
        moved = self._sinks - self.begin if self.begin else 0
        slots = torch.arange(self._sinks, device=start.device)
        index = (start + slots + moved)[:, 0]  # [B or 1, sinks]
        index = torch.where(start[:, 0] >= self.begin, index, slots)[:, None, :, None]
        kept = []
        for states in self._rooms[-1].states:
            sinks = states.gather(2, index.expand(*states.shape[:2], -1, states.shape[3]))
            kept.append(torch.cat([sinks, states[:, :, begin + moved :]], dim=2))
        self._rooms[-1] = _Room()
        self._rooms[-1].append(kept)
        self.begin, self._late, self._starts = begin, late, start

    def get_seq_length(self) -> int:
        """Number of tokens that were added."""
        return self.length

    def crop(self, max_length: int) -> None:
        """Keep `max_length` tokens, or remove the last `-max_length` ones if it is negative.

        Raises ValueError if the remaining tokens would need keys that were dropped.
        """
        left = self.length + max_length if max_length <= 0 else max_length
        if left >= self.length:
            return
        if self.begin and (left - self.begin < self.config.local_window - 1 or left < self._late):
            raise ValueError(
                f"cannot remove {self.length - left} tokens from the cache: heads that are never on keep only the last "
                f"{self.length - self.begin}; use a DynamicCache"
            )
        for room in self._rooms:
            room.length -= self.length - left
        self.keys, self.values = self._rooms[0].states
        self.length = left

    def _each(self, change: Callable[[Tensor], Tensor]) -> None:
        if not self.is_initialized:
            return
        for room in self._rooms:
            room.change(change)
        self.keys, self.values = self._rooms[0].states
        if self._starts is not None and len(self._starts) > 1:  # with one row the value holds for all rows
            self._starts = change(self._starts)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._each(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._each(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._each(lambda tensor: tensor[indices])


class MoHCache(Cache):
    """A `past_key_values` for `generate` and `forward` in place of `DynamicCache`: `MoHCache(model.config)`.

    A decoding step does not copy the keys and values of earlier steps. The cache is smaller than a `DynamicCache` if
    whole key-value groups are never on: in models with `routing_granularity="kv_group"` and in models without a router.
    With a mask that hides tokens between visible ones it drops nothing.
    """

    def __init__(self, config: MoHLlamaConfig):
        super().__init__(layers=[MoHCacheLayer(config, index) for index in range(config.num_hidden_layers)])
        self._sees: tuple[Seen | None, Seen | None] = None, None  # of the current pass, shared by all layers

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        cache_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor] | tuple[SplitKeys, SplitKeys]:
        """See `MoHCacheLayer.update`; `cache_kwargs` holds `seen` and `all_on`."""
        layer, given = self.layers[layer_idx], cache_kwargs or {}
        if layer.local_groups:
            if self._sees[0] is not given.get("seen"):
                self._sees = given["seen"], layer.near_seen(given["seen"])
            given = {**given, "near_seen": self._sees[1]}
        return super().update(key_states, value_states, layer_idx, given)
