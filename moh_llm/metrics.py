"""Distance of a model's predictions to a reference model's on the same text, with confidence intervals."""

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from moh_llm.devices import wide
from moh_llm.intervals import SUMMED, Interval, interval, kls, perplexity_ratios

Batch = dict[str, torch.Tensor]
LogitsOf = Callable[[Batch], torch.Tensor]
_ROWS = 1024  # predictions whose distributions are held in float32 at once


@dataclass(eq=False)
class Comparison:
    """Means over predicted tokens, and 95 % intervals over documents.

    Attributes:
        sums: float64 `[D, 5]`, the sums of `SUMMED` for each document that has a predicted token.
        parts: comparisons at some positions in a document: from each key up to the next one.
        documents, tokens: number of documents with a predicted token, and of predicted tokens.
        perplexity, reference_perplexity, perplexity_ratio: of the model, of the reference, and their quotient.
        kl: KL(reference || model) in nats per token.
        top1_agreement: share of the predictions whose most likely token is the reference's.
        ratio_interval, kl_interval: None for fewer than `moh_llm.intervals.LEAST` documents.
    """

    sums: np.ndarray = field(repr=False)
    parts: dict[int, "Comparison"] = field(default_factory=dict)

    def __post_init__(self) -> None:
        total = self.sums.sum(0)
        self.documents, self.tokens = len(self.sums), int(total[0])
        entropy, reference_entropy, self.kl, self.top1_agreement = (total[1:] / total[0]).tolist()
        self.perplexity, self.reference_perplexity = math.exp(entropy), math.exp(reference_entropy)
        self.perplexity_ratio = self.perplexity / self.reference_perplexity
        self.ratio_interval: Interval | None = interval([self.sums], perplexity_ratios)
        self.kl_interval: Interval | None = interval([self.sums], kls)

    def figures(self) -> dict[str, Any]:
        """The figures that records keep."""
        names = ("perplexity", "perplexity_ratio", "ratio_interval", "kl", "kl_interval", "top1_agreement")
        return {name: getattr(self, name) for name in names}


def logits_of(model: torch.nn.Module) -> LogitsOf:
    """A function from a batch to the logits `[B, T, V]` of a causal LM, with isolated documents."""

    def run(batch: Batch) -> torch.Tensor:
        device = next(model.parameters()).device
        ids, positions = batch["input_ids"].to(device), batch["position_ids"].to(device)
        # transformers isolates documents whose positions restart, if there is no mask and no cache.
        return model(input_ids=ids, position_ids=positions, use_cache=False).logits

    return run


@torch.no_grad()
def compare_to_reference(
    candidates: Mapping[str, LogitsOf], reference: LogitsOf, batches: Iterable[Batch], edges: Sequence[int] = ()
) -> dict[str, Comparison]:
    """Compare several models with one reference, whose logits are computed once per batch.

    Args:
        candidates: by name, a function from a batch to logits `[B, T, V]`.
        reference: the same for the reference.
        batches: `input_ids`, `position_ids`, `labels` and `documents`, each `[B, T]`; the label at t is compared with
            the logits at t - 1, and -100 is not counted. `documents` numbers the documents.
        edges: ascending positions in a document at which the `parts` of a comparison begin.
    """
    values: dict[str, list[torch.Tensor]] = {name: [] for name in candidates}
    documents: list[torch.Tensor] = []
    positions: list[torch.Tensor] = []
    for batch in batches:
        targets = batch["labels"][:, 1:]
        counted = targets != -100
        documents.append(batch["documents"][:, 1:][counted])
        if edges:
            positions.append(batch["position_ids"][:, :-1][counted])
        reference_logits = reference(batch)[:, :-1][counted]
        logits = {name: candidate(batch)[:, :-1][counted] for name, candidate in candidates.items()}
        targets = targets[counted].to(reference_logits.device)
        for rows in torch.arange(len(targets)).split(_ROWS):
            log_q = F.log_softmax(reference_logits[rows].float(), -1)
            for name in candidates:
                log_p = F.log_softmax(logits[name][rows].float(), -1)
                values[name].append(compare_predictions(log_p, log_q, targets[rows]))
    found = {}
    for name, parts in values.items():
        rows, numbers, by_position = torch.cat(parts), torch.cat(documents), {}
        for low, high in pairwise([*edges, sys.maxsize]):
            within = (torch.cat(positions) >= low) & (torch.cat(positions) < high)
            if within.any():
                by_position[low] = Comparison(sums_by_document(rows[within.to(rows.device)], [numbers[within]]))
        found[name] = Comparison(sums_by_document(rows, documents), by_position)
    return found


def sums_by_document(values: torch.Tensor, documents: Sequence[torch.Tensor]) -> np.ndarray:
    """The sums of `SUMMED` by document, `[D, 5]`, from `values` `[N, 4]` and document number of each prediction."""
    _, numbers = torch.cat(list(documents)).unique(return_inverse=True)
    sums = torch.zeros(int(numbers.max()) + 1 if len(numbers) else 0, len(SUMMED), dtype=torch.float64)
    counted = torch.cat([values.new_ones(len(values), 1), values], 1)
    return sums.index_add_(0, numbers, counted.cpu().double()).numpy()


def compare_predictions(log_p: torch.Tensor, log_q: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of p `[N, V]` and of q, KL(q || p), and whether the top-1 is equal, by row: float64 `[N, 4]`."""
    values = (
        F.nll_loss(log_p, targets, reduction="none"),
        F.nll_loss(log_q, targets, reduction="none"),
        F.kl_div(log_p, log_q, log_target=True, reduction="none").sum(-1),
        (log_p.argmax(-1) == log_q.argmax(-1)),
    )
    return torch.stack([wide(value) for value in values], -1)
