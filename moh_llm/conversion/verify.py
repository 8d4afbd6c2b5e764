"""Proof of a conversion: all heads on equals the base; at the target, how far from it, beside the paper's router."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from moh_llm.conversion.plan import paper_router
from moh_llm.errors import UserError
from moh_llm.metrics import Batch, Comparison, LogitsOf, compare_to_reference, logits_of
from moh_llm.modeling import MoHLlamaConfig, MoHLlamaForCausalLM, MoHRouter


@contextmanager
def routed_as(model: MoHLlamaForCausalLM, config: MoHLlamaConfig) -> Iterator[None]:
    """Within the block the model routes by fresh routers of `config`, a router type without weights."""
    layers = model.model.layers
    own = [layer.self_attn.router for layer in layers]
    for number, layer in enumerate(layers):
        layer.self_attn.router = MoHRouter(config, number)
    try:
        yield
    finally:
        for layer, router in zip(layers, own, strict=True):
            layer.self_attn.router = router


@torch.no_grad()
def all_heads_equal(model: MoHLlamaForCausalLM, base: nn.Module, batches: Sequence[Batch]) -> bool:
    """Whether the model with every head on gives the base's logits bit for bit."""
    with model.all_heads_active():
        return all(torch.equal(logits_of(model)(batch), logits_of(base)(batch)) for batch in batches)


def by_paper_router(model: MoHLlamaForCausalLM) -> LogitsOf:
    """The logits of the same weights and head counts under the paper's router."""
    config = paper_router(model.config)

    def run(batch: Batch) -> torch.Tensor:
        with routed_as(model, config):
            return logits_of(model)(batch)

    return run


def compare_routers(
    model: MoHLlamaForCausalLM, base: nn.Module, batches: Sequence[Batch]
) -> tuple[Comparison, Comparison]:
    """The converted model, and the same head counts under the paper's router, against the base."""
    candidates = {"model": logits_of(model), "paper": by_paper_router(model)}
    progress = tqdm(batches, desc="compare with the base", unit="batch", leave=False)
    found = compare_to_reference(candidates, logits_of(base), progress)
    return found["model"], found["paper"]


def verify(model: MoHLlamaForCausalLM, base: nn.Module, batches: Sequence[Batch]) -> dict[str, Any]:
    """The record that `conversion.json` keeps under "verification".

    Args:
        model: the converted model, loaded from what was written.
        base: the base, in the same dtype and with the same attention backend.
        batches: held-out text.

    Raises:
        UserError: with all heads on the logits differ from the base's.
    """
    equal = all_heads_equal(model, base, batches[:1])
    if not equal:
        raise UserError(
            "the converted model with all heads on does not equal the base; nothing was written. "
            "Please report this with the base's name"
        )
    converted, paper = compare_routers(model, base, batches)
    return {
        "dtype": str(model.dtype).removeprefix("torch."),
        "all_heads_active": {"logits_equal_base": equal, "tokens": batches[0]["input_ids"].numel()},
        "held_out_tokens": converted.tokens,
        "base_perplexity": converted.reference_perplexity,
        "converted": _figures(converted),
        "paper_router": _figures(paper),
    }


def _figures(comparison: Comparison) -> dict[str, float]:
    return {
        "perplexity": comparison.perplexity,
        "perplexity_ratio": comparison.perplexity_ratio,
        "kl": comparison.kl,
        "top1_agreement": comparison.top1_agreement,
    }
