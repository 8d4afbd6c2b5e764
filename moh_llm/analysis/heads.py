"""A forward pass watched layer by layer: which heads tokens have on, what heads give, and where they attend.

Shapes: B batch, T tokens, H query heads, D head size. Heads are in the model's order.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from moh_llm.attention import interval_attention
from moh_llm.errors import UserError
from moh_llm.metrics import Batch
from moh_llm.modeling import MoHLlamaPreTrainedModel, MoHRouter
from moh_llm.modeling.interval_attention_moh import NAME
from moh_llm.modeling.seen_moh import Seen

_PATTERNS = "attention_patterns"  # attribute of an attention layer that holds its weights until its pass is taken


@dataclass(frozen=True)
class LayerPass:
    """States of one attention layer for one batch."""

    layer: int
    on: torch.Tensor
    """Which heads each token has on, bool `[B, T, H]`."""
    heads: torch.Tensor
    """Input of the output projection `[B, T, H, D]`: g_i H_i of Eq. 4; of a head that is off its fallback, or zeros."""
    patterns: torch.Tensor | None
    """Attention weights `[B, H, T, T]` within `attention_patterns`; None where the backend does not return them."""


@torch.no_grad()
def watch(model: MoHLlamaPreTrainedModel, batches: Iterable[Batch], take: Callable[[LayerPass], None]) -> int:
    """Run the decoder over batches and pass each layer's states to ``take``; returns the number of tokens.

    Args:
        model: a MoH model of text or images in evaluation mode.
        batches: `input_ids` and `position_ids` `[B, T]`; documents are isolated where positions restart. Of images:
            `pixel_values`.
        take: called once per batch and layer, first layer first.

    Raises:
        UserError: there are no tokens.
    """
    decoder = getattr(model, model.base_model_prefix, model)
    device = next(decoder.parameters()).device
    tokens = 0

    def count(seen: LayerPass) -> None:
        nonlocal tokens
        tokens += seen.on[..., 0].numel() * (seen.layer == 0)
        take(seen)

    with _hooks(decoder, count):
        for batch in batches:
            if "pixel_values" in batch:
                decoder(pixel_values=batch["pixel_values"].to(device))
            elif batch["input_ids"].numel():
                ids, positions = batch["input_ids"].to(device), batch["position_ids"].to(device)
                decoder(input_ids=ids, position_ids=positions, use_cache=False)
    if not tokens:
        raise UserError("the text to analyse has no tokens; give more text")
    return tokens


@contextmanager
def _hooks(decoder: nn.Module, take: Callable[[LayerPass], None]) -> Iterator[None]:
    handles = []
    layers = (layer for layer in decoder.modules() if isinstance(getattr(layer, "router", None), MoHRouter))
    for number, attention in enumerate(layers):
        seen: dict[str, torch.Tensor] = {}
        handles += [
            attention.router.register_forward_hook(partial(_keep_routing, seen)),
            attention.o_proj.register_forward_pre_hook(lambda _, args, seen=seen: seen.update(heads=args[0])),
            attention.register_forward_hook(partial(_pass_on, seen, number, take)),
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _keep_routing(seen: dict, router: MoHRouter, args: tuple, output: tuple) -> None:
    logits, gate = output
    # A weighted score may round to zero, so the selection counts as well.
    selected = router._of_heads(logits.new_ones(*logits.shape[:-1], router.shared_groups), router.select(logits))
    seen["on"] = (gate != 0) | selected.bool()


def _pass_on(
    seen: dict, number: int, take: Callable[[LayerPass], None], attention: nn.Module, args: tuple, output: tuple
) -> None:
    seen["heads"] = seen["heads"].unflatten(-1, (-1, attention.head_dim))
    patterns = vars(attention).pop(_PATTERNS, output[1])
    take(LayerPass(layer=number, patterns=patterns, **seen))
    seen.clear()


@contextmanager
def attention_patterns(model: MoHLlamaPreTrainedModel) -> Iterator[None]:
    """Give `LayerPass.patterns` within the block: the weights of all heads, on or off, over a token's whole document.

    With all heads on, the weights are those of the eager implementation.
    """
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")

    def keep_weights(
        query: torch.Tensor, key: torch.Tensor, *given: Any, module: nn.Module, **more: Any
    ) -> torch.Tensor:
        _, _, seen, scaling, *_ = given
        setattr(module, _PATTERNS, _weights(query, key, seen, scaling))
        return interval_attention(query, key, *given, module=module, **more)

    ALL_ATTENTION_FUNCTIONS[NAME] = keep_weights
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS[NAME]
        model.set_attn_implementation(before)


def _weights(query: torch.Tensor, key: torch.Tensor, seen: Seen, scaling: float) -> torch.Tensor:
    """Attention weights `[B, H, T, T]` of the queries for all keys of their documents."""
    places = torch.arange(key.shape[2], device=key.device)
    shows = ((places <= seen.last) & (places >= seen.start)).unsqueeze(1)
    scores = query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).transpose(2, 3) * scaling
    scores = scores.masked_fill(~shows, -torch.inf)
    return scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(query.dtype)


def last_routed_layer(model: MoHLlamaPreTrainedModel) -> int:
    """Number of the last layer in which tokens choose among heads. Raises UserError if there is none."""
    layers = [number for number, router in enumerate(model.routers) if router.num_routed]
    if not layers:
        raise UserError("the model has no routed heads: every head of every layer is shared")
    return layers[-1]


@torch.no_grad()
def heads_on(model: MoHLlamaPreTrainedModel, input_ids: torch.Tensor) -> torch.Tensor:
    """Which heads each token of `input_ids` `[B, T]` has on, bool `[B, layers, T, H]`, by one pass of the decoder."""
    found: list[torch.Tensor] = []

    def keep(router: MoHRouter, args: tuple, output: tuple) -> None:
        found.append((output[1] != 0).to(input_ids.device))

    handles = [router.register_forward_hook(keep) for router in model.routers]
    try:
        decoder = getattr(model, model.base_model_prefix, model)
        decoder(input_ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return torch.stack(found, dim=1)
