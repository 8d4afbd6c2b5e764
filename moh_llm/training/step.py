"""One training step: the losses of a micro-batch, the gradient of a step, its learning rates, and what is dropped.

`TrainingStep` is the module that is distributed over processes. Everything that touches a weight happens inside its
`forward`, student and teacher, so that the hooks of each strategy (DDP, ZeRO, FSDP2) see all uses of the weights.
Learning rates are functions of the step alone: a resumed run needs no state of them.

Shapes: B sequences, L positions, C hidden size, N positions with a target, U routed groups of a layer.
"""

import contextlib
import hashlib
import math
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from moh_llm.flops import distant_keys
from moh_llm.metrics import Batch
from moh_llm.modeling import MoHLlamaForCausalLM
from moh_llm.records.tensors import is_fallback_weight, is_routing_weight
from moh_llm.training.budget import KeyBudget, distant_keys_read
from moh_llm.training.config import ObjectiveConfig, TrainConfig
from moh_llm.training.losses import (
    IGNORED,
    StepLosses,
    Teacher,
    balance_loss_sum,
    comparison_values,
    expert_loss_sum,
    heads_on_sum,
    next_token_targets,
    token_losses,
)
from moh_llm.training.networks import full_shape, trained_weights
from moh_llm.training.reference import Reference
from moh_llm.training.zero import by_deepspeed

WARMUP_FROM = 1e-5  # learning rate of the first step of warm-up
BETAS = 0.9, 0.95  # of AdamW
MOST_DROPPED = 5  # dropped steps in a row that end the run


# ---- the gradient


def seed_step(config: TrainConfig, step: int, process: int) -> None:
    """Seed the generators by step and process, so that their state need not be saved."""
    digest = hashlib.blake2b(f"{config.seed}/{step}/{process}".encode(), digest_size=8).digest()
    torch.manual_seed(int.from_bytes(digest, "little") >> 1)


class TrainingStep(nn.Module):
    """The student's losses on some sequences, against the text or against its teacher.

    Args:
        student: a MoH model, or one with adapters (peft).
        teacher: the reference, frozen. None where there is none, or where the student is the reference: its base is
            frozen, and without adapters and with all heads on it is the model that the run began with.
    """

    _no_split_modules = ("LlamaDecoderLayer",)  # where FSDP cuts

    def __init__(
        self,
        student: nn.Module,
        teacher: MoHLlamaForCausalLM | None,
        objective: ObjectiveConfig,
        reference: Reference | None = None,
    ):
        super().__init__()
        self.student, self.teacher, self.objective, self.reference = student, teacher, objective, reference
        self._has_adapters = hasattr(student, "disable_adapter")
        is_base_frozen = self._has_adapters or all(map(is_routing_weight, trained_weights(student)))
        self.has_teacher = teacher is not None or (is_base_frozen and reference is not None and reference.own)

    @property
    def network(self) -> MoHLlamaForCausalLM:
        """The student's MoH model, below adapters."""
        return self.student.get_base_model() if self._has_adapters else self.student

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        targets: torch.Tensor,
        compare: bool = False,
        route: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Sums over the sequences in training, values per position in scoring.

        Args:
            input_ids, position_ids: `[B, L]`; positions restart with each document.
            targets: ids of the next tokens `[B, L]`, `IGNORED` where there is none.
            compare: score instead of train.
            route: with `compare`, the router logits alone, without the teacher.

        Returns:
            In training `[7]`, sums in the order of `StepLosses`. With `compare` the `comparison_values` per
            position with a target, `[N, 4]` (zero without a teacher, except the first), and the router logits of each
            layer at all positions, `[B * L, U]`.
        """
        counted = targets != IGNORED
        # No mask and no cache: with positions that restart, documents do not see one another.
        inputs = {"input_ids": input_ids, "position_ids": position_ids, "use_cache": False}
        # The teacher goes first: it may be the same network with other heads on.
        is_compared = self.has_teacher and (compare or self.objective.has_teacher) and not route
        reference = self._reference(inputs, counted) if is_compared else None
        output = self.network.model(**inputs, output_router_logits=True, output_expert_logits=not compare)
        hidden, head = output.last_hidden_state[counted], self.network.lm_head.weight
        if compare:
            router_logits = tuple(logits.flatten(0, -2) for logits in output.router_logits)
            if route:
                return hidden.new_zeros(0, 4), router_logits
            return comparison_values(hidden, head, targets[counted], reference), router_logits
        task, cross_entropy = token_losses(hidden, head, targets[counted], reference)
        balance = balance_loss_sum(output.router_logits, self.network.routers)
        experts = expert_loss_sum(output.expert_logits, len(input_ids), self.network.config).to(task)
        routers = self.network.routers
        on = heads_on_sum(output.router_logits, routers, self.all_heads_on(position_ids)) / max(1, len(routers))
        keys = distant_keys_read(output.router_logits, routers, distant_keys(self.network.config, position_ids))
        return torch.stack([task, cross_entropy, *(part.to(task) for part in (balance, experts, on, *keys))])

    def all_heads_on(self, position_ids: torch.Tensor) -> torch.Tensor:
        """Which tokens have all heads on because they are a document's first, bool, given their positions in it."""
        return position_ids < self.network.config.all_heads_until

    @torch.no_grad()
    def _reference(self, inputs: dict[str, Any], counted: torch.Tensor) -> Teacher:
        """The reference's last hidden states `[N, C]` and its head `[V, C]`."""
        network, training = self.teacher, self.student.training
        with contextlib.ExitStack() as as_reference:
            if network is None:
                network = self.network
                self.student.eval()  # no dropout
                as_reference.callback(self.student.train, training)
                as_reference.enter_context(self.network.all_heads_active())
                if self._has_adapters:
                    as_reference.enter_context(self.student.disable_adapter())
            return network.model(**inputs).last_hidden_state[counted], network.lm_head.weight.detach()

    def train(self, mode: bool = True) -> "TrainingStep":
        """Set the student's mode; the teacher stays as it is, without dropout."""
        super().train(mode)
        if self.teacher is not None:
            self.teacher.eval()
        return self


def accumulate_gradients(
    accelerator: Accelerator,
    model: torch.nn.Module,
    batch: Batch,
    config: TrainConfig,
    beta: float,
    budget: KeyBudget | None = None,
) -> tuple[StepLosses, float]:
    """Add the gradient of one step's loss to the weights, one micro-batch at a time, and clip it.

    The loss is token losses / (predicted tokens of the step) + (load-balance losses of heads, weighted by ``beta``, and
    of experts) / (sequences of the step) + (the budget's multiplier) * (distant keys read) / (distant keys of the
    step), summed over all processes. So it depends neither on ``config.data.micro_batch_size`` nor on the number of
    processes. ``batch`` has this process's sequences of the step, `[sequences, L]`.

    Returns the step's losses, and the norm of its gradient before clipping. DeepSpeed has then updated the weights,
    too, if that norm is finite.
    """
    targets = next_token_targets(batch["labels"])
    distant = distant_keys(accelerator.unwrap_model(model).network.config, batch["position_ids"])
    counts = torch.stack([(targets != IGNORED).sum(), distant.long().sum()]).to(accelerator.device)
    tokens, keys = accelerator.reduce(counts, "sum").tolist()
    sequences = config.data.batch_size
    # Gradients are then summed over micro-batches and processes, not averaged.
    scale = accelerator.gradient_accumulation_steps * accelerator.num_processes
    divisors = {"task": tokens, "cross_entropy": tokens, "balance": sequences, "experts": sequences}
    divisors |= {"heads_read": sequences * targets.shape[1], "distant_read": keys, "distant_slope": keys}
    counts = StepLosses(**{name: max(1, count) for name, count in divisors.items()})
    counts = torch.tensor(counts, dtype=torch.float32, device=accelerator.device)
    multiplier = 0.0 if budget is None else budget.multiplier
    means = torch.zeros_like(counts)
    for rows in torch.arange(len(targets)).split(config.data.micro_batch_size):
        with accelerator.accumulate(model):
            inputs = (batch["input_ids"][rows], batch["position_ids"][rows], targets[rows])
            found = model(*(tensor.to(accelerator.device) for tensor in inputs))
            loss = scale * StepLosses(*found / counts).total(beta, multiplier)
            if loss.requires_grad or accelerator.num_processes > 1:  # a frozen base with all heads on has no gradient
                accelerator.backward(loss)
            means += found.detach() / counts
    if not keys:  # AdamW leaves fallbacks that nothing was read of as they are; DeepSpeed's decays them
        for name, weight in model.named_parameters():
            weight.grad = None if is_fallback_weight(name) else weight.grad
    losses = StepLosses(*accelerator.reduce(means, "sum").tolist())
    if budget is not None:
        budget.slope = float(accelerator.reduce(budget.take_gradient(), "sum")) / accelerator.num_processes
    if by_deepspeed(accelerator):
        return losses, float(model.get_global_grad_norm() or 0.0)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    norm = accelerator.clip_grad_norm_(trained, config.optimizer.max_grad_norm or math.inf)
    return losses, float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


# ---- the update


def is_decayed(name: str, weight: torch.nn.Parameter) -> bool:
    """Whether weight decay acts on a parameter: on matrices, and never on biases and norms, whatever their shape.

    Only the last parts of a name count, since wrappers (DDP, FSDP, peft) insert others before and between.
    """
    *modules, kind = name.split(".")
    is_vector = kind == "bias" or any(module.endswith("norm") for module in modules)
    return not is_vector and len(full_shape(weight)) >= 2


def make_optimizer(network: torch.nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW over groups by learning rate (`learning_rates`), decayed or not (`is_decayed`)."""
    groups: dict[tuple[str, bool], list[torch.nn.Parameter]] = {}
    for name, weight in trained_weights(network).items():
        rate = "router_learning_rate" if is_routing_weight(name) else "learning_rate"
        groups.setdefault((rate, is_decayed(name, weight)), []).append(weight)
    return torch.optim.AdamW(
        [
            {"params": weights, "rate": rate, "weight_decay": config.optimizer.weight_decay if decayed else 0.0}
            for (rate, decayed), weights in sorted(groups.items(), key=lambda item: item[0])
        ],
        lr=config.optimizer.learning_rate,
        betas=BETAS,
        fused=True,  # one pass over weights, gradients and moments: a fifth of the time on CPU
    )


def set_learning_rates(optimizer: torch.optim.Optimizer, config: TrainConfig, step: int) -> dict[str, float]:
    """Set every group's rate for the step after ``step`` steps; return the rates of what is trained."""
    rates = learning_rates(config, step)
    for group in optimizer.param_groups:
        group["lr"] = rates[group["rate"]]
    return {group["rate"]: group["lr"] for group in optimizer.param_groups}


def warmup_cosine(step: int, warmup: int, total: int, start: float, highest: float, final: float) -> float:
    """Linear warm-up from ``start`` to ``highest``, then a half cosine down to ``final``.

    Step 0 uses exactly ``start``, step ``warmup`` exactly ``highest``, and the last of ``total`` steps exactly
    ``final`` if at least two steps follow the warm-up.
    """
    if step < warmup:
        return start + (highest - start) * step / warmup
    if (decay_steps := total - 1 - warmup) < 1:
        return highest
    progress = min((step - warmup) / decay_steps, 1.0)
    return final + (highest - final) * 0.5 * (1 + math.cos(math.pi * progress))


def learning_rates(config: TrainConfig, step: int) -> dict[str, float]:
    """The rates of the step after ``step`` steps: of the base's weights or adapters, and of routers and fallbacks.

    Both follow `warmup_cosine`; the routers' is scaled by the ratio of the two highest rates.
    """
    schedule, highest = config.schedule, config.optimizer.learning_rate
    start, final = min(WARMUP_FROM, highest), schedule.final_learning_rate
    rate = warmup_cosine(step, schedule.warmup_steps, config.max_steps, start, highest, final)
    router_highest = config.optimizer.router_learning_rate
    router_rate = rate if router_highest is None else router_highest * (rate / highest)
    return {"learning_rate": rate, "router_learning_rate": router_rate}


def why_dropped(loss: float, gradient_norm: float) -> str | None:
    """The reason to leave the weights as they are; None where loss and gradient are finite."""
    if not math.isfinite(loss):
        return "the loss is not finite"
    return None if math.isfinite(gradient_norm) else "the gradient is not finite"
