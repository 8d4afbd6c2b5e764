"""A cache that keeps only what is read: of groups that no token can have on, the first tokens and the last ones."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import Cache, DynamicLayer

from .configuration_moh_llama import MoHLlamaConfig

_MORE = 64  # tokens beyond the window that are kept at least, so that as many can be cropped
_STEPS = 256  # tokens after which older ones are dropped, and for which room is made, all at once


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
        self.window, self.num_sinks = config.local_window, config.local_sinks
        self.all_heads_until = config.all_heads_until
        self._drop()

    def _drop(self) -> None:
        self._room: list[torch.Tensor] = []  # of which `keys` and `values` are the beginnings
        self.begin = 0  # index of the first token in `recent`
        self.late = 0  # index of the token from which on no row has all heads on
        self.recent: list[torch.Tensor] = []
        self.sinks: list[torch.Tensor] = []
        self._near: NearKeys | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, cache_kwargs: dict[str, Any] | None = None, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add keys and values `[B, KV, T, D]`; returns those of `kept_groups`, and `take_near` has those of the others.

        As long as all heads are on in a row nothing is dropped, and it can return those of all groups.

        Args:
            key_states, value_states: of the new tokens.
            cache_kwargs: `starts`, the first token of each row's document, `[B or 1, T]`, and `all`, whether all groups
                are asked for, as some of the new tokens have all heads on.
        """
        states = key_states, value_states
        if self.local_groups:
            groups = torch.tensor(self.local_groups, device=key_states.device)
            kept_groups = torch.tensor(self.kept_groups, dtype=torch.long, device=key_states.device)
            new = [tensor.index_select(1, groups) for tensor in states]
            if self.recent:
                new = [torch.cat(pair, dim=2) for pair in zip(self.recent, new, strict=True)]
            self.recent = new
            self.sinks = self._first(cache_kwargs["starts"][:, -1:])
            if self.all_heads_until > self.window + self.num_sinks:
                self.late = int(cache_kwargs["starts"][:, -1].max()) + self.all_heads_until
            if cache_kwargs["all"] and self.begin:
                raise ValueError("tokens were dropped before it was known where a row begins; use a DynamicCache")
            if not cache_kwargs["all"]:
                keys, values = (torch.cat(pair, dim=2) for pair in zip(self.sinks, self.recent, strict=True))
                self._near = NearKeys(keys, values, self.begin, kept_groups)
            recent = self.recent
            extra = self.recent[0].shape[2] - (max(self.window - 1, self.num_sinks) + _MORE)
            if extra > _STEPS and self.begin + self.recent[0].shape[2] >= self.late:
                self.recent = [tensor[:, :, extra:].clone() for tensor in self.recent]
                self.begin += extra
            states = [tensor.index_select(1, kept_groups) for tensor in states]
        keys, values = self._append(states)
        if self.local_groups and cache_kwargs["all"]:
            order = torch.cat([kept_groups, groups]).argsort()
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

    def _first(self, starts: torch.Tensor) -> list[torch.Tensor]:
        """Keys and values of the documents' first tokens, `[B, groups, sinks, D]`, given their `starts` `[B or 1, 1]`.

        Those that `recent` no longer holds are taken from `sinks`; entries for tokens still to come are arbitrary.
        """
        index = (starts + torch.arange(self.num_sinks, device=starts.device) - self.begin)[:, None, :, None]
        found = []
        for number, tensor in enumerate(self.recent):
            there = index.clamp(0, tensor.shape[2] - 1).expand(*tensor.shape[:2], -1, tensor.shape[3])
            first = tensor.gather(2, there)
            found.append(torch.where(index >= 0, first, self.sinks[number]) if self.begin else first)
        return found

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
        self.recent = [tensor[:, :, : left - self.begin] for tensor in self.recent]

    def _each(self, change: Any) -> None:
        if self.is_initialized:
            self.keys, self.values = change(self.keys), change(self.values)
            self.recent, self.sinks = [*map(change, self.recent)], [*map(change, self.sinks)]
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
