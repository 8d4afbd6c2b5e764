"""One training step: the losses of a micro-batch, the gradient of a step, and the check for divergence.

`TrainingStep` is the module that is distributed over processes. Everything that touches a weight happens inside its
`forward`, student and teacher, so that the hooks of each strategy (DDP, ZeRO, FSDP2) see all uses of the weights.

Shapes: B sequences, L positions, C hidden size, N positions with a target, U routed groups of a layer.
"""

import contextlib
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn

from moh_llm.errors import UserError
from moh_llm.metrics import Batch
from moh_llm.modeling import MoHLlamaForCausalLM
from moh_llm.records.run import LogLine
from moh_llm.records.tensors import is_routing_weight
from moh_llm.training.config import DivergenceConfig, ObjectiveConfig, TrainConfig
from moh_llm.training.losses import (
    IGNORED,
    StepLosses,
    balance_loss_sum,
    comparison_values,
    expert_loss_sum,
    heads_on_sum,
    layer_distance_sum,
    next_token_targets,
    token_losses,
)
from moh_llm.training.networks import trained_weights
from moh_llm.training.parallel import clip_gradients, sum_over_processes
from moh_llm.training.reference import Reference

MOST_IN_A_ROW = 5  # dropped steps in a row that end the run


class TrainingStep(nn.Module):
    """The student's losses on some sequences, against the text or against its teacher.

    Args:
        student: a MoH model, or one with adapters (peft).
        teacher: the reference, frozen.
        objective: which loss.
        reference: what the student is compared with. Where it is the model that the run began with, all heads on, a
            student whose base is frozen needs no teacher: without adapters and with all heads on it is the reference,
            at no memory.
    """

    # Where FSDP cuts.
    _no_split_modules = ("LlamaDecoderLayer",)

    def __init__(
        self,
        student: nn.Module,
        teacher: MoHLlamaForCausalLM | None,
        objective: ObjectiveConfig,
        reference: Reference | None = None,
    ):
        super().__init__()
        self.student, self.teacher, self.objective, self.reference = student, teacher, objective, reference
        self._is_base_frozen = self._has_adapters or all(map(is_routing_weight, trained_weights(student)))

    @property
    def network(self) -> MoHLlamaForCausalLM:
        """The student's MoH model, below adapters."""
        return self.student.get_base_model() if self._has_adapters else self.student

    @property
    def has_teacher(self) -> bool:
        """Whether the reference's predictions can be computed."""
        within = self._is_base_frozen and self.reference is not None and self.reference.own
        return self.teacher is not None or within

    @property
    def _has_adapters(self) -> bool:
        return hasattr(self.student, "disable_adapter")

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, targets: torch.Tensor, compare: bool = False
    ) -> torch.Tensor | tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Sums over the sequences in training, values per position in scoring.

        Args:
            input_ids, position_ids: `[B, L]`; positions restart with each document.
            targets: ids of the next tokens `[B, L]`, `IGNORED` where there is none.
            compare: score instead of train.

        Returns:
            In training task loss and cross-entropy in nats, the load-balance losses of the sequences,
            the layers' distances to the teacher's (`layer_distance_sum`), the weighted losses of
            experts (`expert_loss_sum`), and the heads that are on (`heads_on_sum`), `[6]`; all but the second and the
            last carry a gradient. With `compare` the
            values of `comparison_values` per position with a target, `[N, 4]` (without a teacher all but
            the first are zero), and the router logits of each layer of all positions, `[B * L, U]`.
        """
        counted = targets != IGNORED
        matching = self.objective.layer_coefficient > 0 and not compare
        inputs = {"input_ids": input_ids, "position_ids": position_ids, "output_hidden_states": matching}
        # The teacher goes first: it may be the same network with other heads on.
        wanted = compare or self.objective.has_teacher
        reference, other_layers = (
            self._reference(inputs, counted) if wanted and self.has_teacher else ((None, None), ())
        )
        # No mask and no cache: with positions that restart, documents do not see one another.
        recorded = {"output_router_logits": True, "output_expert_logits": not compare}
        output = self.network.model(**inputs, use_cache=False, **recorded)
        hidden, head = output.last_hidden_state[counted], self.network.lm_head.weight
        if compare:
            router_logits = tuple(logits.flatten(0, -2) for logits in output.router_logits)
            return comparison_values(hidden, head, targets[counted], *reference), router_logits
        task, cross_entropy = token_losses(hidden, head, targets[counted], *reference, self.objective.temperature)
        balance = balance_loss_sum(output.router_logits, self.network.routers)
        layers = layer_distance_sum(output.hidden_states[1:], other_layers, counted) if matching else 0 * task.detach()
        experts = expert_loss_sum(output.expert_logits, len(input_ids), self.network.config).to(task)
        on = heads_on_sum(output.router_logits, self.network.routers, self.all_heads_on(position_ids))
        return torch.stack([task, cross_entropy, *(part.to(task) for part in (balance, layers, experts, on))])

    def all_heads_on(self, position_ids: torch.Tensor) -> torch.Tensor:
        """Which tokens have all heads on because they are a document's first, bool, given their positions in it."""
        config = self.network.config
        return position_ids < (config.all_heads_until if config.head_fallback == "local" else 0)

    @torch.no_grad()
    def _reference(
        self, inputs: dict[str, Any], counted: torch.Tensor
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]:
        """The reference's last hidden states `[N, C]` and its head `[V, C]`; its layers' outputs, if asked for."""
        with self._as_reference() as network:
            output = network.model(**inputs, use_cache=False)
            layers = output.hidden_states[1:] if inputs["output_hidden_states"] else ()
            return (output.last_hidden_state[counted], network.lm_head.weight.detach()), layers

    @contextlib.contextmanager
    def _as_reference(self) -> Iterator[MoHLlamaForCausalLM]:
        if self.teacher is not None:
            yield self.teacher
            return
        training = self.student.training
        self.student.eval()  # no dropout
        try:
            without = self.student.disable_adapter() if self._has_adapters else contextlib.nullcontext()
            with without, self.network.all_heads_active():
                yield self.network
        finally:
            self.student.train(training)

    def train(self, mode: bool = True) -> "TrainingStep":
        """Set the student's mode; the teacher stays as it is, without dropout."""
        super().train(mode)
        if self.teacher is not None:
            self.teacher.eval()
        return self


def accumulate_gradients(
    accelerator: Accelerator, model: torch.nn.Module, batch: Batch, config: TrainConfig, beta: float
) -> tuple[StepLosses, float]:
    """Add the gradient of one step's loss to the weights, one micro-batch at a time.

    The loss is (sum of token losses and weighted layer distances) / (predicted tokens of the whole
    step) + (``beta`` * sum of the sequences' load-balance losses, and the weighted ones of experts) / (sequences of
    the step), both over all processes, so it depends neither on ``config.data.micro_batch_size`` nor on their number.

    Args:
        accelerator: the one that prepared ``model``.
        model: the prepared `TrainingStep`.
        batch: this process's sequences of the step, `[sequences, L]`.
        config: the recipe.
        beta: weight of the load-balance loss.

    Returns:
        The step's losses, and the norm of its gradient before clipping. Under DeepSpeed the
        weights have then been stepped, too.
    """
    targets = next_token_targets(batch["labels"])
    predicted = (targets != IGNORED).sum().to(accelerator.device)
    tokens = max(1, int(sum_over_processes(accelerator, predicted)))
    sequences = config.data.batch_size
    # Gradients are then summed over micro-batches and processes, not averaged.
    scale = accelerator.gradient_accumulation_steps * accelerator.num_processes
    weight = config.objective.layer_coefficient
    sums = torch.zeros(6, device=accelerator.device)
    for rows in torch.arange(len(targets)).split(config.data.micro_batch_size):
        with accelerator.accumulate(model):
            inputs = (batch["input_ids"][rows], batch["position_ids"][rows], targets[rows])
            found = model(*(tensor.to(accelerator.device) for tensor in inputs))
            task, _, balance, layers, experts, _ = found
            loss = scale * ((task + weight * layers) / tokens + (beta * balance + experts) / sequences)
            # A frozen base has none where all tokens have all heads on, as a document's first have.
            if loss.requires_grad or accelerator.num_processes > 1:
                accelerator.backward(loss)
            positions = sequences * targets.shape[1]
            sums += found.detach() / sums.new_tensor([tokens, tokens, sequences, tokens, sequences, positions])
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        norm = float(model.get_global_grad_norm() or 0.0)
    else:
        norm = clip_gradients(accelerator, model, config.optimizer.max_grad_norm)
    return StepLosses(*sum_over_processes(accelerator, sums).tolist()), norm


class DivergenceWatch:
    """Decides whether a step diverged, and whether too many have.

    Its state is derived from the log, so that a resumed run decides as an uninterrupted one.

    Args:
        config: the recipe's group.
        log: lines of the steps already made.
    """

    def __init__(self, config: DivergenceConfig, log: Iterable[LogLine]):
        self._config = config
        self._in_a_row = 0
        for line in log:
            if line.step > 0:
                self._note(line.dropped)

    def judge(self, step: int, loss: float, gradient_norm: float) -> str | None:
        """The reason to drop the step; None to keep it.

        Raises:
            UserError: the recipe says to stop, or too many steps in a row were dropped.
        """
        reason = None
        if not math.isfinite(loss):
            reason = "the loss is not finite"
        elif not math.isfinite(gradient_norm):
            reason = "the gradient is not finite"
        self._note(reason)
        if reason is None:
            return None
        if self._config.action == "stop":
            raise UserError(
                f"step {step}: {reason}; lower optimizer.learning_rate or set divergence.action to skip or roll_back, "
                "and pass --overwrite; checkpoints are of the steps before"
            )
        if self._in_a_row >= MOST_IN_A_ROW:
            raise UserError(
                f"step {step}: {reason}, and so for {self._in_a_row} steps in a row; lower "
                "optimizer.learning_rate and pass --overwrite"
            )
        return reason

    def _note(self, dropped: str | None) -> None:
        self._in_a_row = 0 if dropped is None else self._in_a_row + 1
