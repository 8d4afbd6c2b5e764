"""The budget of keys: in the loss, with which threshold routers learn, and in the thresholds that a run ends with.

A head that is on for a token reads all keys of its document; a head that is off reads a window of them. With w(t) keys
beyond the window of token t, and gates g(t, h) of 0 or 1, the heads of a model read the share

    R = sum_t,h w(t) g(t, h) / sum_t,h w(t)

of the distant keys. Training minimises the task loss and keeps R at the budget R0:

    loss = task + multiplier * R

A gate is a step function of its score s. Its gradient is that of sigmoid(s) (straight-through). At the best point of
the budget a shift of all scores by the same number leaves the loss as it is, so each step's gradients tell the
multiplier:

    multiplier = -(d task / d shift) / (d R / d shift)

It is averaged over the steps, and corrected in proportion to R / R0 - 1.

At the end of a run thresholds are set, so that on text the model reads the share of keys that it promises. A threshold
is a router's bias. All biases get the same shift, found by the quantile of the scores. A routed head that no token, or
every token, of the text has on becomes never-on, or always-on: its outputs on that text stay the same, and backends
compute such heads without sorting tokens.

Shapes: B sequences, L positions, U routed groups of a layer (heads or key-value groups).
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import nn
from tqdm import tqdm

from moh_llm.devices import float64_device
from moh_llm.errors import UserError
from moh_llm.flops import distant_keys, fallback_keys, share_of_keys
from moh_llm.metrics import Batch
from moh_llm.modeling import MoHLlamaConfig, MoHLlamaForCausalLM, MoHLlamaModel, MoHRouter
from moh_llm.modeling.routing_moh import straight_through
from moh_llm.training.config import TrainConfig

MEMORY = 0.9  # weight of earlier steps in the average of the multiplier
CORRECTION = 3.0  # a model that reads 10 % more than its budget gets a multiplier that is 30 % higher
PASSES = 3  # at most, over the text on which thresholds are set
KIND_TOKENS = 2**12  # tokens with distant keys that decide on always-on and never-on: heads on for 0.1 % of tokens show
_CLOSE = 0.005  # a share of distant keys within half a per cent of the target is what was asked for
_BINS, _HIGHEST = 2**16, 16.0  # scores are counted in bins from -16 to 16, which are 0.0005 wide


def distant_keys_read(
    router_logits: Sequence[torch.Tensor], routers: Sequence[MoHRouter], distant: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The distant keys that heads read, and how they change with a shift of all scores; summed, mean over all heads.

    That is the sum of w(t) g(t, h), with the straight-through gradient, and its derivative, without a gradient.
    Scores are `[B, L, U]` for each layer, ``distant`` is w, `distant_keys` `[B, L]`.
    """
    heads = sum(router.num_heads for router in routers)
    read, slope = distant.new_zeros(()), distant.new_zeros(())
    for logits, router in zip(router_logits, routers, strict=True):
        if router.router_type != "threshold":
            continue
        weights = distant.to(logits.device)
        soft = logits.sigmoid()
        on = straight_through(router.select(logits), soft).sum(-1) * router.group_size + router.num_shared
        read = read + (weights * on).sum().to(read.device)
        change = (soft * (1 - soft)).detach().sum(-1) * router.group_size
        slope = slope + (weights * change).sum().to(slope.device)
    return read / heads, slope / heads


def planned_share(config: MoHLlamaConfig) -> float:
    """Share of the distant keys that a model should read: of its last run, or of the heads that are on in the mean."""
    heads = sum(config.active_heads_per_layer) / (config.num_attention_heads * config.num_hidden_layers)
    return getattr(config, "keys_budget", heads)  # after a run these numbers of heads are rounded


def learns_thresholds(network: MoHLlamaForCausalLM | MoHLlamaModel) -> bool:
    """Whether training changes how many heads tokens have on: threshold routers are trained."""
    is_learning = any(router.num_routed and not router.is_full and router.is_trained for router in network.routers)
    return network.config.router_type == "threshold" and is_learning


class KeyBudget:
    """Holds the share of distant keys that a network reads at a budget, by a multiplier in the loss.

    `shift` is a zero that is added to all scores; `slope` is the derivative of a step's whole loss with respect to it.

    Threshold routers of the network add `shift` to their scores from now on. `target` is the share of the distant keys
    that the network may read.
    """

    def __init__(self, network: MoHLlamaForCausalLM | MoHLlamaModel, device: torch.device, target: float):
        self.target, self.multiplier, self.average, self.slope = target, 0.0, 0.0, 0.0
        self.shift = torch.zeros((), device=device, requires_grad=True)
        for router in network.routers:
            if router.num_routed:
                router.routed.register_forward_hook(self._shifted)

    def _shifted(self, module: nn.Module, inputs: tuple, scores: torch.Tensor) -> torch.Tensor:
        return scores + self.shift.to(scores) if torch.is_grad_enabled() else scores

    def take_gradient(self) -> torch.Tensor:
        """The gradient of `shift` since the last call, a scalar."""
        gradient, self.shift.grad = self.shift.grad, None
        return torch.zeros_like(self.shift.detach()) if gradient is None else gradient

    def update(self, read: float, read_slope: float) -> None:
        """Choose the next step's multiplier by the share of the distant keys read, and its derivative by `shift`."""
        if read_slope <= 0:
            return  # the text has no token with distant keys
        found = self.multiplier - self.slope / read_slope  # `slope` less the budget's own part
        self.average = MEMORY * self.average + (1 - MEMORY) * found if self.average else found
        excess = CORRECTION * (read / self.target - 1)
        # Where the task would turn heads off, the average is negative, and too few keys make it more so.
        self.multiplier = self.average * max(0.0, 1 + (excess if self.average > 0 else -excess))


def make_budget(config: TrainConfig, network: MoHLlamaForCausalLM, device: torch.device) -> KeyBudget | None:
    """The budget of a run; None where no threshold router is trained.

    Raises UserError for a budget that routers cannot reach, and for `objective.keys` where it has no effect.
    """
    plan, routers, asked, length = network.config, network.routers, config.objective.keys, config.data.sequence_length
    given = f"objective.keys={asked}"
    if not learns_thresholds(network):
        if asked is None:
            return None
        routed = sum(router.num_routed for router in routers if not router.is_full)
        why = f"router_type={plan.router_type}, {routed} routed heads, gate_gradient={config.gate_gradient}"
        raise UserError(f"{given} has no effect: no router of model={config.model} learns thresholds ({why}); drop it")
    near, heads = fallback_keys(plan, length), sum(router.num_heads for router in routers)
    if asked is not None and near == 1:
        raise UserError(f"{given}: data.sequence_length={length} tokens are read in full; raise it, or drop {given}")
    always = sum(router.num_heads if router.is_full else router.num_shared for router in routers) / heads
    most = sum(router.num_heads - router.local_groups * router.group_size for router in routers) / heads
    target = min(most, planned_share(plan)) if asked is None else (asked - near) / (1 - near)  # of the distant keys
    if not always < target <= most:
        least, highest = (share_of_keys(plan, share, length) for share in (always, most))
        raise UserError(
            f"{given if asked else f'the plan of model={config.model}'} must be above {least:.3f}, which always-on "
            f"heads and windows read of data.sequence_length={length} tokens, and at most {highest:.3f}, which all but "
            "never-on heads read: set objective.keys so"
        )
    return KeyBudget(network, device, target)


# ---- thresholds


@dataclass(frozen=True)
class Thresholds:
    """What changes in a model so that it reads its budget.

    Attributes:
        shift: is added to all scores.
        mean_groups: groups that tokens then have on in each layer, mean over distant keys.
        always_on, never_on: ids of routed groups in each layer that every token, or no token, then has on.
        distant_read: share of the text's distant keys that is then read; ``target``: that should be.
    """

    shift: float
    mean_groups: list[float]
    always_on: list[list[int]]
    never_on: list[list[int]]
    distant_read: float
    target: float


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
    with contextlib.ExitStack() as hooks:
        for router in (router for router in routers if router.num_routed):
            hooks.enter_context(router.routed.register_forward_hook(lambda module, inputs, scores: scores + shift))
        for number in range(PASSES):
            shares, tokens = _shares(accelerator, model, batches)
            if not tokens:
                return None
            above = torch.stack([share.sum(0) for share in shares]).sum(0).flip(0).cumsum(0).flip(0)
            if number == PASSES - 1 or abs(above[_BINS // 2] / wanted - 1) <= _CLOSE:
                break
            edge = int((above - wanted).abs().argmin())  # scores of this bin and of higher ones read the budget
            shift += _HIGHEST - edge * 2 * _HIGHEST / _BINS
    on = [share[:, _BINS // 2 :].sum(-1) for share in shares]  # share of distant keys that each group reads
    sure = [router.is_full or tokens >= KIND_TOKENS for router in routers]
    means = [router.num_shared / size + float(groups.sum()) for router, groups in zip(routers, on, strict=True)]
    return Thresholds(
        shift=shift,
        mean_groups=means,
        always_on=[
            ((groups > 1 - 1e-9) & own).nonzero().flatten().tolist() for groups, own in zip(on, sure, strict=True)
        ],
        never_on=[((groups == 0) & own).nonzero().flatten().tolist() for groups, own in zip(on, sure, strict=True)],
        distant_read=size * sum(means) / heads,
        target=target,
    )


def _shares(accelerator: Accelerator, model: nn.Module, batches: Sequence[Batch]) -> tuple[list[torch.Tensor], float]:
    """For each layer the share of distant keys by the bin of their tokens' score, `[U, bins]`; and how many tokens."""
    network, device = accelerator.unwrap_model(model).network, accelerator.device
    exact = float64_device(device)
    counts = [torch.zeros(router.routed_groups, _BINS, dtype=torch.float64, device=exact) for router in network.routers]
    distant = torch.zeros(2, dtype=torch.float64, device=exact)
    model.eval()
    hidden = None if accelerator.is_main_process else True  # None: on terminals alone
    for batch in tqdm(batches, "set thresholds", unit="batch", leave=False, disable=hidden):
        inputs = batch["input_ids"], batch["position_ids"], batch["labels"]
        _, router_logits = model(*(tensor.to(device) for tensor in inputs), compare=True, route=True)
        weights = distant_keys(network.config, batch["position_ids"]).flatten().to(exact, torch.float64)
        distant += torch.stack([weights.sum(), weights.count_nonzero()])
        for router, logits, count in zip(network.routers, router_logits, counts, strict=True):
            # A score of exactly 0 is off, and belongs to the bin below.
            bins = ((logits.to(exact, torch.float64) + _HIGHEST) * (_BINS / 2 / _HIGHEST)).ceil() - 1
            bins = bins.clamp(_BINS - 1 if router.is_full else 0, _BINS - 1).long()  # a full layer asks no score
            for group in range(len(count)):
                count[group] += torch.bincount(bins[:, group], weights, minlength=_BINS)
    model.train()
    total, tokens = accelerator.reduce(distant, "sum").tolist()
    return [accelerator.reduce(count, "sum").cpu() / total for count in counts if total], tokens


def _rounded(numbers: list[float], least: list[int], most: list[int]) -> list[int]:
    """The numbers rounded to within bounds. Their sum is rounded, too, and above that of ``least`` where it can be."""
    found = [max(low, min(int(number), high)) for number, low, high in zip(numbers, least, most, strict=True)]
    total = max(round(sum(numbers)), sum(least) + 1)
    for i in sorted(range(len(numbers)), key=lambda i: found[i] - numbers[i]):
        found[i] += sum(found) < total and found[i] < most[i]
    return found


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
    config.shared_heads, config.num_shared_heads = shared, [len(heads) for heads in shared]
    if config.head_fallback == "local" and any(never):  # only windows can replace a head for good
        config.never_on_heads = never
    size, groups = config.heads_per_group, config.num_attention_heads // config.heads_per_group
    least = [len(ids) // size for ids in shared]
    # With all heads in its plan a layer does not ask its router.
    most = [min(low + len(config.routed_heads(i)) // size, max(low, groups - 1)) for i, low in enumerate(least)]
    config.num_active_heads = [size * count for count in _rounded(found.mean_groups, least, most)]
    config.complete_head_plan()
    config.keys_budget = found.target
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
