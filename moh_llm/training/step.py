"""One training step: the losses of a micro-batch, the gradient of a step, and scores on held-out text.

`TrainingStep` is the module that is distributed over processes. Everything that touches a weight happens inside its
`forward`, student and teacher, so that each strategy (DDP, ZeRO, FSDP2) finds its weights where its hooks look for
them.

Shapes: B sequences, L positions, C hidden size, N positions with a target, U routed groups of a layer.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn

from moh_llm.intervals import SUMMED
from moh_llm.metrics import Batch, Comparison
from moh_llm.modeling import MoHLlamaForCausalLM
from moh_llm.training import networks
from moh_llm.training.config import ObjectiveConfig, TrainConfig
from moh_llm.training.health import RoutingCounts
from moh_llm.training.losses import (
    IGNORED,
    StepLosses,
    balance_loss_sum,
    comparison_values,
    layer_distance_sum,
    next_token_targets,
    token_losses,
)
from moh_llm.training.parallel import clip_gradients, deepspeed_norm, loss_scale, sum_over_processes
from moh_llm.training.reference import Reference


class TrainingStep(nn.Module):
    """The student's losses on some sequences, against the text or against its teacher.

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
        """Sums over the sequences in training, values per position in scoring.

        Args:
            input_ids, position_ids: `[B, L]`; positions restart with each document.
            targets: ids of the next tokens `[B, L]`, `IGNORED` where there is none.
            compare: score instead of train.

        Returns:
            In training task loss and cross-entropy in nats, the load-balance losses of the sequences,
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


def accumulate_gradients(
    accelerator: Accelerator, model: torch.nn.Module, batch: Batch, config: TrainConfig, beta: float
) -> tuple[StepLosses, float]:
    """Add the gradient of one step's loss to the weights, one micro-batch at a time.

    The loss is (sum of token losses and weighted layer distances) / (predicted tokens of the whole
    step) + ``beta`` * (sum of the sequences' load-balance losses) / (sequences of the step), both over all
    processes, so it depends neither on ``config.data.micro_batch_size`` nor on their number.

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
    sequences, scale = config.data.batch_size, loss_scale(accelerator)
    weight = config.objective.layer_coefficient
    sums = torch.zeros(4, device=accelerator.device)
    for rows in torch.arange(len(targets)).split(config.data.micro_batch_size):
        with accelerator.accumulate(model):
            inputs = (batch["input_ids"][rows], batch["position_ids"][rows], targets[rows])
            found = model(*(tensor.to(accelerator.device) for tensor in inputs))
            task, _, balance, layers = found
            accelerator.backward(scale * ((task + weight * layers) / tokens + beta * balance / sequences))
            sums += found.detach() / sums.new_tensor([tokens, tokens, sequences, tokens])
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        norm = deepspeed_norm(model)
    else:
        norm = clip_gradients(accelerator, model, config.optimizer.max_grad_norm)
    return StepLosses(*sum_over_processes(accelerator, sums).tolist()), norm


@torch.no_grad()
def evaluate(
    accelerator: Accelerator | None, model: torch.nn.Module, batches: list[Batch], all_heads: bool = False
) -> tuple[dict[str, Any], RoutingCounts]:
    """Score held-out sequences with the model's own head budgets, or with all heads on.

    The processes share the sequences; without an accelerator this one scores all of them.

    Returns:
        Perplexity, the numbers of tokens and documents and, where the reference is at hand, which one it is, its
        perplexity, KL to it in nats per token, equal top-1, and 95 % intervals over documents (None for one document)
        of KL and of the ratio of perplexities; and what the routers did on this process's part.
    """
    rank, world = (accelerator.process_index, accelerator.num_processes) if accelerator else (0, 1)
    step = accelerator.unwrap_model(model) if accelerator else model
    step.network.set_active_heads(step.network.config.num_attention_heads if all_heads else None)
    top_k = [router.top_k for router in step.network.routers]
    device = next(model.parameters()).device
    mine = range(rank, len(batches), world)
    rounds = -(-len(batches) // world)
    # Every process knows all documents, so that their sums only have to be added up.
    documents = 1 + max(int(batch["documents"].max()) for batch in batches)
    sums = torch.zeros(documents, len(SUMMED), dtype=torch.float64, device=device)
    routing = RoutingCounts(step.network.config.heads_per_group)
    model.eval()
    for number in range(rounds):
        # Every process takes part in every micro-batch: some strategies gather weights in each.
        batch = batches[mine[number] if number < len(mine) else 0]
        targets = next_token_targets(batch["labels"])
        inputs = (batch["input_ids"], batch["position_ids"], targets)
        found, router_logits = model(*(tensor.to(device) for tensor in inputs), compare=True)
        counts = number < len(mine)
        if counts:
            own = batch["documents"][targets != IGNORED].to(device)
            sums.index_add_(0, own, torch.cat([torch.ones_like(found[:, :1]), found], 1))
        routing.add([logits if counts else logits[:0] for logits in router_logits], top_k)
    model.train()
    sums = sum_over_processes(accelerator, sums) if accelerator else sums
    found = Comparison(sums[sums[:, 0] > 0].cpu().numpy())
    scores: dict[str, Any] = {"tokens": found.tokens, "documents": found.documents, "perplexity": found.perplexity}
    if step.has_teacher:
        figures = found.figures()
        del figures["perplexity_ratio"]
        scores |= {"reference": step.reference.kind, "reference_perplexity": found.reference_perplexity} | figures
    return scores, routing


def measure_floor(accelerator: Accelerator, model: torch.nn.Module, batches: list[Batch]) -> float | None:
    """KL of the untrained student with all heads on to its reference, on held-out sequences, in nats per token.

    Student and reference then have the same dense weights, so this is what their precisions alone leave (under mixed
    precision the student's residual stream is float32, the reference's bfloat16): no KL of the run means less.
    None where the reference is not at hand, and where the student begins with other dense weights, as a model tuned
    before does against its base: its KL with all heads on is no floor.
    """
    step = accelerator.unwrap_model(model)
    if not (step.has_teacher and step.reference.own):
        return None
    return evaluate(accelerator, model, batches, all_heads=True)[0]["kl"]


def score_saved(
    config: TrainConfig, folder: Path, device: torch.device, batches: list[Batch], reference: Reference | None
) -> dict[str, Any]:
    """Score a saved model, as it stands on disk, against the reference, both in the reference's dtype.

    Without a reference only perplexity is given, else also, under ``all_heads``, how far the saved model with all
    heads on is from it.
    """
    dtype = networks.reference_dtype(config)
    other = None if reference is None else networks.load_reference(config, reference, device)
    saved = networks.load_network(folder, dtype).to(device)
    step = TrainingStep(saved, other, config.objective, reference)
    scores = evaluate(None, step, batches)[0] | {"dtype": str(dtype).removeprefix("torch.")}
    if reference is not None:
        dense = evaluate(None, step, batches, all_heads=True)[0]
        scores["all_heads"] = {key: dense[key] for key in ("perplexity", "kl", "kl_interval", "top1_agreement")}
    return scores
