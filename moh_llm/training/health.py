"""Router health on held-out text: how the routed heads of each layer share the tokens.

Shapes: N predicted positions, U routed groups of a layer (heads or groups; 0 where all are shared).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from moh_llm.modeling.routing_moh import select_top_k

Reduce = Callable[[torch.Tensor], torch.Tensor]


class RoutingCounts:
    """What the routers of a network did on some text, a batch at a time.

    Args:
        group_size: heads of a routed group.
    """

    def __init__(self, group_size: int = 1) -> None:
        self._group_size = group_size
        self._tokens = 0
        self._selected: list[torch.Tensor] = []  # per layer, tokens that select each group, [U]
        self._scores: list[torch.Tensor] = []  # per layer, sums of softmax scores, [U]
        self._choices: list[list[torch.Tensor]] = []  # per batch and layer, which each token selects, bool [N, U]

    def add(self, router_logits: Sequence[torch.Tensor], top_k: Sequence[int]) -> None:
        """Count a batch.

        Args:
            router_logits: per layer `[N, U]`.
            top_k: per layer, how many routed groups a token selects.
        """
        choices = [select_top_k(logits, k).bool() for logits, k in zip(router_logits, top_k, strict=True)]
        selected = [choice.sum(0).double() for choice in choices]
        scores = [logits.softmax(-1).sum(0).double() for logits in router_logits]
        self._tokens += len(router_logits[0])
        self._selected = _added(self._selected, selected)
        self._scores = _added(self._scores, scores)
        self._choices.append([choice.cpu() for choice in choices])

    def health(self, start: "RoutingCounts | None", reduce: Reduce) -> dict[str, Any]:
        """Each layer's load, entropy, dead heads and changes.

        Args:
            start: counts of the same text, in the same batches, by the network that training began with.
            reduce: sums a tensor over the processes, each of which counted a part of the text.

        Returns:
            Lists over layers: ``load``, the share of tokens that select each routed head;
            ``entropy`` of the mean softmax score, over its maximum, log U (None below 2 groups);
            ``dead_heads``, how many no token selects; ``changed``, the share of tokens whose
            heads are not those of the start (None without one).
        """
        device = self._selected[0].device
        tokens = reduce(torch.tensor(self._tokens, dtype=torch.float64, device=device))
        load = [(reduce(selected) / tokens).repeat_interleave(self._group_size) for selected in self._selected]
        changed: list[float] | None = None
        if start is not None:
            moved = [self._moved(start, layer) for layer in range(len(load))]
            shares = reduce(torch.tensor(moved, dtype=torch.float64, device=device)) / tokens
            changed = [round(share, 6) for share in shares.tolist()]
        return {
            "load": [[round(share, 6) for share in layer.tolist()] for layer in load],
            "entropy": [_entropy(reduce(scores) / tokens) for scores in self._scores],
            "dead_heads": [int((layer == 0).sum()) for layer in load],
            "changed": changed,
        }

    def _moved(self, start: "RoutingCounts", layer: int) -> int:
        pairs = zip(self._choices, start._choices, strict=True)
        return sum(int((mine[layer] != other[layer]).any(-1).sum()) for mine, other in pairs)


def _added(sums: list[torch.Tensor], more: list[torch.Tensor]) -> list[torch.Tensor]:
    return [mine + other for mine, other in zip(sums, more, strict=True)] if sums else more


def _entropy(mean_scores: torch.Tensor) -> float | None:
    if len(mean_scores) < 2:
        return None
    return round(float(torch.special.entr(mean_scores).sum()) / math.log(len(mean_scores)), 6)
