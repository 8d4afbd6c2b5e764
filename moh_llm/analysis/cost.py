"""Cost of a MoH model and of its dense base against the length of the text (in the form of Tab. 7)."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch

from moh_llm.errors import UserError
from moh_llm.flops import forward_flops
from moh_llm.modeling import MoHLlamaConfig, MoHLlamaForCausalLM


@dataclass(frozen=True)
class Cost:
    """Cost of one forward pass over `length` tokens, as MoH and as the dense base: FLOPs, or seconds."""

    length: int
    moh: float
    dense: float


def flops_by_length(config: MoHLlamaConfig, lengths: Sequence[int]) -> list[Cost]:
    """Theoretical FLOPs of a forward pass over one text of each length, with the config's active heads (Tab. 7).

    `moh_llm.flops.forward_flops` says what is counted; it assumes that heads that are off are skipped.

    Raises:
        UserError: a length below 1.
    """
    _check(lengths)
    return [Cost(n, forward_flops(config, n), forward_flops(config, n, dense=True)) for n in lengths]


@torch.no_grad()
def seconds_by_length(model: MoHLlamaForCausalLM, lengths: Sequence[int], repeats: int = 5) -> list[Cost]:
    """Measured seconds of a forward pass over one text of each length (Tab. 7): logits of all positions, no cache.

    The dense base is the same model with all heads on; its routers still run. Model and base take
    turns, so that a machine that slows down slows both; each figure is the median of the turns after
    one that is not counted.

    Args:
        model: as it is set, in evaluation mode, where it lies.
        lengths: in tokens, which are drawn at random.
        repeats: turns that count.

    Raises:
        UserError: a length or `repeats` below 1.
    """
    _check(lengths)
    if repeats < 1:
        raise UserError(f"repeats={repeats} must be at least 1")
    draw = torch.Generator().manual_seed(0)
    costs = []
    for length in lengths:
        ids = torch.randint(model.config.vocab_size, (1, length), generator=draw).to(model.device)
        moh, dense = [], []
        for _ in range(1 + repeats):
            moh.append(_seconds(model, ids))
            with model.all_heads_active():
                dense.append(_seconds(model, ids))
        costs.append(Cost(length, median(moh[1:]), median(dense[1:])))
    return costs


def _check(lengths: Sequence[int]) -> None:
    for length in lengths:
        if length < 1:
            raise UserError(f"length={length} must be at least 1 token")


def _seconds(model: MoHLlamaForCausalLM, ids: torch.Tensor) -> float:
    _wait(ids.device)
    start = time.perf_counter()
    model(input_ids=ids, use_cache=False)
    _wait(ids.device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    """A GPU's work goes on after a call returns."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
