"""A forward pass watched layer by layer: which heads tokens have on, and what heads give.

Shapes: B batch, T tokens, H query heads, D head size. Heads are in the model's order.
"""

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from moh_llm.errors import UserError
from moh_llm.metrics import Batch
from moh_llm.modeling import MoHLlamaPreTrainedModel, MoHRouter


@dataclass(frozen=True)
class LayerPass:
    """States of one attention layer for one batch."""

    layer: int
    on: torch.Tensor
    """Which heads each token has on, bool `[B, T, H]`."""
    heads: torch.Tensor
    """Input of the output projection `[B, T, H, D]`: g_i H_i of Eq. 4; of a head that is off its fallback, or zeros."""


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
    tokens, on = 0, torch.empty(0)  # of the layer whose heads come next

    def keep(router: MoHRouter, args: tuple, output: tuple) -> None:
        nonlocal on
        logits, gate = output
        # A weighted score may round to zero, so the selection counts as well.
        selected = router._of_heads(logits.new_ones(*logits.shape[:-1], router.shared_groups), router.select(logits))
        on = (gate != 0) | selected.bool()

    def pass_on(layer: int, head_dim: int, o_proj: nn.Module, args: tuple) -> None:
        nonlocal tokens
        tokens += on[..., 0].numel() * (layer == 0)
        take(LayerPass(layer, on, args[0].unflatten(-1, (-1, head_dim))))

    layers = [layer for layer in decoder.modules() if isinstance(getattr(layer, "router", None), MoHRouter)]
    with contextlib.ExitStack() as hooks:
        for number, layer in enumerate(layers):
            hooks.enter_context(layer.router.register_forward_hook(keep))
            hooks.enter_context(layer.o_proj.register_forward_pre_hook(partial(pass_on, number, layer.head_dim)))
        for batch in batches:
            if "pixel_values" in batch:
                decoder(pixel_values=batch["pixel_values"].to(device))
            elif batch["input_ids"].numel():
                ids, positions = batch["input_ids"].to(device), batch["position_ids"].to(device)
                decoder(input_ids=ids, position_ids=positions, use_cache=False)
    if not tokens:
        raise UserError("the text to analyse has no tokens; give more text")
    return tokens


def last_routed_layer(model: MoHLlamaPreTrainedModel) -> int:
    """Number of the last layer in which tokens choose among heads. Raises UserError if there is none."""
    layers = [number for number, router in enumerate(model.routers) if router.num_routed]
    if not layers:
        raise UserError("the model has no routed heads: every head of every layer is shared")
    return layers[-1]


def heads_on(model: MoHLlamaPreTrainedModel, input_ids: torch.Tensor) -> torch.Tensor:
    """Which heads each token of `input_ids` `[B, T]` has on, bool `[B, layers, T, H]`, by one pass of the decoder."""
    found: list[torch.Tensor] = []
    positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    batch = {"input_ids": input_ids, "position_ids": positions}
    watch(model, [batch], lambda seen: found.append(seen.on.to(input_ids.device)))
    return torch.stack(found, dim=1)
