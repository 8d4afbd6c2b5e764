"""What one forward pass of training computes, as a module: what is distributed over processes is this.

Everything that touches a weight happens inside `forward`, student and teacher, so that each way of
distributing (DDP, ZeRO, FSDP2) finds its weights where its hooks look for them.

Shapes: B blocks, L positions, C hidden size, N positions with a target, U routed groups of a layer.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from moh_llm.modeling import MoHLlamaForCausalLM
from moh_llm.training.beginning import Reference
from moh_llm.training.config import ObjectiveConfig
from moh_llm.training.objectives import IGNORED, balance_loss_sum, layer_distance_sum
from moh_llm.training.token_losses import comparison_values, token_losses


class TrainingStep(nn.Module):
    """The student's losses on some blocks, against the text or against its teacher.

    Args:
        student: a MoH model, or one with adapters (peft).
        teacher: the reference, frozen.
        objective: which loss.
        reference: what the student is compared with. Where it is the model that the run began with, all heads on, a
            student with adapters needs no teacher: without them and with all heads on it is the reference, at no
            memory.
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

    @property
    def network(self) -> MoHLlamaForCausalLM:
        """The student's MoH model, below adapters."""
        return self.student.get_base_model() if self._has_adapters else self.student

    @property
    def has_teacher(self) -> bool:
        """Whether the reference is at hand."""
        within = self._has_adapters and self.reference is not None and self.reference.own
        return self.teacher is not None or within

    @property
    def _has_adapters(self) -> bool:
        return hasattr(self.student, "disable_adapter")

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, targets: torch.Tensor, compare: bool = False
    ) -> torch.Tensor | tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Sums over the blocks in training, values per position in scoring.

        Args:
            input_ids, position_ids: `[B, L]`; positions restart with each document.
            targets: ids of the next tokens `[B, L]`, `IGNORED` where there is none.
            compare: score instead of train.

        Returns:
            In training task loss and cross-entropy in nats, the load-balance losses of the blocks,
            and the layers' distances to the teacher's (`layer_distance_sum`), `[4]`; all but the
            second carry a gradient. With `compare` the values of `comparison_values` per position
            with a target, `[N, 4]` (without a teacher all but the first are zero), and the router
            logits of each layer, `[N, U]`.
        """
        counted = targets != IGNORED
        matching = self.objective.layer_coefficient > 0 and not compare
        inputs = {"input_ids": input_ids, "position_ids": position_ids, "output_hidden_states": matching}
        # The teacher goes first: it may be the same network with other heads on.
        wanted = compare or self.objective.kind == "distillation"
        reference, other_layers = (
            self._reference(inputs, counted) if wanted and self.has_teacher else ((None, None), ())
        )
        # No mask and no cache: with positions that restart, documents do not see one another.
        output = self.network.model(**inputs, use_cache=False, output_router_logits=True)
        hidden, head = output.last_hidden_state[counted], self.network.lm_head.weight
        if compare:
            router_logits = tuple(logits[counted] for logits in output.router_logits)
            return comparison_values(hidden, head, targets[counted], *reference), router_logits
        task, cross_entropy = token_losses(hidden, head, targets[counted], *reference, self.objective.temperature)
        balance = balance_loss_sum(output.router_logits, self.network.routers)
        layers = layer_distance_sum(output.hidden_states[1:], other_layers, counted) if matching else 0 * task.detach()
        return torch.stack([task, cross_entropy, balance.to(task.dtype), layers.to(task.dtype)])

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
            with self.student.disable_adapter(), self.network.all_heads_active():
                yield self.network
        finally:
            self.student.train(training)

    def train(self, mode: bool = True) -> "TrainingStep":
        """Set the student's mode; the teacher stays as it is, without dropout."""
        super().train(mode)
        if self.teacher is not None:
            self.teacher.eval()
        return self
