"""A cache that keeps only what is read: of groups that no token can have on, the first tokens and the last ones."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import Cache, DynamicLayer

from .configuration_moh_llama import MoHLlamaConfig

DROPPED = "a MoHCache dropped tokens that attention_mask shows now; use a DynamicCache"
_MORE = 64  # tokens beyond the window that are kept at least, so that as many can be cropped
_STEPS = 256  # tokens after which older ones are dropped, and for which room is made, all at once


def can_be_read(tensor: torch.Tensor) -> bool:
    """Whether Python may depend on the tensor's numbers: it has some, and no compiler or CUDA graph records."""
    if torch.compiler.is_compiling() or tensor.is_meta or type(tensor) is not torch.Tensor:  # fake tensors have none
        return False
    return tensor.device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def as_slice(numbers: list[int]) -> slice | None:
    """Increasing numbers as a slice, by which tensors are not copied; None where they are none."""
    if not numbers:
        return slice(0, 0)
    step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
    found = slice(numbers[0], numbers[-1] + 1, step)
    return found if numbers == list(range(found.start, found.stop, step)) else None


def slice_of(ids: torch.Tensor) -> slice | None:
    """Increasing ids as a slice; None where they are none, or reading them takes time."""
    return as_slice(ids.tolist()) if ids.device.type == "cpu" and can_be_read(ids) else None


def select(tensor: torch.Tensor, dim: int, ids: torch.Tensor) -> torch.Tensor:
    """`tensor.index_select(dim, ids)` for increasing ids, without a copy where they are a slice."""
    found = slice_of(ids)
    return tensor.index_select(dim, ids) if found is None else tensor[(slice(None),) * dim + (found,)]


class Kept(NamedTuple):
    """Which tokens of groups that are never on a pass reads, and which ones later passes do.

    Attributes:
        sinks: index of each row's first visible tokens `[B or 1, sinks]`; any for those still to come.
        first: index of the first token of the first query's window, `[B or 1, 1]`.
        recent: index of the first of the last tokens that may be read later, `[B or 1, 1]`; None: rows have no holes,
            so that their number says it.
        late: index of the token from which on a row has heads off, `[B or 1, 1]`.
        is_masked: whether a mask has said so: another mask may say otherwise.
    """

    sinks: torch.Tensor
    first: torch.Tensor
    recent: torch.Tensor | None
    late: torch.Tensor
    is_masked: bool


def least_recent(window: int, sinks: int) -> int:
    """How many visible tokens of a row are kept at least."""
    return max(window - 1, sinks) + _MORE


class NearKeys(NamedTuple):
    """What a `MoHCacheLayer` keeps of the groups that are never on.

    Attributes:
        keys, values: `[B, groups, sinks + recent tokens, D]`, the documents' first tokens and then the recent ones.
        begin: index of the first recent token.
        kept_groups: sorted ids of the other groups, whose keys and values `update` returns.
    """

    keys: torch.Tensor
    values: torch.Tensor
    begin: int
    kept_groups: torch.Tensor


class MoHCacheLayer(DynamicLayer):
    """Keys and values of one layer.

    `keys` and `values` `[B, groups that may be on, S, D]` are what a dynamic cache has, but a step of decoding does not
    copy them all. Of the other groups the layer keeps `local_sinks` first tokens of each row's document and
    `local_window` last ones, and some more.

    Args:
        config: the model's.
        layer_idx: the layer.
    """

    def __init__(self, config: MoHLlamaConfig, layer_idx: int):
        super().__init__()
        self.local_groups = config.local_groups(layer_idx)
        self.kept_groups = [g for g in range(config.num_key_value_heads) if g not in self.local_groups]
        # Lists as indices are copied to the device each time.
        self._local = as_slice(self.local_groups) or self.local_groups
        self._kept = as_slice(self.kept_groups) or self.kept_groups
        self.window, self.num_sinks = config.local_window, config.local_sinks
        self.all_heads_until = config.all_heads_until
        self._drop()

    def _drop(self) -> None:
        self._room: list[torch.Tensor] = []  # of which `keys` and `values` are the beginnings
        self._near_room: list[torch.Tensor] = []  # of the other groups: first tokens, recent ones, and room for more
        self.num_recent = 0  # tokens
        self.begin = 0  # index of the first recent token
        self.late = 0  # index of the token from which on no row has all heads on, when tokens were dropped last
        self._near: NearKeys | None = None
        self.sinks: torch.Tensor | None = None  # index of the first tokens `[B or 1, num_sinks]`
        self.is_masked = False  # see `Kept`

    @property
    def recent(self) -> list[torch.Tensor]:
        """Recent keys and values of the groups that are never on, `[B, groups, num_recent, D]`."""
        return [tensor[:, :, self.num_sinks : self.num_sinks + self.num_recent] for tensor in self._near_room]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, cache_kwargs: dict[str, Any] | None = None, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add keys and values `[B, KV, T, D]`; returns those of `kept_groups`, and `take_near` has those of the others.

        As long as all heads are on in a row nothing is dropped, and it can return those of all groups.

        Args:
            key_states, value_states: of the new tokens.
            cache_kwargs: `kept`, a `Kept`, and `all`, whether all groups are asked for, as some of the new tokens have
                all heads on.
        """
        states = key_states, value_states
        if self.local_groups:
            kept_groups = torch.tensor(self.kept_groups, dtype=torch.long, device=key_states.device)
            kept: Kept = cache_kwargs["kept"]
            self._append_near([tensor[:, self._local] for tensor in states], kept)
            if cache_kwargs["all"] and self.begin:
                raise ValueError(DROPPED)
            if not cache_kwargs["all"]:
                near = [tensor[:, :, : self.num_sinks + self.num_recent] for tensor in self._near_room]
                self._near = NearKeys(*near, self.begin, kept_groups)
            recent = self.recent
            extra = self.num_recent - least_recent(self.window, self.num_sinks)
            if extra > _STEPS and kept.recent is not None:
                extra = min(extra, int(kept.recent.min()) - self.begin)
            if extra > _STEPS and self.all_heads_until > self.window + self.num_sinks:
                self.late = int(kept.late.max())
            if extra > _STEPS and self.begin + self.num_recent >= self.late:
                self._set_near([tensor[:, :, : self.num_sinks] for tensor in self._near_room], recent, extra)
                self.begin += extra
            states = [tensor[:, self._kept] for tensor in states]
        keys, values = self._append(states)
        if self.local_groups and cache_kwargs["all"]:
            order = torch.tensor([*self.kept_groups, *self.local_groups], device=keys.device).argsort()
            keys, values = (
                torch.cat(pair, dim=1).index_select(1, order) for pair in zip((keys, values), recent, strict=True)
            )
        return keys, values

    def _append(self, new: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(*new)
        length, end = self.keys.shape[2], self.keys.shape[2] + new[0].shape[2]
        if not self._room or self._room[0].shape[2] < end:
            room = [tensor.new_empty(*tensor.shape[:2], end + _STEPS, tensor.shape[3]) for tensor in new]
            for tensor, old in zip(room, (self.keys, self.values), strict=True):
                tensor[:, :, :length] = old
            self._room = room
        for tensor, states in zip(self._room, new, strict=True):
            tensor[:, :, length:end] = states
        self.keys, self.values = (tensor[:, :, :end] for tensor in self._room)
        return self.keys, self.values

    def _set_near(
        self, sinks: Sequence[torch.Tensor], recent: Sequence[torch.Tensor], drop: int = 0, more: int = 0
    ) -> None:
        """Keep these in new room, which is there for `more` tokens at least, without the first `drop` recent ones."""
        self.num_recent = recent[0].shape[2] - drop
        end = self.num_sinks + self.num_recent
        room = []
        for first, tensor in zip(sinks, recent, strict=True):
            room.append(tensor.new_empty(*tensor.shape[:2], end + more + _STEPS, tensor.shape[3]))
            room[-1][:, :, : self.num_sinks] = first
            room[-1][:, :, self.num_sinks : end] = tensor[:, :, drop:]
        self._near_room = room

    def _append_near(self, new: Sequence[torch.Tensor], kept: Kept) -> None:
        """Add keys and values of the groups that are never on to the recent ones."""
        count = new[0].shape[2]
        if not self._near_room:
            empty = [tensor[:, :, :0] for tensor in new]
            sinks = [tensor.new_zeros(*tensor.shape[:2], self.num_sinks, tensor.shape[3]) for tensor in new]
            self._set_near(sinks, empty, more=count)
        end = self.num_sinks + self.num_recent
        if self._near_room[0].shape[2] < end + count:
            self._set_near([tensor[:, :, : self.num_sinks] for tensor in self._near_room], self.recent, more=count)
        for room, tensor in zip(self._near_room, new, strict=True):
            room[:, :, end : end + count] = tensor
        self.num_recent += count
        self.sinks, self.is_masked = kept.sinks, kept.is_masked
        if not self.num_sinks or (self.sinks.device.type == "cpu" and int(self.sinks.max()) < self.begin):
            return
        # First tokens that are no longer recent stay; entries for tokens still to come are arbitrary.
        index = (kept.sinks - self.begin)[:, None, :, None]
        for room, tensor in zip(self._near_room, self.recent, strict=True):
            first = room[:, :, : self.num_sinks]
            there = index.clamp(0, self.num_recent - 1).expand(*tensor.shape[:2], -1, tensor.shape[3])
            first.copy_(torch.where(index >= 0, tensor.gather(2, there), first))

    def take_near(self) -> NearKeys | None:
        """What the layer keeps of `local_groups`; once after each update, None where that returned all groups."""
        near, self._near = self._near, None
        return near

    def get_seq_length(self) -> int:
        """Number of tokens that the layer was given."""
        return self.keys.shape[-2] if self.is_initialized else 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.keys, self.values = (tensor[:, :, :0] for tensor in (key_states, value_states))

    def reset(self) -> None:
        self.keys = self.values = None
        self.is_initialized = False
        self._drop()

    def crop(self, max_length: int) -> None:
        """Remove the last tokens: as many as a negative number says, or so that `max_length` are left.

        Raises:
            ValueError: earlier ones would be needed, which are not kept.
        """
        length = self.get_seq_length()
        left = length + max_length if max_length <= 0 else max_length
        if left >= length:
            return
        if self.begin and (left - self.begin < self.window - 1 or left < self.late):
            raise ValueError(
                f"{length - left} tokens cannot be removed from the cache: of groups that are never on only the last "
                f"{length - self.begin} are kept; use a DynamicCache"
            )
        self.keys, self.values = self.keys[:, :, :left], self.values[:, :, :left]
        self.num_recent = min(self.num_recent, left - self.begin)

    def _each(self, change: Any) -> None:
        if self.is_initialized:
            if self.sinks is not None and len(self.sinks) == len(self.keys):  # else it is the same for all rows
                self.sinks = change(self.sinks)
            self.keys, self.values = change(self.keys), change(self.values)
            self._near_room = [*map(change, self._near_room)]
            self._room = []

    def offload(self) -> None:
        self._each(lambda tensor: tensor.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        self._each(lambda tensor: tensor.to(self.device, non_blocking=True))

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._each(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._each(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._each(lambda tensor: tensor[indices])


class MoHCache(Cache):
    """A cache for `generate` and `forward` (`past_key_values`) in place of a `DynamicCache`.

    A step of decoding does not copy the keys and values of all steps before. It is smaller where whole key-value groups
    are never on, which plans of whole groups have (`routing_granularity="kv_group"`), and those without a router.
    """

    def __init__(self, config: MoHLlamaConfig):
        super().__init__(layers=[MoHCacheLayer(config, index) for index in range(config.num_hidden_layers)])

    def check(self, kept: Kept) -> None:
        """Raise ValueError where tokens were dropped that the next pass reads: its mask is not that of earlier ones.

        Without masks nothing is read from the device.
        """
        layer = next((layer for layer in self.layers if layer.local_groups), None)
        if layer is None or not layer.begin or not (kept.is_masked or layer.is_masked):
            return
        is_there = (kept.sinks == layer.sinks.to(kept.sinks.device)) | (kept.sinks >= layer.begin)
        if not bool(is_there.all() & (kept.first >= layer.begin).all()):
            raise ValueError(DROPPED)
