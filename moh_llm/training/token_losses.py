"""Cross-entropy and KL of next tokens from hidden states, without ever holding the logits of a batch.

Shapes: N positions, C hidden size, V vocabulary. Logits exist for a few positions at a time, in
the forward pass only: their gradient is known there and goes straight into the gradients of hidden
states and of the head's weight, which are what is kept for the backward pass.
"""

import torch
import torch.nn.functional as F

# Logits held at once, in a few float32 tensors of 256 MiB each. Fewer would cost time: each chunk adds to the whole
# gradient of the head's weight.
CHUNK_LOGITS = 2**26


def chunk_positions(vocabulary: int) -> int:
    """Positions whose logits are held at once: 523 for LLaMA 3's vocabulary."""
    return max(1, CHUNK_LOGITS // vocabulary)


def token_losses(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    teacher_hidden: torch.Tensor | None = None,
    teacher_weight: torch.Tensor | None = None,
    temperature: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Task loss and cross-entropy in nats, each summed over the positions.

    With a teacher the task loss is T^2 * KL(teacher || student), both softened by the temperature T
    (the factor keeps the gradient's size independent of T); without one it is the cross-entropy.
    Only the task loss carries a gradient. Products are taken in autocast's dtype where autocast
    is on, sums and softmax in float32 at least.

    Args:
        hidden: the student's last hidden states `[N, C]`.
        weight: of its head, `[V, C]`.
        targets: ids of the next tokens `[N]`.
        teacher_hidden, teacher_weight: likewise of the teacher; they get no gradient.
        temperature: T.
    """
    return _TokenLosses.apply(hidden, weight, targets, teacher_hidden, teacher_weight, temperature)


@torch.no_grad()
def comparison_values(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    teacher_hidden: torch.Tensor | None = None,
    teacher_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Per position, float64 `[N, 4]`: cross-entropy, the teacher's, KL(teacher || student), equal top-1.

    Arguments are those of `token_losses`; without a teacher the last three are zero.
    """
    values = torch.zeros(len(hidden), 4, dtype=torch.float64, device=hidden.device)
    size = chunk_positions(len(weight))
    for first in range(0, len(hidden), size):
        rows = slice(first, first + size)
        own = F.linear(hidden[rows], weight).float().log_softmax(-1)
        values[rows, 0] = F.nll_loss(own, targets[rows], reduction="none").double()
        if teacher_hidden is not None and teacher_weight is not None:
            other = F.linear(teacher_hidden[rows], teacher_weight).float().log_softmax(-1)
            values[rows, 1] = F.nll_loss(other, targets[rows], reduction="none").double()
            values[rows, 2] = F.kl_div(own, other, log_target=True, reduction="none").sum(-1).double()
            values[rows, 3] = (own.argmax(-1) == other.argmax(-1)).double()
    return values


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, teacher_hidden, teacher_weight, temperature):
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
                    if temperature != 1.0:  # softmax forgets what was subtracted: log-probabilities serve as logits
                        own, teacher = (F.log_softmax(each.div_(temperature), -1) for each in (own, teacher))
                    wanted = teacher.exp()
                    task += temperature**2 * torch.einsum("nv,nv->", wanted, teacher.sub_(own))
                    gradient = own.exp_().sub_(wanted).mul_(temperature)
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
        return (*gradients, None, None, None, None)
