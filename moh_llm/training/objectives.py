"""What a training step minimises: KL to the base or cross-entropy, plus the load-balance loss.

Shapes: B blocks, L positions, V vocabulary, R routed heads.

Every sum is divided by a count over the whole step, not over one forward pass, so that 8 passes
of 1 block and 1 pass of 8 blocks have the same loss and gradient. That holds for the load-balance
loss too, because it is taken per block: a product of means over tokens is not additive over
passes, and the mean over blocks is.
"""

from dataclasses import dataclass

import torch
from torch.utils.checkpoint import checkpoint

from moh_llm.modeling import MoHRouter, load_balancing_loss

IGNORED = -100
# Positions whose float32 log-probabilities exist at once: bounds the memory beyond the logits.
CHUNK_POSITIONS = 512


@dataclass(frozen=True)
class StepLosses:
    """Means over one optimiser step; the loss that was minimised is ``task + beta * balance``.

    ``task`` is the KL or the cross-entropy, ``cross_entropy`` the one to the text, both in nats per
    predicted token; ``balance`` is the load-balance loss of Eq. 7 per block.
    """

    task: float
    cross_entropy: float
    balance: float


def next_token_targets(labels_BL: torch.Tensor) -> torch.Tensor:
    """Labels shifted to where they are predicted, `[B, L]`; `IGNORED` at the last position."""
    return torch.nn.functional.pad(labels_BL[:, 1:], (0, 1), value=IGNORED)


def token_losses(
    student_BLV: torch.Tensor, targets_BL: torch.Tensor, teacher_BLV: torch.Tensor | None, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Task loss and cross-entropy in nats, each summed over the positions that have a target.

    With a teacher the task loss is T^2 * KL(teacher || student), both softened by the temperature
    T (the factor keeps the gradient's size independent of T); without one it is the
    cross-entropy. Cross-entropy carries a gradient only in the second case. Log-probabilities are
    computed in float32, `CHUNK_POSITIONS` at a time, and again in the backward pass.
    """
    student = student_BLV.flatten(0, 1).split(CHUNK_POSITIONS)
    targets = targets_BL.flatten().split(CHUNK_POSITIONS)
    teacher = [None] * len(student) if teacher_BLV is None else teacher_BLV.flatten(0, 1).split(CHUNK_POSITIONS)
    task = student_BLV.new_zeros((), dtype=torch.float32)
    cross_entropy = torch.zeros_like(task)
    for chunk in zip(student, targets, teacher, strict=True):
        # No randomness inside, so no generator state to put back.
        sums = checkpoint(_chunk_losses, *chunk, temperature, use_reentrant=False, preserve_rng_state=False)
        task, cross_entropy = task + sums[0], cross_entropy + sums[1]
    return task, cross_entropy


def _chunk_losses(
    student: torch.Tensor, targets: torch.Tensor, teacher: torch.Tensor | None, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`token_losses` of a chunk: logits `[N, V]`, targets `[N]`."""
    log_probs = student.float().log_softmax(-1)
    valid = targets != IGNORED
    picked = log_probs.gather(-1, targets.clamp_min(0)[:, None])[:, 0]
    cross_entropy = -(picked * valid).sum()
    if teacher is None:
        return cross_entropy, cross_entropy.detach()
    if temperature != 1.0:
        log_probs = (student.float() / temperature).log_softmax(-1)
    teacher_log_probs = (teacher.float() / temperature).log_softmax(-1)
    kl = (teacher_log_probs.exp() * (teacher_log_probs - log_probs)).sum(-1)
    return temperature**2 * (kl * valid).sum(), cross_entropy.detach()


def balance_loss_sum(router_logits: tuple[torch.Tensor, ...], routers: list[MoHRouter]) -> torch.Tensor:
    """Load-balance loss (Eq. 7, averaged over layers) of each block, summed over the blocks.

    Args:
        router_logits: per layer `[B, L, R]`.
        routers: the layers' routers, which know how many heads a token selects.
    """
    top_k = [router.top_k for router in routers]
    blocks = range(router_logits[0].shape[0])
    per_block = [load_balancing_loss([logits[b : b + 1] for logits in router_logits], top_k) for b in blocks]
    return torch.stack(per_block).sum()
