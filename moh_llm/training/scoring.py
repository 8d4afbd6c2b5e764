"""Scores on held-out text, in training and of the saved model, and statistics of the routers on that text.

Scores are means over predicted positions, statistics of routers over all positions, as in a conversion.

Shapes: N positions, U routed groups of a layer among which tokens choose (heads or key-value groups).
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from accelerate import Accelerator
from tqdm import tqdm

from moh_llm.devices import float64_device, wide
from moh_llm.flops import distant_keys, share_of_keys
from moh_llm.intervals import SUMMED
from moh_llm.metrics import Batch, Comparison
from moh_llm.records.run import Routing, Scores
from moh_llm.training import networks
from moh_llm.training.budget import distant_keys_read
from moh_llm.training.config import TrainConfig
from moh_llm.training.losses import IGNORED, heads_on_sum, next_token_targets
from moh_llm.training.reference import Reference
from moh_llm.training.step import TrainingStep

Reduce = Callable[[torch.Tensor], torch.Tensor]


class RoutingCounts:
    """Router statistics of a network on some text, accumulated over batches."""

    def __init__(self, group_size: int = 1) -> None:
        self._group_size = group_size  # heads of a routed group
        self._tokens = 0
        self._heads: torch.Tensor | float = 0.0  # sum over tokens of the heads that are on, mean over layers
        self._selected: list[torch.Tensor] = []  # per layer, tokens that select each group, [U]

    def add(self, choices: Sequence[torch.Tensor], heads: torch.Tensor) -> None:
        """Count a batch: the heads that are on, mean over layers, summed over the tokens, and the groups chosen.

        ``choices`` has for each layer what each token selects, bool `[N, U]`; U is 0 where all have the same heads on.
        """
        self._tokens += len(choices[0])
        sums = [wide(choice.sum(0)) for choice in choices]
        self._selected = [a + b for a, b in zip(self._selected, sums, strict=True)] if self._selected else sums
        self._heads = self._heads + heads

    def health(self, reduce: Reduce) -> Routing:
        """Summarise what was counted; ``reduce`` sums a tensor over the processes, each of which counted a part."""
        counted = [self._tokens, float(self._heads)]
        tokens, heads = reduce(torch.tensor(counted, dtype=torch.float64, device=self._selected[0].device))
        load = [(reduce(selected) / tokens).repeat_interleave(self._group_size) for selected in self._selected]
        return Routing(
            heads_read=round(float(heads / tokens), 6),
            load=[[round(share, 6) for share in layer.tolist()] for layer in load],
            dead_heads=[int((layer == 0).sum()) for layer in load],
        )


@torch.no_grad()
def evaluate(
    accelerator: Accelerator | None, model: torch.nn.Module, batches: list[Batch], all_heads: bool = False
) -> tuple[Scores, Routing]:
    """Score held-out sequences with the model's own head budgets, or with all heads on.

    The scores are against the reference if there is one; the health of the routers follows. The processes share the
    sequences; without an accelerator this one scores all of them.
    """
    rank, world = (accelerator.process_index, accelerator.num_processes) if accelerator else (0, 1)
    step = accelerator.unwrap_model(model) if accelerator else model
    step.network.set_active_heads(step.network.config.num_attention_heads if all_heads else None)
    device = next(model.parameters()).device
    # Every process knows all documents, so that their sums only have to be added up.
    documents = 1 + max(int(batch["documents"].max()) for batch in batches)
    sums = torch.zeros(documents, len(SUMMED), dtype=torch.float64, device=float64_device(device))
    counts = RoutingCounts(step.network.config.heads_per_group)
    keys = torch.zeros(2, dtype=torch.float64, device=sums.device)  # distant keys that are read, and all of them
    model.eval()
    hidden = None if rank == 0 else True  # None: on terminals alone
    for first in tqdm(range(0, len(batches), world), "score", unit="batch", leave=False, disable=hidden):
        # Every process takes part in every micro-batch, since some strategies gather weights in each; one that has no
        # batch of its own left counts nothing.
        is_mine = first + rank < len(batches)
        batch, counted = batches[first + rank if is_mine else 0], slice(None if is_mine else 0)
        targets = next_token_targets(batch["labels"])
        inputs = (batch["input_ids"], batch["position_ids"], targets)
        found, router_logits = model(*(tensor.to(device) for tensor in inputs), compare=True)
        found, *router_logits = (values[counted] for values in (found, *router_logits))
        own = batch["documents"][targets != IGNORED][counted].to(sums.device)
        sums.index_add_(0, own, torch.cat([torch.ones_like(found[:, :1]), found], 1))
        positions, routers = batch["position_ids"].flatten()[counted].to(device), step.network.routers
        distant = distant_keys(step.network.config, positions)
        keys += wide(torch.stack([distant_keys_read(router_logits, routers, distant)[0], distant.sum()]))
        heads = wide(heads_on_sum(router_logits, routers, step.all_heads_on(positions))) / max(1, len(routers))
        choices = []
        for logits, router in zip(router_logits, routers, strict=True):
            chooses = router.router_type == "threshold" or 0 < router.top_k < router.routed_groups
            # Where the same heads are on for all tokens, none chooses.
            choices.append(router.select(logits).bool()[:, : None if chooses else 0])
        counts.add(choices, heads)
    model.train()
    reduce: Reduce = accelerator.reduce if accelerator else lambda tensor: tensor
    sums, keys = reduce(sums), reduce(keys)
    found = Comparison(sums[sums[:, 0] > 0].cpu().numpy())
    scores = Scores(tokens=found.tokens, documents=found.documents, perplexity=found.perplexity)
    if step.network.config.router_type == "threshold" and keys[1]:
        share, length = float(keys[0] / keys[1]), batches[0]["input_ids"].shape[1]
        scores.keys_read = round(share_of_keys(step.network.config, share, length), 6)
    if step.has_teacher:
        scores.reference, scores.reference_perplexity = step.reference.kind, found.reference_perplexity
        scores.kl, scores.top1_agreement = found.kl, found.top1_agreement
        scores.ratio_interval, scores.kl_interval = found.ratio_interval, found.kl_interval
    return scores, counts.health(reduce)


def score_saved(
    config: TrainConfig, folder: Path, device: torch.device, batches: list[Batch], reference: Reference | None
) -> Scores:
    """Score a saved model from disk against the reference, both in the reference's dtype.

    Without a reference there is only perplexity. With one, ``all_heads_kl`` is the KL with all heads on.
    """
    dtype = networks.reference_dtype(config)
    other = None if reference is None else networks.load_reference(config, reference, device)
    step = TrainingStep(networks.load_network(folder, dtype).to(device), other, config.objective, reference)
    scores, routing = evaluate(None, step, batches)
    scores.dtype, scores.heads_read = str(dtype).removeprefix("torch."), routing.heads_read
    if reference is not None:
        scores.all_heads_kl = evaluate(None, step, batches, all_heads=True)[0].kl
    return scores
