"""How long attention takes on this device with heads of each kind, as shares of the dense layer's time.

    times = measure_attention(base.config, plan, torch.bfloat16, torch.device("cpu"))
    times.share(shared=3, routed=4, on=2)  # of 9 heads the other two are never on

A layer's time is fitted as a linear function of its heads of each kind, by least squares on some plans that take turns
with the dense layer. What a head costs that is always on, routed or never on depends on the device and on the
kernels that PyTorch has for it. The time of attention is what a layer takes beyond its linear projections; routers and
fallbacks are part of it.
"""

import copy
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from tqdm import tqdm
from transformers import PreTrainedConfig

from moh_llm.conversion.plan import PlanOptions, build_config
from moh_llm.modeling import MoHLlamaModel

_ROUNDS = 5
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
Kind = tuple[int, int, int]  # heads that are always on, routed, and the mean of routed heads that are on


@dataclass(frozen=True)
class AttentionTimes:
    """Shares of the time of the dense layer's attention.

    Attributes:
        heads: number of heads.
        constant: with no head ever on.
        shared, routed, on: what is added by a head that is always on, by one that is routed, and by a routed head that
            is on.
    """

    heads: int
    constant: float
    shared: float
    routed: float
    on: float

    def share(self, shared: float, routed: float, on: float) -> float:
        """Of a layer with so many heads always on, routed, and routed and on at the mean."""
        if shared == self.heads:
            return 1.0
        return self.constant + self.shared * shared + self.routed * routed + self.on * on


def fit_times(heads: int, shares: dict[Kind, float]) -> AttentionTimes:
    """The function of the numbers of heads, linear with no negative term, that is nearest to the measured shares."""
    rows = torch.tensor([[1, *kind] for kind in shares], dtype=torch.float64)
    target = torch.tensor([*shares.values()], dtype=torch.float64)
    found, used = torch.zeros(4, dtype=torch.float64), [0, 1, 2, 3]
    while used:  # a head cannot save time by being on: what noise makes negative is left out
        solution = torch.linalg.lstsq(rows[:, used], target[:, None], driver="gelsd").solution[:, 0]
        found[:] = 0
        found[used] = solution
        if not (solution < 0).any():
            break
        used = [place for place, value in zip(used, solution.tolist(), strict=True) if value >= 0]
    return AttentionTimes(heads, *found.tolist())


def timed_kinds(heads: int, group_size: int, routes: bool) -> list[Kind]:
    """The plans that are timed: none, a third and two thirds always on, and with a router some of the others routed."""
    groups = heads // group_size
    third, two_thirds = max(1, groups // 3), max(1, 2 * groups // 3)
    kinds = [(0, 0, 0), (third, 0, 0), (two_thirds, 0, 0)]
    if routes:
        half, rest = groups // 2, groups - third
        kinds += [(0, groups, max(1, groups // 4)), (0, groups, max(1, half)), (0, max(1, half), max(1, half // 2))]
        kinds += [(third, rest, max(1, rest // 2))]
    kinds = [kind for kind in kinds if kind[0] < groups]
    return [(shared * group_size, routed * group_size, on * group_size) for shared, routed, on in dict.fromkeys(kinds)]


@torch.inference_mode()
def measure_attention(
    base: PreTrainedConfig, plan: PlanOptions, dtype: torch.dtype, device: torch.device, rounds: int = _ROUNDS
) -> AttentionTimes:
    """Time one layer with random weights on `plan.context` random inputs, some seconds to minutes.

    Args:
        base: config of the dense model.
        plan: with local fallbacks; its router, granularity, window and first tokens are those of the timed layers.
        dtype, device: of the layers.
        rounds: in which the dense layer and the others take turns; of each the shortest time counts.
    """
    heads, group_size = base.num_attention_heads, plan.heads_per_group(base)
    kinds = timed_kinds(heads, group_size, plan.router_type != "none")
    layers = {kind: _layer(base, plan, kind).to(device, dtype).eval() for kind in [(heads, 0, 0), *kinds]}
    inputs = torch.randn(1, plan.context, base.hidden_size, generator=torch.Generator().manual_seed(0))
    inputs = inputs.to(device, dtype)
    seconds: dict[Kind, list[float]] = {kind: [] for kind in layers}
    for number in tqdm(range(rounds + 1), desc="time attention", unit="round", leave=False):
        for kind, layer in layers.items():
            with attention_clock(layer.layers) as clock:
                layer(inputs_embeds=inputs, use_cache=False)
            if number:  # the first warms up
                seconds[kind].append(clock[0])
    dense = min(seconds[heads, 0, 0])
    return fit_times(heads, {kind: min(seconds[kind]) / dense for kind in kinds})


def _layer(base: PreTrainedConfig, plan: PlanOptions, kind: Kind) -> MoHLlamaModel:
    """One layer with so many heads of each kind; Top-K has as many heads on as a threshold has at the mean."""
    config = copy.deepcopy(base)
    sizes = {"num_hidden_layers": 1, "vocab_size": 8, "intermediate_size": 8, "pad_token_id": None}
    for name, value in sizes.items():
        setattr(config, name, value)
    shared, routed, on = kind
    # Heads of a kind are of many key-value groups, as where they are chosen by importance: fewer share their keys.
    step = base.num_attention_heads // base.num_key_value_heads if plan.routing_granularity == "head" else 1
    every = [head for first in range(step) for head in range(first, base.num_attention_heads, step)]
    options = plan if plan.router_type == "none" else PlanOptions(**vars(plan) | {"router": "linear"})
    kinds = sorted(every[:shared]), sorted(every[shared + routed :])
    built = build_config(config, options, [kinds[0]], [shared + on], [kinds[1]])
    return MoHLlamaModel(built)


@contextmanager
def attention_clock(layers: Sequence[nn.Module]) -> Iterator[list[float]]:
    """One number that grows by the seconds that the layers' attention takes beyond its linear projections."""
    clock, handles = [0.0], []

    def add(sign: int) -> Any:
        def hook(*_: Any) -> None:
            clock[0] += sign * now()

        return hook

    for layer in layers:
        for sign, module in [(1, layer.self_attn), *((-1, getattr(layer.self_attn, name)) for name in _PROJECTIONS)]:
            handles.append(module.register_forward_pre_hook(add(-sign)))
            handles.append(module.register_forward_hook(add(sign)))
    try:
        yield clock
    finally:
        for handle in handles:
            handle.remove()


def now() -> float:
    """Seconds, after what was launched on an accelerator has ended."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()
