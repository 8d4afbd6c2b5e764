"""The base with a cache that kvpress compresses: SnapKV, Expected Attention, StreamingLLM and others.

    pip install kvpress==0.5.5   # in an environment of its own: it takes transformers below 5.3

A press chooses which keys of a prompt stay, once, at its end. It keeps all keys that come later. Converted models are
read with a press, too: of the groups that are on it keeps the keys with the best scores, as many of each.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from command import cache_bytes
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from moh_llm import MoHCache
from moh_llm.attention.cache import SplitKeys
from moh_llm.errors import UserError
from moh_llm.modeling import MoHLlamaForCausalLM
from moh_llm.modeling.seen_moh import Seen


def press_of(name: str) -> Any:
    """A class of kvpress. Raises UserError if that does not import, or has none of this name."""
    own = {key: attend for key, attend in ALL_ATTENTION_FUNCTIONS.items() if key.startswith("moh_")}
    try:
        import kvpress  # wraps all registered functions, by arguments that those of MoH models do not have
    except ImportError as error:
        why = f"kvpress does not import ({error})"
        raise UserError(f"{why}; pip install kvpress==0.5.5 in an environment of its own") from error
    ALL_ATTENTION_FUNCTIONS.update(own)
    if not isinstance(found := getattr(kvpress, name, None), type):
        raise UserError(f"--presses {name}: kvpress has no such class")
    return found


def read_pressed(
    model: PreTrainedModel, ids: torch.Tensor, prompt: int, size: int, press: Any
) -> tuple[torch.Tensor, list[int], int]:
    """Read `ids` `[1, T]` with a press, which keeps at most `size` bytes of the cache of the first `prompt` tokens.

    Returns:
        The last hidden states `[T, C]`, those after the prompt of one pass with the compressed cache; the bytes of the
        cache after the prompt and after all tokens; and the number of dropped tokens.
    """
    before, cache = press_prompt(model, ids[:, :prompt], size, press)
    sizes, dropped = [cache_bytes(cache)], prompt - kept_tokens(cache, prompt)
    later = read_later(model, ids[:, prompt:], cache, prompt)
    return torch.cat([before, later], dim=1)[0], [*sizes, cache_bytes(cache)], dropped


def press_prompt(model: PreTrainedModel, ids: torch.Tensor, size: int, press: Any) -> tuple[torch.Tensor, Cache]:
    """Read a prompt `[1, T]`; returns its last hidden states `[1, T, C]`, and its cache of at most `size` bytes.

    Of a converted model, which has no router, each group that is on drops as many tokens of its own.
    """
    config, length = model.config, ids.shape[1]
    if isinstance(model, MoHLlamaForCausalLM):
        return press_groups(model, ids, size, press)
    cache = DynamicCache(config=config)
    token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * model.dtype.itemsize
    with press(compression_ratio=1 - size / (length * token))(model):
        return model.model(ids, past_key_values=cache).last_hidden_state, cache


def kept_tokens(cache: Cache, prompt: int) -> int:
    """How many tokens of a prompt the layers, or groups that are on, keep."""
    return prompt - cache.dropped if isinstance(cache, PressedCache) else cache.get_seq_length()


def read_later(model: PreTrainedModel, ids: torch.Tensor, cache: Cache, start: int) -> torch.Tensor:
    """The last hidden states `[1, T, C]` of `ids` `[1, T]`, which follow `start` tokens that `press_prompt` read."""
    positions = torch.arange(start, start + ids.shape[1], device=ids.device)[None]
    how: dict[str, Any] = {}
    if isinstance(cache, PressedCache):
        how = {"seen": seen_at(model.config, positions)}
        # The mask is for layers whose groups are all on.
        mask = torch.ones(ids.shape[1], start - cache.dropped + ids.shape[1], dtype=torch.bool, device=ids.device)
        how["attention_mask"] = mask.tril(start - cache.dropped)[None, None]
    # The cache holds fewer tokens than were read, so that positions are to be given.
    return model.model(ids, past_key_values=cache, position_ids=positions, **how).last_hidden_state


class PressedCache(MoHCache):
    """A `MoHCache` of a model without a router, in which groups that are on have lost `dropped` tokens of a prompt."""

    dropped = 0

    def press(self, scores: Sequence[torch.Tensor], size: int) -> None:
        """Keep the tokens with the best scores `[1, KV, S]` of each layer, as many as `size` bytes hold."""
        pressed = [layer for layer in self.layers if layer.keys.shape[1]]
        token = sum(2 * layer.keys[:, :, :1].nbytes for layer in pressed)
        self.dropped = max(0, -((size - cache_bytes(self)) // token))
        for layer in pressed:
            room, own = layer._rooms[0], scores[self.layers.index(layer)][:, layer._groups[0]]
            kept = own.topk(room.length - self.dropped).indices.sort().values[..., None]
            room.change(lambda states, kept=kept: states.gather(2, kept.expand(-1, -1, -1, states.shape[3])))
            room.length = kept.shape[2]
            layer.keys, layer.values = room.states

    def update(self, *args: Any, **kwargs: Any) -> tuple:
        keys, values = super().update(*args, **kwargs)
        if self.dropped and isinstance(keys, SplitKeys):  # the last part's groups are off
            for number, (*part, seen) in enumerate(keys.parts[:-1]):
                keys.parts[number] = (*part, seen._replace(last=seen.last - self.dropped, is_causal=False, scratch={}))
        return keys, values


def press_groups(model: MoHLlamaForCausalLM, ids: torch.Tensor, size: int, press: Any) -> tuple[torch.Tensor, Cache]:
    """`press_prompt` of a converted model."""
    scorer, scores = press(0.0), []
    whole, cache = DynamicCache(config=model.config), PressedCache(model.config)

    def score(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        layer = whole.layers[module.layer_idx]
        scores.append(scorer.score(module, kwargs["hidden_states"], layer.keys, layer.values, None, kwargs))

    with scorer(model), ExitStack() as hooks:
        for layer in model.model.layers:
            hooks.enter_context(layer.self_attn.register_forward_hook(score, with_kwargs=True))
        hidden = model.model(ids, past_key_values=whole).last_hidden_state
    seen = seen_at(model.config, torch.arange(ids.shape[1], device=ids.device)[None])
    for index, layer in enumerate(whole.layers):
        cache.update(layer.keys, layer.values, index, {"seen": seen, "all_on": False})
    cache.press(scores, size)
    return hidden, cache


def seen_at(config: Any, positions: torch.Tensor) -> Seen:
    """What tokens of one document see, by their positions `[1, T]`."""
    return Seen.from_positions(positions, positions * 0, config.local_window, config.local_sinks, config.local_start)
