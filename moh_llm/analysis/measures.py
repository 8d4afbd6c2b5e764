"""Measures of a MoH model's heads on text, ready for JSON: head load, routing scores, feature rank, similarity.

Models are measured as they are set: within `model.all_heads_active()` every head is on. Shapes: B batch, T tokens,
H query heads, D head size; N tokens of all batches, W = heads of one kind times head size.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.functional import normalize

from moh_llm.analysis.heads import LayerPass, attention_patterns, last_routed_layer, shared_heads, watch
from moh_llm.devices import float64_device, wide
from moh_llm.errors import UserError
from moh_llm.metrics import Batch
from moh_llm.modeling import MoHLlamaPreTrainedModel

BINS = 20  # of a histogram of scores
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
KINDS = ("shared", "routed", "selected")
_FINE = 10_000  # bins that scores are counted in: quantiles are exact to 1e-4
_ENERGY = 0.99
_ROWS = 4096  # tokens whose features are held in float64 at once

Measures = dict[str, Any]
Advance = Callable[[int], object]


def measure_heads(
    model: MoHLlamaPreTrainedModel, texts: Mapping[str, Iterable[Batch]], advance: Advance = lambda tokens: None
) -> Measures:
    """Head load, routing scores and feature rank on some texts, in one pass over each.

    Returns:
        - `head_load` (Fig. 3): per layer the share of tokens that have each head on, and the shared heads.
        - `head_load_by_text` (Fig. B): the same of the last layer with routed heads, by text.
        - `routing_scores` (Fig. C to E): per layer, and for each of `KINDS`, quantiles and a histogram over tokens and
          heads of the scores g_i in [0, 1] before selection and quantisation. A two-stage router's are those of Eq. 5
          and 6; other routers' are the softmax over the routed heads, through which Eq. 10 sends the gradient, and
          they do not score shared heads. None where there are no scores.
        - `routing_scores_by_text`: the same of the last layer with routed heads, by text.
        - `feature_rank` (a figure of the rebuttal): per layer the rank of shared and of routed heads' features, which
          enter the output projection side by side `[N, W]`. `energy` of the W (`width`) singular values hold 99 % of
          the squared Frobenius norm. A rank is at most N (`tokens`).

    Raises:
        UserError: no layer has routed heads, a text has no tokens, or the heads do not give finite numbers.
    """
    last, routers = last_routed_layer(model), model.routers
    counts, grams = {}, {}
    for name, batches in texts.items():
        counts[name] = text = _Counts(len(routers), routers[0].num_heads)

        def take(seen: LayerPass, text: _Counts = text) -> None:
            if not seen.heads.isfinite().all():
                raise UserError("the model's heads do not give finite numbers; dtype float32 may help")
            text.add(seen)
            _add_features(grams, seen)

        text.tokens = watch(model, batches, take, advance)
    tokens = sum(text.tokens for text in counts.values())
    shared = [shared_heads(router) for router in routers]
    scores = sum(text.scores for text in counts.values())
    return {
        "head_load": {
            "tokens": tokens,
            "load": _shares(sum(text.on for text in counts.values()), tokens),
            "shared_heads": shared,
        },
        "head_load_by_text": {
            "layer": last,
            "shared_heads": shared[last],
            "tokens": {name: text.tokens for name, text in counts.items()},
            "load": {name: _shares(text.on[last], text.tokens) for name, text in counts.items()},
        },
        "routing_scores": {"quantiles": list(QUANTILES), "layers": [_distributions(layer) for layer in scores]},
        "routing_scores_by_text": {
            "layer": last,
            "texts": {name: _distributions(text.scores[last]) for name, text in counts.items()},
        },
        "feature_rank": {"tokens": tokens}
        | {kind: [_rank(grams[kind, layer]) for layer in range(len(routers))] for kind in ("shared", "routed")},
    }


class _Counts:
    """Over the tokens of one text: counts of heads on `[layers, H]` and of scores by bin `[layers, KINDS, bins]`."""

    def __init__(self, layers: int, heads: int) -> None:
        self.tokens = 0
        self.on = torch.zeros(layers, heads, dtype=torch.int64)
        self.scores = torch.zeros(layers, len(KINDS), _FINE, dtype=torch.int64)

    def add(self, seen: LayerPass) -> None:
        self.on[seen.layer] += seen.on.sum((0, 1)).cpu()
        for kind, scores in enumerate(_scores_by_kind(seen)):
            bins = (scores.flatten() * _FINE).long().clamp_max(_FINE - 1)
            self.scores[seen.layer, kind] += torch.bincount(bins, minlength=_FINE).cpu()


def _scores_by_kind(seen: LayerPass) -> list[torch.Tensor]:
    """Scores of each of `KINDS`."""
    # The gate of a router that weights heads and selects all of them is their scores.
    router = copy.copy(seen.router)
    router.router_score, router.top_k, router.num_active = "weighted", router.routed_groups, router.num_heads
    scores = router.forward(*seen.router_inputs)[1]
    shared = shared_heads(router) if router.router_type == "two_stage" else []
    routed = router.routed_heads
    return [scores[..., shared], scores[..., routed], scores[..., routed][seen.on[..., routed]]]


def _distributions(counts: torch.Tensor) -> dict[str, Measures | None]:
    """Quantiles and histogram of each kind from counts `[KINDS, bins]`; a quantile is reached by that share or more."""
    found: dict[str, Measures | None] = {}
    for kind, of_kind in zip(KINDS, counts, strict=True):
        shares = torch.tensor(QUANTILES, dtype=torch.float64) * of_kind.sum()
        bins = torch.searchsorted(of_kind.cumsum(0).double(), shares).double()
        histogram = of_kind.view(BINS, -1).sum(1).tolist()
        found[kind] = {"quantiles": ((bins + 0.5) / _FINE).tolist(), "histogram": histogram} if any(histogram) else None
    return found


def _shares(counts: torch.Tensor, tokens: int) -> Any:
    return (counts.double() / tokens).tolist()


def _add_features(grams: dict[tuple[str, int], torch.Tensor], seen: LayerPass) -> None:
    """Add a batch to the Gram matrices `[W, W]` of each kind and layer, whose size does not grow with the text."""
    for kind, ids in ("shared", shared_heads(seen.router)), ("routed", seen.router.routed_heads):
        features = seen.heads[:, :, ids].flatten(0, 1).flatten(1)
        width, place = features.shape[1], float64_device(features.device)
        gram = grams.setdefault((kind, seen.layer), torch.zeros(width, width, dtype=torch.float64, device=place))
        for rows in features.split(_ROWS):
            rows = wide(rows)
            gram.addmm_(rows.T, rows)


def _rank(gram: torch.Tensor) -> Measures:
    """Rank of features by their Gram matrix `[W, W]`, whose eigenvalues are the squared singular values."""
    reached = torch.linalg.eigvalsh(gram).clamp_min(0).flip(0).cumsum(0)
    if not len(gram) or not reached[-1]:
        return {"width": len(gram), "energy": 0}
    return {"width": len(gram), "energy": int((reached < _ENERGY * reached[-1]).sum()) + 1}


def similarity_table(
    model: MoHLlamaPreTrainedModel, batches: Sequence[Batch], advance: Advance = lambda tokens: None
) -> dict[str, Measures]:
    """Tab. B: `head_similarity` of the model as it is set, "moh", and with all heads on, "all_heads".

    With weighted scores heads keep their factor when all are on, so that later layers do not see quite what a dense
    model's do.
    """
    moh = head_similarity(model, batches, advance)
    with model.all_heads_active():
        return {"moh": moh, "all_heads": head_similarity(model, batches, advance)}


def head_similarity(
    model: MoHLlamaPreTrainedModel, batches: Iterable[Batch], advance: Advance = lambda tokens: None
) -> Measures:
    """How alike the heads of a layer are: per layer and as means over the layers, None where there are no two heads.

    Patterns: 1 - 0.5 * E|A - A'|_1, the mean over pairs of heads and over query positions of all texts; heads that are
    off have a pattern, too. Outputs: the mean cosine between what two heads give to the output projection, over tokens
    and pairs of heads that are both on, so that fallbacks do not count.

    Raises:
        UserError: there are no tokens.
    """
    # Per layer: summed similarity and number of pairs, of patterns and of outputs.
    sums = torch.zeros(len(model.routers), 4, dtype=torch.float64)

    def take(seen: LayerPass) -> None:
        found = [*_compare_patterns(seen.patterns), *_compare_outputs(seen.heads, seen.on)]
        sums[seen.layer] += torch.tensor(found, dtype=torch.float64)

    with attention_patterns(model):
        watch(model, batches, take, advance)
    found: Measures = {}
    for kind, pairs in (("patterns", sums[:, :2]), ("outputs", sums[:, 2:])):
        layers = found[kind] = [total / count if count else None for total, count in pairs.tolist()]
        known = [value for value in layers if value is not None]
        found[f"mean_{kind}"] = sum(known) / len(known) if known else None
    return found


def _compare_patterns(patterns: torch.Tensor) -> tuple[float, float]:
    """Summed similarity of all pairs of rows of attention weights `[B, H, T, T]`, and the number of pairs."""
    texts, heads, length, _ = patterns.shape
    pairs = texts * length * heads * (heads - 1) / 2
    distance = 0.0
    for text in patterns:  # one at a time: their distances need the most memory of all
        rows = text.transpose(0, 1).to(torch.promote_types(text.dtype, torch.float32))  # [T, H, T]
        # Every pair stands in the matrix [H, H] of distances twice.
        distance += float(wide(torch.cdist(rows, rows, p=1)).sum()) / 2
    return pairs - 0.5 * distance, pairs


def _compare_outputs(heads: torch.Tensor, on: torch.Tensor) -> tuple[float, float]:
    """Summed cosine of all pairs of heads `[B, T, H, D]` that are both on `[B, T, H]`, and the number of pairs."""
    units = normalize(heads.to(torch.promote_types(heads.dtype, torch.float32)), dim=-1) * on.unsqueeze(-1)
    # |sum u_i|^2 = sum |u_i|^2 + 2 * the sum over pairs, so pairs need not be formed.
    cosines = wide(units.sum(-2).square()).sum() - wide(units.square().sum(-1)).sum()
    count = wide(on.sum(-1))
    return float(cosines) / 2, float((count * (count - 1)).sum()) / 2
