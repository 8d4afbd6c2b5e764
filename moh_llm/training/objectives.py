"""What a training step minimises: KL to the base or cross-entropy, plus the load-balance loss, plus layer matching.

Shapes: B blocks, L positions, C hidden size, U routed groups (heads or key-value groups). The token
losses themselves are in `token_losses`.

Every sum is divided by a count over the whole step, not over one forward pass, so that 8 passes
of 1 block and 1 pass of 8 blocks have the same loss and gradient. That holds for the load-balance
loss too, because it is taken per block: a product of means over tokens is not additive over
passes, and the mean over blocks is.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moh_llm.modeling import MoHRouter
from moh_llm.modeling.routing_moh import select_top_k

IGNORED = -100


@dataclass(frozen=True)
class StepLosses:
    """Means over one optimiser step.

    ``task`` is the KL or the cross-entropy, ``cross_entropy`` the one to the text, both in nats per
    predicted token; ``balance`` is the load-balance loss of Eq. 7 per block; ``layers`` is the
    layers' distance to the base's per predicted token.
    """

    task: float
    cross_entropy: float
    balance: float
    layers: float

    def total(self, beta: float, layer_coefficient: float) -> float:
        """The loss that was minimised."""
        return self.task + beta * self.balance + layer_coefficient * self.layers


def next_token_targets(labels_BL: torch.Tensor) -> torch.Tensor:
    """Labels shifted to where they are predicted, `[B, L]`; `IGNORED` at the last position."""
    return torch.nn.functional.pad(labels_BL[:, 1:], (0, 1), value=IGNORED)


def balance_loss_sum(router_logits: tuple[torch.Tensor, ...], routers: list[MoHRouter]) -> torch.Tensor:
    """Load-balance loss (Eq. 7, averaged over layers) of each block, summed over the blocks.

    Args:
        router_logits: per layer `[B, L, U]`.
        routers: the layers' routers, which know how many groups a token selects.
    """
    # The model's own loss of each row, without padding. Layers that route alike are taken together: one by one they
    # would be thousands of small operations.
    alike: dict[tuple[int, int], list[torch.Tensor]] = {}
    for logits, router in zip(router_logits, routers, strict=True):
        if logits.shape[-1]:
            alike.setdefault((logits.shape[-1], router.top_k), []).append(logits)
    total = torch.zeros((), device=router_logits[0].device)
    for (_, top_k), layers in alike.items():
        logits = torch.stack([layer.to(total.device) for layer in layers])  # [N, B, L, U]
        total = total + (logits.softmax(-1).mean(2) * select_top_k(logits, top_k).mean(2)).sum()
    return total / max(1, sum(map(len, alike.values())))


def layer_distance_sum(
    own: Sequence[torch.Tensor], base: Sequence[torch.Tensor], counted: torch.Tensor
) -> torch.Tensor:
    """How far the layers' outputs x are from the base's y: |x - y|^2 / |y|^2, mean over layers, summed over positions.

    Args:
        own, base: per layer `[B, L, C]`; the base's get no gradient.
        counted: which positions count, `[B, L]`.
    """
    total = torch.zeros((), device=counted.device)
    for mine, other in zip(own, base, strict=True):
        wanted = other[counted].float()
        distance = (mine[counted].float() - wanted).square().sum(-1)
        total = total + (distance / wanted.square().sum(-1)).sum() / len(own)
    return total
