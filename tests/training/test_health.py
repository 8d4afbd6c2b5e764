"""Router health against loops over tokens and heads."""

import math

import pytest
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


def choices(logits: torch.Tensor, k: int) -> list[set[int]]:
    rows = logits.tolist()
    return [set(sorted(range(len(row)), key=lambda head: -row[head])[:k]) for row in rows]


def test_load_entropy_and_dead_heads_are_those_of_a_loop() -> None:
    counts, batches = RoutingCounts(), [some_logits(0), some_logits(1)]
    for batch in batches:
        add(counts, batch)
    found = counts.health(None, lambda tensor: tensor)
    for layer, k in enumerate(TOP_K):
        logits = torch.cat([batch[layer] for batch in batches])
        heads = logits.shape[1]
        picked = choices(logits, k)
        load = [sum(head in token for token in picked) / 14 for head in range(heads)]
        assert found.load[layer] == pytest.approx(load, abs=1e-6)
        assert found.dead_heads[layer] == load.count(0)
        if heads:
            mean = [
                sum(math.exp(row[h]) / sum(map(math.exp, row)) for row in logits.tolist()) / 14 for h in range(heads)
            ]
            wanted = -sum(p * math.log(p) for p in mean) / math.log(heads)
            assert found.entropy[layer] == pytest.approx(wanted, abs=1e-5)
    assert found.load[3] == [] and found.entropy[3] is None and found.changed is None
    assert found.dead_heads == [0, 0, 2, 0]


def test_groups_are_shown_as_their_heads() -> None:
    counts, by_group = RoutingCounts(), RoutingCounts(group_size=3)
    for one in (counts, by_group):
        add(one, some_logits(0))
    of_groups, found = (one.health(None, lambda tensor: tensor) for one in (counts, by_group))
    assert found.load == [[share for share in layer for _ in range(3)] for layer in of_groups.load]
    assert found.dead_heads == [3 * dead for dead in of_groups.dead_heads]
    assert found.entropy == of_groups.entropy


def test_changed_is_the_share_of_tokens_with_other_heads() -> None:
    """Of the tokens that have not all heads on anyway, in the layers where they choose."""
    start, now = RoutingCounts(), RoutingCounts()
    before, after = some_logits(0), some_logits(1)
    after[1][3:] = before[1][3:] * 2  # the same order: nothing changed there
    add(start, before)
    add(now, after)
    wanted = []
    for old, new, k in zip(before, after, TOP_K, strict=True):
        pairs = zip(choices(old, k), choices(new, k), strict=True)
        wanted.append(sum(mine != other for mine, other in list(pairs)[2:]) / 5)
    routing = now.health(start, lambda tensor: tensor)
    assert routing.changed[:3] == pytest.approx(wanted[:3], abs=1e-6) and routing.changed[3] is None
    assert wanted[0] > 0 and 0 < wanted[1] <= 1 / 5 and wanted[2] == 0
    assert routing.tokens_with_other_heads == pytest.approx(sum(wanted[:3]) / 3, abs=1e-6)
    assert routing.heads_read == 2.5


def test_processes_add_up() -> None:
    """Two processes with half of the text each, one of which may have none of a batch."""
    whole, halves = RoutingCounts(), [RoutingCounts(), RoutingCounts()]
    for counts in (whole, halves[0]):
        add(counts, some_logits(0))
    add(whole, some_logits(1))
    add(halves[1], some_logits(1))
    add(halves[1], [logits[:0] for logits in some_logits(0)])
    sums: list[torch.Tensor] = []
    halves[0].health(None, lambda tensor: sums.append(tensor) or tensor)
    found = halves[1].health(None, lambda tensor: tensor + sums.pop(0))
    assert found == whole.health(None, lambda tensor: tensor)
