"""Forward and backward passes of a step, and passes that score, over all processes."""

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType

from moh_llm.intervals import SUMMED
from moh_llm.metrics import Batch, Comparison
from moh_llm.training import networks
from moh_llm.training.beginning import Reference
from moh_llm.training.config import TrainConfig
from moh_llm.training.health import RoutingCounts
from moh_llm.training.objectives import IGNORED, StepLosses, next_token_targets
from moh_llm.training.parallel import clip_gradients, deepspeed_norm, loss_scale, sum_over_processes
from moh_llm.training.step import TrainingStep


def accumulate_gradients(
    accelerator: Accelerator, model: torch.nn.Module, batch: Batch, config: TrainConfig, beta: float
) -> tuple[StepLosses, float]:
    """Add the gradient of one step's loss to the weights, one forward pass at a time.

    The loss is (sum of token losses and weighted layer distances) / (predicted tokens of the whole
    step) + ``beta`` * (sum of the blocks' load-balance losses) / (blocks of the step), both over all
    processes, so it depends neither on ``config.data.micro_batch_size`` nor on their number.

    Args:
        accelerator: the one that prepared ``model``.
        model: the prepared `TrainingStep`.
        batch: this process's blocks of the step, `[blocks, L]`.
        config: the recipe.
        beta: weight of the load-balance loss.

    Returns:
        The step's losses, and the norm of its gradient before clipping. Under DeepSpeed the
        weights have then been stepped, too.
    """
    targets = next_token_targets(batch["labels"])
    predicted = (targets != IGNORED).sum().to(accelerator.device)
    tokens = max(1, int(sum_over_processes(accelerator, predicted)))
    blocks, scale = config.data.batch_size, loss_scale(accelerator)
    weight = config.objective.layer_coefficient
    sums = torch.zeros(4, device=accelerator.device)
    for rows in torch.arange(len(targets)).split(config.data.micro_batch_size):
        with accelerator.accumulate(model):
            inputs = (batch["input_ids"][rows], batch["position_ids"][rows], targets[rows])
            found = model(*(tensor.to(accelerator.device) for tensor in inputs))
            task, _, balance, layers = found
            accelerator.backward(scale * ((task + weight * layers) / tokens + beta * balance / blocks))
            sums += found.detach() / sums.new_tensor([tokens, tokens, blocks, tokens])
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        norm = deepspeed_norm(model)
    else:
        norm = clip_gradients(accelerator, model, config.optimizer.max_gradient_norm)
    return StepLosses(*sum_over_processes(accelerator, sums).tolist()), norm


@torch.no_grad()
def evaluate(
    accelerator: Accelerator | None, model: torch.nn.Module, batches: list[Batch], all_heads: bool = False
) -> tuple[dict[str, Any], RoutingCounts]:
    """Score held-out blocks with the model's own head budgets, or with all heads on.

    The processes share the blocks; without an accelerator this one scores all of them.

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
        # Every process takes part in every pass: some ways of distributing gather weights in each.
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
    """KL of the untrained student with all heads on to its reference, on held-out blocks, in nats per token.

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
