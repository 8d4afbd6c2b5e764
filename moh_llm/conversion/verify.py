"""Verification of a conversion: all heads on equals the base; distance to it as planned, beside the paper's layer.

The base and its conversions are run side by side from disk, a layer at a time, on the same text.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from moh_llm.analysis.retrieval import Prompt, make_prompt, score
from moh_llm.conversion.layers import LayerwiseModel, run_layer
from moh_llm.conversion.plan import paper_plan
from moh_llm.errors import UserError
from moh_llm.metrics import Batch, Comparison, LogitsOf, compare_to_reference, logits_of
from moh_llm.modeling import MoHLlamaConfig, MoHLlamaForCausalLM, MoHRouter
from moh_llm.modeling.routing_moh import HeadShard
from moh_llm.records.conversion import (
    AllHeadsActive,
    Figures,
    LayerFigures,
    PositionFigures,
    RetrievalFigures,
    Verification,
)

BASE, ALL_HEADS = "base", "all_heads_active"
DISTANCES = (512, 1024, 2048, 4096, 7000)  # tokens from what a prompt retrieves to where it asks for it
EDGES = (0, 512, 2048)  # positions at which figures of long contexts are split


class RandomRouter(MoHRouter):
    """Selects each token's routed heads at random, as a baseline for routers."""

    def __init__(self, config: MoHLlamaConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.generator = torch.Generator().manual_seed(layer_idx)

    def _routed_logits(
        self, hidden_states: torch.Tensor, query_states: torch.Tensor, shard: HeadShard | None
    ) -> torch.Tensor:
        shape = (*hidden_states.shape[:-1], self.routed_groups)
        return torch.rand(shape, generator=self.generator).to(hidden_states)


@torch.no_grad()
def verify(
    base: LayerwiseModel,
    converted: LayerwiseModel,
    batches: Sequence[Batch],
    progress: bool = True,
    prompt: Prompt | None = None,
) -> Verification:
    """Compare a converted model with its base.

    Args:
        base: the dense base.
        converted: the converted model, as it was written, in the same dtype.
        batches: held-out text.
        progress: whether to show it.
        prompt: what asks for something out of the fallbacks' sight.

    Raises:
        UserError: with all heads on, a layer's output differs from the base's.
    """
    paper = paper_plan(converted.config)
    variants = ("converted", "paper_router", "random_heads")
    names = [BASE, ALL_HEADS, *variants]
    held_out = len(batches)
    if prompt:  # the last batch of base and converted model
        ids = torch.tensor([prompt.ids])
        batches = [*batches, {"input_ids": ids, "position_ids": torch.arange(ids.shape[1])[None]}]
    states = base.embed(batch["input_ids"] for batch in batches)
    counts = dict.fromkeys(names, held_out) | {ALL_HEADS: 1, BASE: len(batches), "converted": len(batches)}
    hidden = {name: states[:count] for name, count in counts.items()}
    layers = []
    tokens = sum(batch["input_ids"].numel() for batch in batches)
    with tqdm(total=tokens * len(base), desc="verify", unit="token", unit_scale=True, disable=not progress) as bar:
        for number in range(len(base)):
            outputs = {}
            outputs[BASE], hidden[BASE] = _run(base.layer(number), hidden[BASE], batches)
            layer = converted.layer(number)
            with layer.all_heads_active():
                _, hidden[ALL_HEADS] = _run(layer, hidden[ALL_HEADS], batches)
            if not torch.equal(hidden[ALL_HEADS][0], hidden[BASE][0]):
                raise UserError(
                    f"layer {number} with all heads on does not equal the base's; nothing was written. "
                    "Please report this with the base's name"
                )
            with _gates(layer) as gates:
                outputs["converted"], hidden["converted"] = _run(layer, hidden["converted"], batches)
            for name in ("paper_router", "random_heads"):
                kind = MoHRouter if name == "paper_router" else RandomRouter
                with routed_as(layer, paper, kind, first=number):
                    outputs[name], hidden[name] = _run(layer, hidden[name], batches)
            layers.append(_layer_figures(outputs, torch.cat(gates[:held_out])))
            bar.update(tokens)
    head = base.head()
    edges = [edge for edge in EDGES if edge < batches[0]["input_ids"].shape[1]]
    found = _compare(head, hidden, variants, batches[:held_out], edges if edges[1:] else ())
    figures = {name: Figures(**comparison.figures()) for name, comparison in found.items()}
    return Verification(
        dtype=str(base.dtype).removeprefix("torch."),
        all_heads_active=AllHeadsActive(equals_base=True, tokens=batches[0]["input_ids"].numel()),
        held_out_tokens=found["converted"].tokens,
        held_out_documents=found["converted"].documents,
        base_perplexity=found["converted"].reference_perplexity,
        **figures,
        paper_active_heads=paper.num_active_heads,
        layers=layers,
        by_position=[
            PositionFigures(start=start, tokens=part.tokens, perplexity_ratio=part.perplexity_ratio, kl=part.kl)
            for start, part in found["converted"].parts.items()
        ],
        retrieval=_retrieval(head, prompt, *(hidden[name][-1][0] for name in (BASE, "converted"))) if prompt else [],
    )


def retrieval_prompt(held_out: Sequence[Batch], tokenizer: PreTrainedTokenizerBase, in_sight: int) -> Prompt | None:
    """A prompt as long as the sequences that asks for what is over `in_sight` tokens back; None if none fits."""
    text = held_out[0]["input_ids"][0].tolist()
    distances = [distance for distance in DISTANCES if in_sight < distance <= len(text) - 100 * len(DISTANCES)]
    try:
        return make_prompt(text, len(text), distances, tokenizer, seed=0) if distances else None
    except ValueError:  # a tokenizer of single bytes makes long sentences
        return None


def _retrieval(head: nn.Module, prompt: Prompt, base: torch.Tensor, converted: torch.Tensor) -> list[RetrievalFigures]:
    """Answers of both models, from their last hidden states `[T, C]`."""
    of_base, of_converted = (
        score(prompt, lambda ids, positions, states=states: head(states[positions]).argmax(-1))
        for states in (base, converted)
    )
    return [
        RetrievalFigures(
            task=task,
            asked=sum(count for _, count in of_base[task].values()),
            base=sum(right for right, _ in of_base[task].values()),
            converted=sum(right for right, _ in of_converted[task].values()),
        )
        for task in of_base
    ]


def _run(
    layer: nn.Module, hidden: Sequence[torch.Tensor], batches: Sequence[Batch]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The attention's and the layer's outputs for each batch."""
    attention: list[torch.Tensor] = []
    handle = layer.layers[0].self_attn.register_forward_hook(lambda module, args, output: attention.append(output[0]))
    try:
        return attention, [run_layer(layer, h, b["position_ids"]) for h, b in zip(hidden, batches, strict=False)]
    finally:
        handle.remove()


@contextmanager
def _gates(layer: nn.Module) -> Iterator[list[torch.Tensor]]:
    """The gates `[N, H]` of every call within the block."""
    gates: list[torch.Tensor] = []
    router = layer.layers[0].self_attn.router
    handle = router.register_forward_hook(lambda module, args, output: gates.append(output[1].flatten(0, -2)))
    try:
        yield gates
    finally:
        handle.remove()


def _layer_figures(outputs: dict[str, list[torch.Tensor]], gates: torch.Tensor) -> LayerFigures:
    """Head load, and ||attention output - base's|| / ||base's|| over all tokens."""
    count = min(map(len, outputs.values()))
    reference = torch.cat([output.float().flatten() for output in outputs[BASE][:count]])

    def error(name: str) -> float:
        own = torch.cat([output.float().flatten() for output in outputs[name][:count]])
        return ((own - reference).norm() / reference.norm().clamp_min(1e-12)).item()

    return LayerFigures(
        attention_output_error=error("converted"),
        attention_output_error_paper=error("paper_router"),
        head_load=[round(load, 4) for load in gates.ne(0).double().mean(0).tolist()],
    )


def _compare(
    head: nn.Module,
    hidden: dict[str, list[torch.Tensor]],
    names: Sequence[str],
    batches: Sequence[Batch],
    edges: Sequence[int],
) -> dict[str, Comparison]:
    """Compare the logits of each variant with the base's, one window at a time to save memory."""
    windows = [
        {name: batch[name][row : row + 1] for name in ("labels", "documents", "position_ids")}
        for batch in batches
        for row in range(len(batch["labels"]))
    ]

    def logits_in_turn(name: str) -> LogitsOf:
        states = (window for batch in hidden[name] for window in batch.split(1))
        return lambda _: head(next(states))

    candidates = {name: logits_in_turn(name) for name in names}
    return compare_to_reference(candidates, logits_in_turn(BASE), windows, edges)


@contextmanager
def routed_as(
    model: nn.Module, config: MoHLlamaConfig, kind: type[MoHRouter] = MoHRouter, first: int = 0
) -> Iterator[None]:
    """Within the block the model's layers route by fresh routers without weights, and have no fallbacks.

    Args:
        model: a MoH model or decoder.
        config: whose head counts and router type the routers have.
        kind: the routers' class.
        first: which layer of `config` the model's first one is.
    """
    attentions = [layer.self_attn for layer in getattr(model, "model", model).layers]
    own = [(attention.router, attention.fallback) for attention in attentions]
    for number, attention in enumerate(attentions, first):
        attention.router, attention.fallback = kind(config, number).to(attention.q_proj.weight.device), None
    try:
        yield
    finally:
        for attention, (router, fallback) in zip(attentions, own, strict=True):
            attention.router, attention.fallback = router, fallback


def by_paper_plan(model: MoHLlamaForCausalLM) -> LogitsOf:
    """The logits of the same weights as the paper's layer with as many active heads on average."""
    config = paper_plan(model.config)

    def run(batch: Batch) -> torch.Tensor:
        with routed_as(model, config):
            return logits_of(model)(batch)

    return run
