"""Router health against loops over tokens and heads."""

import torch

from moh_llm.modeling.routing_moh import select_top_k
from moh_llm.training.scoring import RoutingCounts


def test_groups_are_shown_as_their_heads() -> None:
    """Of four layers with 3 routed groups, 4, 2 of which none is ever on, and none."""
    draw = torch.Generator().manual_seed(0)
    logits = [torch.randn(7, count, generator=draw) * torch.arange(1, count + 1) for count in (3, 4, 2, 0)]
    chosen = [select_top_k(layer, k).bool() for layer, k in zip(logits, (1, 2, 0, 0), strict=True)]
    counts, by_group = RoutingCounts(), RoutingCounts(group_size=3)
    for one in (counts, by_group):
        one.add(chosen, torch.tensor(2.5 * 7))
    of_groups, found = (one.health(lambda tensor: tensor) for one in (counts, by_group))
    assert found.load == [[share for share in layer for _ in range(3)] for layer in of_groups.load]
    assert found.dead_heads == [3 * dead for dead in of_groups.dead_heads]
