"""How alike the heads of a layer are (Tab. B), and the rank of their features (a figure of the rebuttal).

Shapes: B batch, T tokens, H query heads, D head size; N tokens of all batches, W = heads of one kind times head size.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import normalize

from moh_llm.analysis.watch import LayerPass, attention_patterns, shared_heads, watch
from moh_llm.devices import float64_device, wide
from moh_llm.metrics import Batch
from moh_llm.modeling import MoHLlamaPreTrainedModel

ENERGY = 0.99  # share of the squared Frobenius norm that `Rank.energy` asks for
_ROWS = 4096  # tokens whose features are held in float64 at once


@dataclass(frozen=True)
class HeadSimilarity:
    """Similarity between heads of the same layer, 1 where all are alike; None where there are no two heads.

    Attributes:
        patterns: per layer, of attention patterns, in 0..1.
        outputs: per layer, of head outputs, in -1..1.
        mean_patterns: mean over the layers that have one.
        mean_outputs: likewise.
    """

    patterns: list[float | None]
    outputs: list[float | None]
    mean_patterns: float | None
    mean_outputs: float | None


def similarity_table(model: MoHLlamaPreTrainedModel, batches: Iterable[Batch]) -> dict[str, HeadSimilarity]:
    """Tab. B: similarity of heads in the model as it is set, "moh", and in its dense base, "all_heads".

    The batches are read twice.

    The base is the model with all heads on. With weighted scores heads keep their factor then, so
    that what later layers see is not quite a dense model's.

    Raises:
        UserError: there are no tokens.
    """
    moh = head_similarity(model, batches)
    with model.all_heads_active():
        return {"moh": moh, "all_heads": head_similarity(model, batches)}


def head_similarity(model: MoHLlamaPreTrainedModel, batches: Iterable[Batch]) -> HeadSimilarity:
    """Similarity of attention patterns and of head outputs in each layer, of the model as it is set (Tab. B).

    Patterns: 1 - 0.5 * E|A - A'|_1, the mean over pairs of heads and over query positions of all
    texts. All heads count, whether on or off: a head that is off has a pattern, too, which no
    router has touched. Outputs: the mean cosine between what two heads give to the output
    projection, over tokens and those pairs of which the token has both heads on; fallbacks are
    thereby left out, and a weighted score, a factor, changes no cosine. A document's first token
    attends to itself only and counts like any other. Attention runs on the eager backend meanwhile.

    Raises:
        UserError: there are no tokens.
    """
    # Per layer: summed similarity and number of pairs, of patterns and of outputs.
    sums = torch.zeros(len(model.routers), 4, dtype=torch.float64)

    def take(seen: LayerPass) -> None:
        found = [*_of_patterns(seen.patterns), *_of_outputs(seen.heads, seen.on)]
        sums[seen.layer] += torch.tensor(found, dtype=torch.float64)

    with attention_patterns(model):
        watch(model, batches, take)
    patterns, outputs = _ratios(sums[:, :2]), _ratios(sums[:, 2:])
    return HeadSimilarity(patterns, outputs, _mean(patterns), _mean(outputs))


def _of_patterns(patterns: torch.Tensor) -> tuple[float, float]:
    """Summed similarity of all pairs of rows of attention weights `[B, H, T, T]`, and the number of pairs."""
    texts, heads, length, _ = patterns.shape
    pairs = texts * length * heads * (heads - 1) / 2
    distance = 0.0
    for text in patterns:  # one at a time: they are the largest tensors there are
        rows = text.transpose(0, 1).to(torch.promote_types(text.dtype, torch.float32))  # [T, H, T]
        # Every pair stands in the matrix [H, H] of distances twice.
        distance += float(wide(torch.cdist(rows, rows, p=1)).sum()) / 2
    return pairs - 0.5 * distance, pairs


def _of_outputs(heads: torch.Tensor, on: torch.Tensor) -> tuple[float, float]:
    """Summed cosine of all pairs of heads `[B, T, H, D]` that are both on `[B, T, H]`, and the number of pairs."""
    units = normalize(heads.to(torch.promote_types(heads.dtype, torch.float32)), dim=-1) * on.unsqueeze(-1)
    # |sum u_i|^2 = sum |u_i|^2 + 2 * the sum over pairs, which spares the pairs.
    cosines = wide(units.sum(-2).square()).sum() - wide(units.square().sum(-1)).sum()
    count = wide(on.sum(-1))
    return float(cosines) / 2, float((count * (count - 1)).sum()) / 2


def _ratios(sums: torch.Tensor) -> list[float | None]:
    return [total / pairs if pairs else None for total, pairs in sums.tolist()]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


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
        for kind, ids in ("shared", shared_heads(seen.router)), ("routed", seen.router.routed_heads):
            features, key = seen.heads[:, :, ids].flatten(0, 1).flatten(1), (seen.layer, kind)
            if key not in grams:
                width = features.shape[1]
                place = float64_device(features.device)
                grams[key] = torch.zeros(width, width, dtype=torch.float64, device=place)
            for rows in features.split(_ROWS):
                rows = wide(rows)
                grams[key].addmm_(rows.T, rows)

    tokens = watch(model, batches, take)
    layers = range(len(model.routers))
    shared = [_rank(grams[layer, "shared"]) for layer in layers]
    routed = [_rank(grams[layer, "routed"]) for layer in layers]
    return FeatureRank(tokens, shared, routed, _sum(shared), _sum(routed))


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
    return Rank(*map(sum, zip(*((rank.width, rank.energy, rank.numerical) for rank in ranks), strict=True)))
