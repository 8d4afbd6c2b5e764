"""The losses of a training step: KL to the base or cross-entropy, and load-balance losses.

Shapes: B sequences, L positions, C hidden size, U routed groups (heads or key-value groups), N positions with a
target, V vocabulary.

Every sum is divided by a count over the whole step, not over one micro-batch, so that 8 micro-batches of 1 sequence
and 1 of 8 have the same loss and gradient. The load-balance loss is therefore taken per sequence: a product of means
over tokens is not additive over micro-batches, and the mean over sequences is.

Token losses never hold the logits of a batch. Logits exist for a few positions at a time, in the forward pass only:
their gradient is computed there, and the gradients of hidden states and of the head's weight are kept for the backward
pass.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from moh_llm.devices import float64_device, wide
from moh_llm.metrics import compare_predictions
from moh_llm.modeling import MoHLlamaConfig, MoHLlamaForCausalLM, MoHRouter
from moh_llm.modeling.modeling_moh_llama import expert_balancing_loss
from moh_llm.modeling.routing_moh import balance_factor
from moh_llm.training.config import ObjectiveConfig

IGNORED = -100
Teacher = tuple[torch.Tensor, torch.Tensor]  # last hidden states [N, C], and the weight of the head [V, C]


class StepLosses(NamedTuple):
    """Means over one optimiser step. `TrainingStep` returns their sums in this order."""

    task: float  # KL or cross-entropy, in nats per predicted token
    cross_entropy: float  # to the text, in nats per predicted token
    balance: float  # load-balance loss of heads (Eq. 7) per sequence
    experts: float = 0.0  # load-balance loss of feed-forward experts per sequence, weighted by `expert_balance_coef`
    heads_read: float = 0.0  # no loss: heads that a token had on, mean over layers
    distant_read: float = 0.0  # share of the distant keys that was read (`moh_llm.training.budget`)
    distant_slope: float = 0.0  # no loss: its derivative with respect to a shift of all scores

    def total(self, beta: float, multiplier: float = 0.0) -> float:
        """The loss that is minimised; the arguments weigh the load-balance loss of heads and the distant keys read."""
        loss = self.task + beta * self.balance + self.experts
        return loss + multiplier * self.distant_read if multiplier else loss  # routers get no gradient of zeros


def next_token_targets(labels_BL: torch.Tensor) -> torch.Tensor:
    """Labels shifted to the position that predicts them, `[B, L]`; `IGNORED` at the last position."""
    return F.pad(labels_BL[:, 1:], (0, 1), value=IGNORED)


def balance_coefficient(objective: ObjectiveConfig, network: MoHLlamaForCausalLM) -> float | None:
    """Weight of the load-balance loss of heads; None where no router has such a loss."""
    if network.config.router_type in ("threshold", "none") or not any(router.num_routed for router in network.routers):
        return None
    given = objective.balance_coefficient
    return network.config.head_balance_coef if given is None else given


def balance_loss_sum(router_logits: tuple[torch.Tensor, ...], routers: list[MoHRouter]) -> torch.Tensor:
    """Load-balance loss (Eq. 7, averaged over layers), summed over the sequences; logits per layer are `[B, L, U]`."""
    # The model's own loss of each row, without padding. Layers of one shape are stacked: thousands of small operations
    # would take longer.
    alike: dict[tuple[int, int], tuple[MoHRouter, list[torch.Tensor]]] = {}
    for logits, router in zip(router_logits, routers, strict=True):
        if logits.shape[-1] and router.router_type != "threshold":
            alike.setdefault((logits.shape[-1], router.top_k), (router, []))[1].append(logits)
    total = torch.zeros((), device=router_logits[0].device)
    for router, layers in alike.values():
        logits = torch.stack([layer.to(total.device) for layer in layers])  # [N, B, L, U]
        sums = (logits.softmax(-1).mean(2) * router.select(logits).mean(2)).sum()
        total = total + sums * balance_factor(router.router_score, logits)
    return total / max(1, sum(len(layers) for _, layers in alike.values()))


@torch.no_grad()
def heads_on_sum(
    router_logits: Sequence[torch.Tensor], routers: Sequence[MoHRouter], all_on: torch.Tensor
) -> torch.Tensor:
    """How many heads are on by the gates, summed over tokens and layers, int64 (some devices have no float64).

    Logits per layer are `[..., U]`; ``all_on``, bool `[...]`, is true where a token has all heads on anyway.
    """
    total = torch.zeros((), dtype=torch.int64, device=all_on.device)
    for logits, router in zip(router_logits, routers, strict=True):
        if router.router_type == "threshold":
            on = router.num_shared + router.group_size * router.select(logits).sum(-1)
        else:  # the same number for every token
            on = logits.new_full(logits.shape[:-1], router.num_active)
        total += on.masked_fill(all_on.to(on.device), router.num_heads).long().sum().to(total.device)
    return total


def expert_loss_sum(expert_logits: Sequence[torch.Tensor], sequences: int, config: MoHLlamaConfig) -> torch.Tensor:
    """`expert_balancing_loss`, weighted, summed over the sequences; logits per layer are `[B * L, experts]`."""
    rows = zip(*(logits.chunk(sequences) for logits in expert_logits), strict=True)
    losses = [expert_balancing_loss(row, config) for row in rows]
    return config.expert_balance_coef * torch.stack(losses).sum() if losses else torch.zeros(())


# Logits held at once, in a few float32 tensors of 256 MiB each. Smaller chunks are slower, since each chunk adds to
# the full gradient of the head's weight.
CHUNK_LOGITS = 2**26


def chunk_positions(vocabulary: int) -> int:
    """Positions whose logits are held at once: 523 for LLaMA 3's vocabulary."""
    return max(1, CHUNK_LOGITS // vocabulary)


def token_losses(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, teacher: Teacher | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Task loss and cross-entropy in nats, each summed over the positions.

    With a teacher the task loss is KL(teacher || student), without one the cross-entropy. Only the task loss carries a
    gradient, and the teacher gets none. Products are taken in autocast's dtype where autocast is on, sums and softmax
    in float32 at least. ``hidden`` are the student's last hidden states `[N, C]`, ``weight`` is that of its head,
    `[V, C]`, and ``targets`` are the ids of the next tokens `[N]`.
    """
    return _TokenLosses.apply(hidden, weight, targets, *(teacher or (None, None)))


@torch.no_grad()
def comparison_values(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, teacher: Teacher | None = None
) -> torch.Tensor:
    """Per position, float64 `[N, 4]`: cross-entropy, the teacher's, KL(teacher || student), equal top-1.

    Arguments are those of `token_losses`; without a teacher the last three are zero.
    """
    values = torch.zeros(len(hidden), 4, dtype=torch.float64, device=float64_device(hidden.device))
    size = chunk_positions(len(weight))
    for first in range(0, len(hidden), size):
        rows = slice(first, first + size)
        own = F.linear(hidden[rows], weight).float().log_softmax(-1)
        if teacher is None:
            values[rows, 0] = wide(F.nll_loss(own, targets[rows], reduction="none"))
        else:
            other = F.linear(teacher[0][rows], teacher[1]).float().log_softmax(-1)
            values[rows] = compare_predictions(own, other, targets[rows])
    return values


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, teacher_hidden, teacher_weight):
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        exact = torch.promote_types(dtype, torch.float32)
        head = weight.to(dtype)
        teacher_head = None if teacher_weight is None else teacher_weight.to(dtype)
        of_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        of_weight = None
        task, cross_entropy = hidden.new_zeros((), dtype=exact), hidden.new_zeros((), dtype=exact)
        size = chunk_positions(len(weight))
        with torch.autocast(device, enabled=False):
            for first in range(0, len(hidden), size):
                last = first + size
                states, picked = hidden[first:last].to(dtype), targets[first:last, None]
                own = F.log_softmax(states @ head.T, -1, dtype=exact)
                nats = -own.gather(-1, picked).sum()
                cross_entropy += nats
                if teacher_hidden is None:
                    task += nats
                    gradient = own.exp_()
                    gradient.scatter_add_(-1, picked, -torch.ones_like(picked, dtype=exact))
                else:
                    teacher = F.log_softmax(teacher_hidden[first:last].to(dtype) @ teacher_head.T, -1, dtype=exact)
                    wanted = teacher.exp()
                    task += torch.einsum("nv,nv->", wanted, teacher.sub_(own))
                    gradient = own.exp_().sub_(wanted)
                gradient = gradient.to(dtype)
                if of_hidden is not None:
                    of_hidden[first:last] = gradient @ head
                if ctx.needs_input_grad[1]:
                    part = (gradient.T @ states).to(exact)
                    of_weight = part if of_weight is None else of_weight.add_(part)
        if of_weight is None and ctx.needs_input_grad[1]:
            of_weight = torch.zeros_like(weight)  # not one position
        ctx.save_for_backward(of_hidden, None if of_weight is None else of_weight.to(weight.dtype))
        ctx.mark_non_differentiable(cross_entropy)
        return task, cross_entropy

    @staticmethod
    def backward(ctx, of_task, _):
        gradients = (None if kept is None else kept * of_task.to(kept.dtype) for kept in ctx.saved_tensors)
        return (*gradients, None, None, None)
