"""Distributions of routing scores before quantisation (Fig. C to E)."""

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from moh_llm.analysis.watch import LayerPass, shared_heads, watch
from moh_llm.devices import wide
from moh_llm.metrics import Batch
from moh_llm.modeling import MoHLlamaPreTrainedModel

BINS = 100  # of the histogram
_FINE = 100  # parts of a bin, to read quantiles from
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True)
class ScoreDistribution:
    """Scores in [0, 1] of some heads of a layer, over tokens and heads.

    Attributes:
        count: number of scores.
        mean: of the scores.
        quantiles: at `QUANTILES`: the smallest score that at least such a share does not exceed, to 1e-4.
        histogram: number of scores in each of `BINS` bins of equal width; the last includes 1.
    """

    count: int
    mean: float
    quantiles: list[float]
    histogram: list[int]


@dataclass(frozen=True)
class LayerScores:
    """Score distributions of one layer; None where there are no such scores.

    Attributes:
        shared: of the shared heads; only a two-stage router scores them.
        routed: of all routed heads.
        selected: of the routed heads that are on.
    """

    shared: ScoreDistribution | None
    routed: ScoreDistribution | None
    selected: ScoreDistribution | None


def routing_scores(model: MoHLlamaPreTrainedModel, batches: Iterable[Batch]) -> list[LayerScores]:
    """Distribution of the real-valued scores g_i in each layer.

    A two-stage router's are those of Eq. 5 and 6, of a routed head whether it is selected or not;
    the other routers' are the softmax over the routed heads, through which Eq. 10 sends the gradient.
    Heads that are routed as one have the same score, that of their group.

    Raises:
        UserError: there are no tokens.
    """
    routers = model.routers
    found = [{kind: _Histogram() for kind in ("shared", "routed", "selected")} for _ in routers]

    def take(seen: LayerPass) -> None:
        scores, on = real_scores(seen), seen.on
        shared, routed = shared_heads(seen.router), seen.router.routed_heads
        histograms = found[seen.layer]
        if seen.router.router_type == "two_stage":
            histograms["shared"].add(scores[..., shared])
        histograms["routed"].add(scores[..., routed])
        histograms["selected"].add(scores[..., routed][on[..., routed]])

    watch(model, batches, take)
    return [LayerScores(**{kind: histogram.distribution() for kind, histogram in layer.items()}) for layer in found]


def real_scores(seen: LayerPass) -> torch.Tensor:
    """Scores of all heads `[B, T, H]` before selection and quantisation; 1 for shared heads without a score."""
    # They are the gate of this router if it were to weight heads, and to select them all.
    router = copy.copy(seen.router)
    router.router_score, router.top_k, router.num_active = "weighted", router.routed_groups, router.num_heads
    return router.forward(*seen.router_inputs)[1]


@dataclass
class _Histogram:
    counts: torch.Tensor = field(default_factory=lambda: torch.zeros(BINS * _FINE, dtype=torch.int64))
    total: float = 0.0

    def add(self, scores: torch.Tensor) -> None:
        bins = (scores.flatten() * (BINS * _FINE)).long().clamp_max(BINS * _FINE - 1)
        self.counts += torch.bincount(bins, minlength=BINS * _FINE).cpu()
        self.total += float(wide(scores).sum())

    def distribution(self) -> ScoreDistribution | None:
        count = int(self.counts.sum())
        if not count:
            return None
        reached = torch.searchsorted(
            self.counts.cumsum(0).double(), count * torch.tensor(QUANTILES, dtype=torch.float64)
        )
        return ScoreDistribution(
            count=count,
            mean=self.total / count,
            quantiles=((reached.double() + 0.5) / (BINS * _FINE)).tolist(),
            histogram=self.counts.view(BINS, _FINE).sum(1).tolist(),
        )
