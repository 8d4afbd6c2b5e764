"""Cost of a MoH model and of its dense base against the length of the text (in the form of Tab. 7)."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from types import MethodType

import torch
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from moh_llm.devices import synchronize
from moh_llm.flops import forward_flops
from moh_llm.modeling import MoHLlamaConfig, MoHLlamaForCausalLM, MoHLlamaPreTrainedModel


@dataclass(frozen=True)
class Cost:
    """Cost of one forward pass over `length` tokens, as MoH and as the dense base: FLOPs, or seconds."""

    length: int
    moh: float
    dense: float


def flops_by_length(config: MoHLlamaConfig, lengths: Sequence[int]) -> list[Cost]:
    """Theoretical FLOPs of a forward pass over one text of each length, with the config's active heads (Tab. 7).

    `moh_llm.flops.forward_flops` says what is counted; of heads that are off only what cannot be skipped.
    """
    return [Cost(n, forward_flops(config, n), forward_flops(config, n, dense=True)) for n in lengths]


@torch.no_grad()
def seconds_by_length(
    model: MoHLlamaForCausalLM,
    lengths: Sequence[int],
    repeats: int = 5,
    most: float = math.inf,
    advance: Callable[[int], object] = lambda tokens: None,
) -> list[Cost]:
    """Measured seconds of a forward pass over one text of each length (Tab. 7): logits of all positions, no cache.

    The dense base is the same model within `dense_attention`. Model and base take turns, so that a
    machine that slows down slows both; each figure is the median of the turns after one that is not
    counted.

    Args:
        model: as it is set, in evaluation mode, where it lies.
        lengths: in tokens, which are drawn at random.
        repeats: turns that count.
        most: seconds of all passes over a text; longer texts than the first that takes as many are left out.
        advance: receives the tokens of each turn's two passes.
    """
    draw = torch.Generator().manual_seed(0)
    costs = []
    for length in lengths:
        ids = torch.randint(model.config.vocab_size, (1, length), generator=draw).to(model.device)
        moh, dense = [], []
        for _ in range(1 + repeats):
            moh.append(_seconds(model, ids))
            with dense_attention(model):
                dense.append(_seconds(model, ids))
            advance(2 * length)
        costs.append(Cost(length, median(moh[1:]), median(dense[1:])))
        if sum(moh + dense) > most:
            break
    return costs


@contextlib.contextmanager
def dense_attention(model: MoHLlamaPreTrainedModel) -> Iterator[None]:
    """Within the block every layer runs the base's attention as transformers has it: no router, gate or fallback."""
    layers = [module for module in model.modules() if isinstance(module, LlamaAttention)]
    before = [vars(attention).get("forward") for attention in layers]  # such as a hook of accelerate's
    for attention in layers:
        if attention.config.query_key_norm:
            attention.sliding_window = None  # Qwen3's code reads it
        dense = Qwen3Attention if attention.config.query_key_norm else LlamaAttention
        attention.forward = MethodType(dense.forward, attention)
    try:
        yield
    finally:
        for attention, forward in zip(layers, before, strict=True):
            del attention.forward
            if forward is not None:
                attention.forward = forward


def _seconds(model: MoHLlamaForCausalLM, ids: torch.Tensor) -> float:
    synchronize(ids.device)  # an accelerator computes on after a call returns
    start = time.perf_counter()
    model(input_ids=ids, use_cache=False)
    synchronize(ids.device)
    return time.perf_counter() - start
