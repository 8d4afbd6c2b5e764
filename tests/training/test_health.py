"""Router health against loops over tokens and heads."""

import torch

from moh_llm.modeling.routing_moh import select_top_k
from moh_llm.training.scoring import RoutingCounts

TOP_K = [1, 2, 0, 0]
ALL_ON = torch.tensor([True, True, False, False, False, False, False])


def some_logits(seed: int) -> list[torch.Tensor]:
    """Four layers: 3 routed heads, 4, 2 of which none is ever on, and none."""
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(7, heads, generator=draw) * torch.arange(1, heads + 1) for heads in (3, 4, 2, 0)]


def add(counts: RoutingCounts, logits: list[torch.Tensor]) -> None:
    chosen = [select_top_k(layer, k).bool() for layer, k in zip(logits, TOP_K, strict=True)]
    counts.add(logits, chosen, torch.tensor(2.5 * len(logits[0])), ALL_ON[: len(logits[0])])


def test_groups_are_shown_as_their_heads() -> None:
    counts, by_group = RoutingCounts(), RoutingCounts(group_size=3)
    for one in (counts, by_group):
        add(one, some_logits(0))
    of_groups, found = (one.health(None, lambda tensor: tensor) for one in (counts, by_group))
    assert found.load == [[share for share in layer for _ in range(3)] for layer in of_groups.load]
    assert found.dead_heads == [3 * dead for dead in of_groups.dead_heads]
    assert found.entropy == of_groups.entropy
