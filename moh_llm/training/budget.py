"""The budget of keys in the loss, with which threshold routers learn.

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

Shapes: B sequences, L positions, U routed groups of a layer (heads or key-value groups).
"""

from collections.abc import Sequence

import torch

from moh_llm.errors import UserError
from moh_llm.flops import fallback_keys, share_of_keys
from moh_llm.modeling import MoHLlamaConfig, MoHLlamaForCausalLM, MoHLlamaModel, MoHRouter
from moh_llm.modeling.routing_moh import straight_through
from moh_llm.training.config import TrainConfig

MEMORY = 0.9  # weight of earlier steps in the average of the multiplier
CORRECTION = 3.0  # a model that reads 10 % more than its budget gets a multiplier that is 30 % higher


def distant_keys_read(
    router_logits: Sequence[torch.Tensor], routers: Sequence[MoHRouter], distant: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The distant keys that heads read, and how they change with a shift of all scores; summed, mean over all heads.

    Args:
        router_logits: scores `[B, L, U]` of each layer's routed groups.
        distant: `distant_keys` `[B, L]`.

    Returns:
        The sum of w(t) g(t, h), with the straight-through gradient, and its derivative, without a gradient.
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
    """Share of the distant keys that the plan of a model reads: the heads that tokens have on in the mean."""
    return sum(config.active_heads_per_layer) / (config.num_attention_heads * config.num_hidden_layers)


def learns_thresholds(network: MoHLlamaForCausalLM | MoHLlamaModel) -> bool:
    """Whether training changes how many heads tokens have on: threshold routers are trained."""
    is_learning = any(router.num_routed and router.is_trained for router in network.routers)
    return network.config.router_type == "threshold" and is_learning


class KeyBudget:
    """Holds the share of distant keys that a network reads at a budget, by a multiplier in the loss.

    `shift` is a zero that is added to all scores; `slope` is the derivative of a step's whole loss with respect to it.

    Args:
        network: a MoH model with threshold routers, which add `shift` to their scores from now on.
        device: where `shift` is.
        target: share of the distant keys that the network may read.
    """

    def __init__(self, network: MoHLlamaForCausalLM | MoHLlamaModel, device: torch.device, target: float):
        self.target, self.multiplier, self.average, self.slope = target, 0.0, 0.0, 0.0
        self.shift = torch.zeros((), device=device, requires_grad=True)
        for router in network.routers:
            if router.num_routed:
                router.routed.register_forward_hook(self._shifted)

    def _shifted(self, module: torch.nn.Module, inputs: tuple, scores: torch.Tensor) -> torch.Tensor:
        return scores + self.shift.to(scores) if torch.is_grad_enabled() else scores

    def take_gradient(self) -> torch.Tensor:
        """The gradient of `shift` since the last call, a scalar."""
        gradient, self.shift.grad = self.shift.grad, None
        return torch.zeros_like(self.shift.detach()) if gradient is None else gradient

    def update(self, read: float, read_slope: float) -> None:
        """Choose the multiplier of the next step.

        Args:
            read: share of the distant keys that this step read.
            read_slope: derivative of ``read`` with respect to `shift`.
        """
        if read_slope <= 0:
            return  # the text has no token with distant keys
        found = self.multiplier - self.slope / read_slope  # `slope` less the budget's own part
        self.average = MEMORY * self.average + (1 - MEMORY) * found if self.average else found
        self.multiplier = max(0.0, self.average * (1 + CORRECTION * (read / self.target - 1)))


def make_budget(config: TrainConfig, network: MoHLlamaForCausalLM, device: torch.device) -> KeyBudget | None:
    """The budget of a run; None where no threshold router is trained.

    Raises UserError for a share of keys that heads that are off, or always on, read alone.
    """
    if not learns_thresholds(network):
        return None
    target, asked, length = planned_share(network.config), config.objective.keys, config.data.sequence_length
    if asked is not None:
        near = fallback_keys(network.config, length)
        target = (asked - near) / (1 - near)  # the inverse of `share_of_keys`
        always = sum(router.num_shared for router in network.routers) / sum(r.num_heads for r in network.routers)
        if target <= always:
            least = share_of_keys(network.config, always, length)
            raise UserError(
                f"objective.keys={asked} is not above {least:.3f}, the share that always-on heads and windows read of "
                f"data.sequence_length={length} tokens: raise it"
            )
    return KeyBudget(network, device, target)
