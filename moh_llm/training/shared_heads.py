"""Shared heads that are learned: the Top-K of one logit per head, in the end fixed as the config's `shared_heads`.

A model without shared heads has rows of router and fallback for each head. While the logits are learned, the K heads of
a layer with the highest logits are shared, and the router chooses among the others. The gradient passes straight
through to sigmoids of the logits that sum to K (`soft_top_k`), whose temperature falls. In the end the shared heads'
rows of router and fallback are dropped.

AdamW divides a gradient by its size in the past. For the logits that past is long (`BETAS`): once the right heads are
shared, gradients are small and of changing sign, and would otherwise move logits as much as those of wrong heads did.

Shapes: B batch, T tokens, U groups of heads that may be routed (heads, or key-value groups), C hidden size.
"""

import torch
from torch import nn

from moh_llm.errors import UserError
from moh_llm.modeling import MoHLlamaConfig, MoHLlamaForCausalLM, MoHRouter
from moh_llm.modeling.routing_moh import select_top_k, straight_through

LOGITS = "shared_logits"
FIRST = 1e-3  # spread of the initial logits, which fall from the first head to the last: the first heads are shared
BETAS = 0.9, 0.999  # of AdamW
HIGHEST_TEMPERATURE, LOWEST_TEMPERATURE = 1.0, 0.1


def soft_top_k(logits: torch.Tensor, k: int, temperature: float) -> torch.Tensor:
    """Sigmoids of (logits - t) / temperature, `[U]`, with t such that they sum to ``k``, 0 < k < U.

    Their sum is k for any logits, so a step raises logits only at the cost of others: an order is learned, also under
    AdamW, which takes large and small gradients alike. At low temperature they are 1 at the k largest logits, else 0.
    """
    with torch.no_grad():
        reach = temperature * torch.tensor(len(logits), dtype=logits.dtype).log() + temperature
        low, high = logits.min() - reach, logits.max() + reach
        for _ in range(40):
            middle = (low + high) / 2
            above = torch.sigmoid((logits - middle) / temperature).sum() > k
            low, high = torch.where(above, middle, low), torch.where(above, high, middle)
        slopes = torch.sigmoid((logits - middle) / temperature)
        slopes = slopes * (1 - slopes)
        weights = slopes / slopes.sum().clamp_min(torch.finfo(slopes.dtype).tiny)
    # The implicit derivative of t: dt / dlogit_i = slope_i / sum of slopes.
    threshold = middle + (weights * (logits - logits.detach())).sum()
    return torch.sigmoid((logits - threshold) / temperature)


class LearningRouter(MoHRouter):
    """A router whose shared groups are the Top-K of `shared_logits`; other weights are those of the ``given`` router.

    Attributes:
        temperature: of `soft_top_k`; None: the logits get no gradient.
    """

    def __init__(self, config: MoHLlamaConfig, layer_idx: int, shared_heads: int, given: MoHRouter):
        super().__init__(config, layer_idx)
        for name, module in given.named_children():
            setattr(self, name, module)
        self.num_shared, self.top_shared = shared_heads, shared_heads // self.group_size
        self.top_k = self.top_k_of(self.num_active)
        self.shared_logits = nn.Parameter(torch.linspace(0, -FIRST, self.routed_groups))
        self.temperature: float | None = HIGHEST_TEMPERATURE
        self.to(given.index.device)

    def shared(self) -> torch.Tensor:
        """1 for each group that is shared, 0 for the others, `[U]`."""
        return select_top_k(self.shared_logits.detach(), self.top_shared)

    def _routed_logits(self, *inputs) -> torch.Tensor:
        logits, shared = super()._routed_logits(*inputs), self.shared().bool()
        if self.router_type == "query_norm" and self.routed_groups - self.top_shared > 1:
            # Norms are divided by their spread over the groups among which the router chooses.
            spread = logits[..., ~shared].std(dim=-1, keepdim=True)
            logits = logits / spread.clamp_min(torch.finfo(logits.dtype).eps)
        # Not infinity, which multiplied by a score of 0 is NaN.
        return logits.masked_fill(shared, torch.finfo(logits.dtype).min)

    def select(self, logits: torch.Tensor) -> torch.Tensor:
        """1 where a token has a group on; shared groups always are."""
        return super().select(logits).masked_fill(self.shared().bool(), 1.0)

    def _of_heads(self, shared: torch.Tensor, routed: torch.Tensor) -> torch.Tensor:
        gate = routed.masked_fill(self.shared().bool(), 1.0)
        if torch.is_grad_enabled():
            # The gate's gradient at all tokens, also where the router turns the head on: the value of sharing a head
            # must not depend on the router's present choice.
            soft = 0 * self.shared_logits
            if self.temperature is not None:
                soft = soft_top_k(self.shared_logits, self.top_shared, self.temperature)
            gate = straight_through(gate, soft.to(gate.dtype))
        return super()._of_heads(shared, gate)


def check_shared_heads(config: MoHLlamaConfig, shared_heads: int) -> None:
    """Raise UserError unless this number of shared heads can be learned in each layer.

    The model must have no shared heads yet and a router that scores each head by itself, and each layer at least that
    many active heads and one more to route.
    """
    given = f"shared_heads.number={shared_heads}"
    if config.router_type not in ("linear", "query_norm"):
        raise UserError(
            f"{given}: the model's router is {config.router_type!r}; shared heads are learned with routers linear and "
            "query_norm"
        )
    if any(config.shared_heads_per_layer):
        raise UserError(
            f"{given}: the model has shared heads already, without weights in router and fallbacks; convert its base "
            "with --num-shared-heads 0"
        )
    size = config.heads_per_group
    if shared_heads % size:
        raise UserError(f"{given} must be whole key-value groups of {size} heads, by the model's routing_granularity")
    for layer, active in enumerate(config.active_heads_per_layer):
        most = min(active, len(config.routed_heads(layer)) - size)
        if shared_heads > most:
            raise UserError(
                f"{given}: layer {layer} has {active} active heads of {config.num_attention_heads}, of which "
                f"{most} can be shared; lower it, or convert with more active heads in each layer"
            )


def learn_shared_heads(network: MoHLlamaForCausalLM, shared_heads: int) -> None:
    """Give each layer a `LearningRouter` that shares this number of heads. Raises UserError (`check_shared_heads`)."""
    config = network.config
    check_shared_heads(config, shared_heads)
    for number, layer in enumerate(network.model.layers):
        layer.self_attn.router = LearningRouter(config, number, shared_heads, layer.self_attn.router)


def rate_of_logits(step: int, steps: int, highest: float) -> float:
    """Learning rate of the step after ``step`` steps: it falls linearly to 0 in ``steps``."""
    return highest * max(0.0, 1 - step / steps)


def set_temperature(network: MoHLlamaForCausalLM, step: int, steps: int) -> None:
    """Set the temperature of the step after ``step`` steps; it falls geometrically. After ``steps`` none is learned."""
    share = step / max(1, steps - 1)
    temperature = HIGHEST_TEMPERATURE * (LOWEST_TEMPERATURE / HIGHEST_TEMPERATURE) ** share
    for router in network.routers:
        if isinstance(router, LearningRouter):
            router.temperature = temperature if step < steps else None


@torch.no_grad()
def fix_shared_heads(network: MoHLlamaForCausalLM) -> None:
    """Write the learned shared heads into the config and replace each `LearningRouter` by an ordinary one, in place.

    The network's output stays the same. Without a `LearningRouter` nothing is done.
    """
    routers, config = network.routers, network.config
    if not isinstance(routers[0], LearningRouter):
        return
    shared = []
    for router in routers:
        groups = router.index[: router.routed_groups][router.shared().bool()].tolist()
        shared.append([group * router.group_size + head for group in groups for head in range(router.group_size)])
    config.shared_heads, config.num_shared_heads = shared, len(shared[0])
    config.validate_head_plan()
    for number, layer in enumerate(network.model.layers):
        attention, router = layer.self_attn, layer.self_attn.router
        attention.router = MoHRouter(config, number)
        _take_rows(attention.router, router, ~router.shared().bool())
        if attention.fallback is not None:
            fallback = attention.fallback
            attention.fallback = type(fallback)(config, number)
            _take_rows(attention.fallback, fallback, torch.isin(fallback.index, attention.fallback.index))


def _take_rows(new: nn.Module, old: nn.Module, kept: torch.Tensor) -> None:
    """Copy the ``kept`` rows, one per head or group, of the parameters of ``old`` to ``new``."""
    for name, weight in new.named_parameters():
        weight.data = old.get_parameter(name)[kept.to(old.get_parameter(name).device)].clone()
    new.to(kept.device)
