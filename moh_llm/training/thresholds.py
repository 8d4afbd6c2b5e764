"""Thresholds at the end of a run: on text, the model then reads the share of keys that it promises.

A threshold is a router's bias. All biases get the same shift, found by the quantile of the scores. A routed head that
no token, or every token, of the text has on becomes never-on, or always-on: its outputs on that text stay the same, and
backends compute such heads without sorting tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import nn
from tqdm import tqdm

from moh_llm.devices import float64_device
from moh_llm.flops import distant_keys
from moh_llm.metrics import Batch
from moh_llm.modeling import MoHLlamaForCausalLM, MoHRouter

PASSES = 3  # at most
_CLOSE = 0.005  # a share of distant keys within half a per cent of the target is what was asked for
_BINS, _HIGHEST = 2**16, 16.0  # scores are counted in bins from -16 to 16, which are 0.0005 wide


@dataclass(frozen=True)
class Thresholds:
    """What changes in a model so that it reads its budget.

    Attributes:
        shift: is added to all scores.
        active_heads: heads that tokens then have on in each layer, rounded mean over distant keys.
        always_on, never_on: ids of routed groups in each layer that every token, or no token, then has on.
        distant_read: share of the text's distant keys that is then read.
    """

    shift: float
    active_heads: list[int]
    always_on: list[list[int]]
    never_on: list[list[int]]
    distant_read: float


@torch.no_grad()
def measure_thresholds(
    accelerator: Accelerator, model: nn.Module, batches: Sequence[Batch], target: float
) -> Thresholds | None:
    """The thresholds at which a model reads the share ``target`` of the distant keys of some text.

    A shift also changes the hidden states that later layers score, so the text is read again, until the share is close.
    ``model`` is the prepared `moh_llm.training.step.TrainingStep`. ``batches`` are this process's part of the text, as
    many on each process. Returns None where the text has no distant keys.
    """
    routers = accelerator.unwrap_model(model).network.routers
    size, heads = routers[0].group_size, sum(router.num_heads for router in routers)
    wanted = (target * heads - sum(router.num_shared for router in routers)) / size
    shift = 0.0
    hooks = [
        router.routed.register_forward_hook(lambda module, inputs, scores: scores + shift)
        for router in routers
        if router.num_routed
    ]
    try:
        for number in range(PASSES):
            if (shares := _score_shares(accelerator, model, batches)) is None:
                return None
            above = torch.stack([share.sum(0) for share in shares]).sum(0).flip(0).cumsum(0).flip(0)
            if number == PASSES - 1 or abs(above[_BINS // 2] / wanted - 1) <= _CLOSE:
                break
            edge = int((above - wanted).abs().argmin())  # scores of this bin and of higher ones read the budget
            shift += _HIGHEST - edge * 2 * _HIGHEST / _BINS
    finally:
        for hook in hooks:
            hook.remove()
    on = [share[:, _BINS // 2 :].sum(-1) for share in shares]  # share of distant keys that each group reads
    means = [router.num_shared / size + float(groups.sum()) for router, groups in zip(routers, on, strict=True)]
    return Thresholds(
        shift=shift,
        active_heads=[size * count for count in _rounded(means)],
        always_on=[(groups > 1 - 1e-9).nonzero().flatten().tolist() for groups in on],
        never_on=[(groups == 0).nonzero().flatten().tolist() for groups in on],
        distant_read=size * sum(means) / heads,
    )


def _score_shares(accelerator: Accelerator, model: nn.Module, batches: Sequence[Batch]) -> list[torch.Tensor] | None:
    """For each layer the share of distant keys by the bin of their tokens' score, `[U, bins]`; None without any."""
    network, device = accelerator.unwrap_model(model).network, accelerator.device
    exact = float64_device(device)
    counts = [torch.zeros(router.routed_groups, _BINS, dtype=torch.float64, device=exact) for router in network.routers]
    distant = torch.zeros((), dtype=torch.float64, device=exact)
    model.eval()
    hidden = None if accelerator.is_main_process else True  # None: on terminals alone
    for batch in tqdm(batches, "set thresholds", unit="batch", leave=False, disable=hidden):
        inputs = batch["input_ids"], batch["position_ids"], batch["labels"]
        _, router_logits = model(*(tensor.to(device) for tensor in inputs), compare=True, route=True)
        weights = distant_keys(network.config, batch["position_ids"]).flatten().to(exact, torch.float64)
        distant += weights.sum()
        for logits, count in zip(router_logits, counts, strict=True):
            # A score of exactly 0 is off, and belongs to the bin below.
            bins = ((logits.to(exact, torch.float64) + _HIGHEST) * (_BINS / 2 / _HIGHEST)).ceil() - 1
            bins = bins.clamp(0, _BINS - 1).long()
            for group in range(len(count)):
                count[group] += torch.bincount(bins[:, group], weights, minlength=_BINS)
    model.train()
    total = float(accelerator.reduce(distant, "sum"))
    return [accelerator.reduce(count, "sum").cpu() / total for count in counts] if total else None


def _rounded(numbers: list[float]) -> list[int]:
    """The numbers rounded so that their sum changes by less than one: those with the largest remainders go up."""
    down = [int(number) for number in numbers]
    order = sorted(range(len(numbers)), key=lambda i: down[i] - numbers[i])
    for i in order[: round(sum(numbers)) - sum(down)]:
        down[i] += 1
    return down


@torch.no_grad()
def set_thresholds(network: MoHLlamaForCausalLM, found: Thresholds) -> None:
    """Shift the scores of a model, and change the kinds of heads that are on for every token or for none, in place."""
    config = network.config
    shared, never = list(map(list, config.shared_heads_per_layer)), list(map(list, config.never_on_heads_per_layer))
    for number, router in enumerate(network.routers):
        if not router.num_routed:
            continue
        router.routed.bias += found.shift
        for groups, heads in ((found.always_on[number], shared), (found.never_on[number], never)):
            ids = [router.routed_heads[group * router.group_size :][: router.group_size] for group in groups]
            heads[number] = sorted([*heads[number], *(head for group in ids for head in group)])
    is_local = config.head_fallback == "local"  # only windows can replace a head for good
    config.shared_heads, config.num_shared_heads = shared, [len(heads) for heads in shared]
    if is_local and any(never):
        config.never_on_heads = never
    rooms = zip(found.active_heads, shared, map(config.routed_heads, range(len(shared))), strict=True)
    config.num_active_heads = [max(len(own), min(active, len(own) + len(routed))) for active, own, routed in rooms]
    config.complete_head_plan()
    for number, layer in enumerate(network.model.layers):
        attention, router = layer.self_attn, layer.self_attn.router
        attention.router = MoHRouter(config, number)
        routed = torch.tensor(router.routed_heads[:: router.group_size])
        _take_rows(attention.router, router, torch.isin(routed, torch.tensor(attention.router.routed_heads)))
        if len(shared[number]) == config.num_attention_heads:
            attention.fallback = None
        elif (fallback := attention.fallback) is not None:
            attention.fallback = type(fallback)(config, number)
            _take_rows(attention.fallback, fallback, torch.isin(fallback.index, attention.fallback.index))


def _take_rows(new: nn.Module, old: nn.Module, kept: torch.Tensor) -> None:
    """Copy the ``kept`` rows, one for each head or group, of the parameters of ``old`` to ``new``."""
    for name, weight in new.named_parameters():
        weight.data = old.get_parameter(name)[kept].clone()
        weight.requires_grad_(old.get_parameter(name).requires_grad)
