"""The forward pass that all analyses share, watched layer by layer.

Shapes: B batch, T tokens, C hidden size, H query heads, U routed groups (heads or key-value groups),
D head size. Heads are in the model's order wherever there are H of them.
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
    """States of one attention layer for one batch.

    Attributes:
        layer: its number.
        router: its router.
        router_inputs: what that was given: the layer's input `[B, T, C]` and queries `[B, T, H, D]`.
        logits: of the routed groups, `[B, T, U]`.
        on: which heads each token has on, bool `[B, T, H]`; see `moh_llm.analysis.heads.heads_on`.
        heads: what enters the output projection, `[B, T, H, D]`: g_i H_i of Eq. 4, plus the
            fallback of a head that is off, where the model has any.
        patterns: attention weights `[B, H, T, T]`; None where the attention backend keeps them to itself.
    """

    layer: int
    router: MoHRouter
    router_inputs: tuple[torch.Tensor, torch.Tensor]
    logits: torch.Tensor
    on: torch.Tensor
    heads: torch.Tensor
    patterns: torch.Tensor | None


@torch.no_grad()
def watch(model: MoHLlamaPreTrainedModel, batches: Iterable[Batch], take: Callable[[LayerPass], None]) -> int:
    """Run the decoder over batches; `take` gets each layer's pass of each batch, which nothing keeps after it.

    Args:
        model: a MoH model in evaluation mode.
        batches: `input_ids` and `position_ids` `[B, T]`; documents are isolated where positions restart.
        take: called once a layer and batch, first layer first.

    Returns:
        Number of tokens, every position counted.

    Raises:
        UserError: there are no tokens.
    """
    decoder = getattr(model, model.base_model_prefix, model)
    device = next(decoder.parameters()).device
    tokens = 0
    with _hooks(decoder, take):
        for batch in batches:
            count = batch["input_ids"].numel()
            if count:
                ids, positions = batch["input_ids"].to(device), batch["position_ids"].to(device)
                decoder(input_ids=ids, position_ids=positions, use_cache=False)
            tokens += count
    if not tokens:
        raise UserError("the text to analyse has no tokens; give more text")
    return tokens


@contextmanager
def _hooks(decoder: nn.Module, take: Callable[[LayerPass], None]) -> Iterator[None]:
    handles = []
    for number, layer in enumerate(decoder.layers):
        attention, seen = layer.self_attn, {}
        handles += [
            attention.router.register_forward_hook(partial(_keep_routing, seen)),
            attention.o_proj.register_forward_pre_hook(partial(_keep_heads, seen)),
            attention.register_forward_hook(partial(_pass_on, seen, number, take)),
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _keep_routing(seen: dict, router: MoHRouter, args: tuple, output: tuple) -> None:
    logits, gate = output
    # By selection, too: a weighted score may round to zero.
    selected = router._of_heads(logits.new_ones(*logits.shape[:-1], router.shared_groups), router.select(logits))
    on = (gate != 0) | selected.bool()
    seen |= {"router": router, "router_inputs": args[:2], "logits": logits, "on": on}


def _keep_heads(seen: dict, o_proj: nn.Module, args: tuple) -> None:
    seen["heads"] = args[0]


def _pass_on(
    seen: dict, number: int, take: Callable[[LayerPass], None], attention: nn.Module, args: tuple, output: tuple
) -> None:
    seen["heads"] = seen["heads"].unflatten(-1, (-1, attention.head_dim))
    patterns = vars(attention).pop(_PATTERNS, output[1])
    take(LayerPass(layer=number, patterns=patterns, **seen))
    seen.clear()


@contextmanager
def attention_patterns(model: MoHLlamaPreTrainedModel) -> Iterator[None]:
    """Within the block passes have attention weights: those of all heads, on or off, to a token's whole document.

    Where all heads are on they are those of the eager implementation.
    """
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")

    def keep_weights(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        first: torch.Tensor,
        seen: Seen,
        scaling: float,
        *given: Any,
        module: nn.Module,
        **more: Any,
    ) -> torch.Tensor:
        setattr(module, _PATTERNS, _weights(query, key, seen, scaling))
        return interval_attention(query, key, value, first, seen, scaling, *given, module=module, **more)

    ALL_ATTENTION_FUNCTIONS[NAME] = keep_weights
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS[NAME]
        model.set_attn_implementation(before)


def _weights(query: torch.Tensor, key: torch.Tensor, seen: Seen, scaling: float) -> torch.Tensor:
    """Attention weights `[B, H, T, T]` of the queries to all keys of their documents."""
    places = torch.arange(key.shape[2], device=key.device)
    shows = ((places <= seen.last) & (places >= seen.start)).unsqueeze(1)
    scores = query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).transpose(2, 3) * scaling
    scores = scores.masked_fill(~shows, -torch.inf)
    return scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(query.dtype)


def shared_heads(router: MoHRouter) -> list[int]:
    """Sorted ids of a layer's shared heads."""
    return list(router.kinds()[0])


def last_routed_layer(model: MoHLlamaPreTrainedModel) -> int:
    """Number of the last layer in which tokens choose among heads. Raises UserError where none is."""
    layers = [number for number, router in enumerate(model.routers) if router.num_routed]
    if not layers:
        raise UserError("the model has no routed heads: every head of every layer is shared")
    return layers[-1]
