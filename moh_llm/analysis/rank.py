"""Feature rank of shared and of routed heads (a figure of the rebuttal).

Shapes: N tokens of all batches, W = heads of one kind times head size.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from moh_llm.analysis.watch import LayerPass, shared_heads, watch
from moh_llm.metrics import Batch
from moh_llm.modeling import MoHLlamaPreTrainedModel, MoHRouter

ENERGY = 0.99  # share of the squared Frobenius norm that `Rank.energy` asks for
_ROWS = 4096  # tokens whose features are held in float64 at once


@dataclass(frozen=True)
class Rank:
    """Rank of a feature matrix `[N, W]` with singular values s_1 >= s_2 >= ...

    Attributes:
        width: W, the most that either rank can be.
        energy: how many singular values it takes for 99 % of the squared Frobenius norm.
        numerical: how many exceed s_1 * W * eps, eps being float32's, 2**-23. W stands where numpy
            has the larger of N and W, so that the threshold does not grow with the text.
    """

    width: int
    energy: int
    numerical: int


@dataclass(frozen=True)
class FeatureRank:
    """Ranks of each layer's features, and their sums over layers.

    Attributes:
        tokens: N; no rank of a layer can be higher.
        shared: per layer, of the shared heads; all zeros where there are none.
        routed: likewise of the routed heads.
        shared_sum: over layers.
        routed_sum: over layers.
    """

    tokens: int
    shared: list[Rank]
    routed: list[Rank]
    shared_sum: Rank
    routed_sum: Rank


def feature_rank(model: MoHLlamaPreTrainedModel, batches: Iterable[Batch]) -> FeatureRank:
    """Rank of shared and of routed heads' features in each layer (the rebuttal's figure), of the model as it is set.

    Features are what enters the output projection, g_i H_i of Eq. 4, side by side `[N, W]`: a routed
    head that is off gives zeros, or its fallback. Singular values come from the Gram matrix
    `[W, W]` in float64, so that memory does not grow with the text.

    Raises:
        UserError: there are no tokens.
    """
    grams: dict[tuple[int, str], torch.Tensor] = {}

    def take(seen: LayerPass) -> None:
        for kind, ids in _kinds(seen.router).items():
            features, key = seen.heads[:, :, ids].flatten(0, 1).flatten(1), (seen.layer, kind)
            if key not in grams:
                width = features.shape[1]
                grams[key] = features.new_zeros(width, width, dtype=torch.float64)
            for rows in features.split(_ROWS):
                rows = rows.double()
                grams[key].addmm_(rows.T, rows)

    tokens = watch(model, batches, take)
    layers = range(len(model.routers))
    shared = [_rank(grams[layer, "shared"]) for layer in layers]
    routed = [_rank(grams[layer, "routed"]) for layer in layers]
    return FeatureRank(tokens, shared, routed, _sum(shared), _sum(routed))


def _kinds(router: MoHRouter) -> dict[str, list[int]]:
    return {"shared": shared_heads(router), "routed": router.routed_heads}


def _rank(gram: torch.Tensor) -> Rank:
    """Ranks of a matrix whose Gram matrix `[W, W]` this is; its eigenvalues are the squared singular values."""
    width = len(gram)
    squares = torch.linalg.eigvalsh(gram).clamp_min(0).flip(0)
    if not width or not squares[0]:
        return Rank(width, 0, 0)
    reached = squares.cumsum(0)
    return Rank(
        width=width,
        energy=int((reached < ENERGY * reached[-1]).sum()) + 1,
        numerical=int((squares.sqrt() > squares[0].sqrt() * width * torch.finfo(torch.float32).eps).sum()),
    )


def _sum(ranks: Sequence[Rank]) -> Rank:
    return Rank(sum(r.width for r in ranks), sum(r.energy for r in ranks), sum(r.numerical for r in ranks))
