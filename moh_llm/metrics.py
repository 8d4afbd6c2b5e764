"""How near a model's predictions are to a reference model's, on the same text."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

Batch = dict[str, torch.Tensor]
LogitsOf = Callable[[Batch], torch.Tensor]

_ROWS = 1024  # predictions whose distributions are held in float32 at once


@dataclass(frozen=True)
class Comparison:
    """Means over predicted tokens; `kl` is KL(reference || model) in nats per token."""

    tokens: int
    perplexity: float
    reference_perplexity: float
    kl: float
    top1_agreement: float

    @property
    def perplexity_ratio(self) -> float:
        """Perplexity over the reference's: 1 where nothing was lost."""
        return self.perplexity / self.reference_perplexity


def logits_of(model: torch.nn.Module) -> LogitsOf:
    """The function that gives a causal LM's logits `[B, T, V]` for a batch with isolated documents."""

    def run(batch: Batch) -> torch.Tensor:
        device = next(model.parameters()).device
        ids, positions = batch["input_ids"].to(device), batch["position_ids"].to(device)
        # Documents are isolated by restarting positions, which needs: no mask, no cache.
        return model(input_ids=ids, position_ids=positions, use_cache=False).logits

    return run


@torch.no_grad()
def compare_to_reference(
    candidates: Mapping[str, LogitsOf], reference: LogitsOf, batches: Iterable[Batch]
) -> dict[str, Comparison]:
    """Compare several models with one reference, whose logits are computed once a batch.

    Args:
        candidates: by name, a function from a batch to logits `[B, T, V]`.
        reference: likewise for the reference.
        batches: `input_ids`, `position_ids` and `labels`, each `[B, T]`; the label at t is compared
            with the logits at t - 1, and -100 is not counted.
    """
    totals = {name: torch.zeros(4, dtype=torch.float64) for name in candidates}
    count = 0
    for batch in batches:
        targets = batch["labels"][:, 1:]
        counted = targets != -100
        reference_logits = reference(batch)[:, :-1][counted]
        logits = {name: candidate(batch)[:, :-1][counted] for name, candidate in candidates.items()}
        targets = targets[counted].to(reference_logits.device)
        count += len(targets)
        for rows in torch.arange(len(targets)).split(_ROWS):
            log_q = F.log_softmax(reference_logits[rows].float(), -1)
            for name in candidates:
                totals[name] += _sums(F.log_softmax(logits[name][rows].float(), -1), log_q, targets[rows])
    return {name: _comparison(sums / count, count) for name, sums in totals.items()}


def _sums(log_p: torch.Tensor, log_q: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Summed over rows: cross-entropy of p `[N, V]`, that of q, KL(q || p), equal top-1."""
    values = (
        F.nll_loss(log_p, targets, reduction="sum"),
        F.nll_loss(log_q, targets, reduction="sum"),
        F.kl_div(log_p, log_q, log_target=True, reduction="sum"),
        (log_p.argmax(-1) == log_q.argmax(-1)).sum(),
    )
    return torch.stack([value.double().cpu() for value in values])


def _comparison(means: torch.Tensor, count: int) -> Comparison:
    cross_entropy, reference, kl, agreement = means.tolist()
    return Comparison(count, math.exp(cross_entropy), math.exp(reference), kl, agreement)
