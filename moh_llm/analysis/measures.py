"""Measures of a MoH model's heads on text, ready for JSON: head load and similarity.

Models are measured as they are set: within `model.all_heads_active()` every head is on. Shapes: B batch, T tokens,
H query heads, D head size.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.functional import normalize

from moh_llm.analysis.heads import LayerPass, attention_patterns, last_routed_layer, shared_heads, watch
from moh_llm.devices import wide
from moh_llm.errors import UserError
from moh_llm.metrics import Batch
from moh_llm.modeling import MoHLlamaPreTrainedModel

Measures = dict[str, Any]
Advance = Callable[[int], object]


def measure_heads(
    model: MoHLlamaPreTrainedModel, texts: Mapping[str, Iterable[Batch]], advance: Advance = lambda tokens: None
) -> Measures:
    """Head load on some texts, in one pass over each.

    Returns:
        - `head_load` (Fig. 3): per layer the share of tokens that have each head on, and the shared heads.
        - `head_load_by_text` (Fig. B): the same of the last layer with routed heads, by text.

    Raises:
        UserError: no layer has routed heads, a text has no tokens, or the heads do not give finite numbers.
    """
    last, routers = last_routed_layer(model), model.routers
    tokens: dict[str, int] = {}
    counts = {name: torch.zeros(len(routers), routers[0].num_heads, dtype=torch.int64) for name in texts}
    for name, batches in texts.items():

        def take(seen: LayerPass, count: torch.Tensor = counts[name]) -> None:
            if not seen.heads.isfinite().all():
                raise UserError("the model's heads do not give finite numbers; dtype float32 may help")
            count[seen.layer] += seen.on.sum((0, 1)).cpu()

        tokens[name] = watch(model, batches, take, advance)
    shared = [shared_heads(router) for router in routers]
    total = sum(tokens.values())
    return {
        "head_load": {"tokens": total, "load": _shares(sum(counts.values()), total), "shared_heads": shared},
        "head_load_by_text": {
            "layer": last,
            "shared_heads": shared[last],
            "tokens": tokens,
            "load": {name: _shares(count[last], tokens[name]) for name, count in counts.items()},
        },
    }


def _shares(counts: torch.Tensor, tokens: int) -> Any:
    return (counts.double() / tokens).tolist()


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
