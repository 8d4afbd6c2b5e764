"""Sorted queries: each is there once, sees what it should, and lists of blocks hold what is seen."""

import pytest
import torch

from moh_llm.attention.plan import BLOCK, block_count, group_table, plan_of
from tests.attention.naive import first_of, seen_of

CASES = [
    {},
    {"sinks": 0},
    {"rows": [[300, 100], [30, 370]]},
    {"rows": [[-150, 250], [390, -10]]},
    {"rows": [[400]], "queries": 130},
    {"heads": 6, "groups": 3, "chosen": (0, 3, 4)},
    {"heads": 8, "groups": 1},
    {"share": 0.0},
    {"share": 1.0},
    {"window": 0, "sinks": 0},
    {"local_start": 200},
    {"rows": [[60]], "queries": 20},
]


def make_plan(rows=((400,),), queries=None, heads=4, groups=2, share=0.5, chosen=None, gradients=True, **seen_fields):
    """The plan, first keys, what is seen, and the heads."""
    torch.manual_seed(0)
    seen = seen_of(rows, queries, **{"window": 40, "sinks": 4} | seen_fields)
    keys, queries = sum(map(abs, rows[0])), seen.last.shape[1]
    chosen = chosen or tuple(range(heads))
    first = first_of(torch.rand(len(rows), queries, heads) < share, seen)
    own, table = group_table(chosen, heads // groups, torch.device("cpu"))
    assert own.tolist() == sorted({head // (heads // groups) for head in chosen})
    return plan_of(first, seen, table, keys, gradients), first, seen, chosen, keys


def listed(count, index, columns):
    """Lists of blocks as flags `[B, G, rows, columns]`."""
    flags = torch.zeros(*index.shape[:3], columns, dtype=torch.bool)
    for place in torch.cartesian_prod(*map(torch.arange, count.shape)).tolist():
        chosen = index[tuple(place)][: count[tuple(place)]].long()
        assert chosen.tolist() == sorted(set(chosen.tolist()))
        flags[(*place, chosen)] = True
    return flags


@pytest.mark.parametrize("case", CASES, ids=str)
def test_holds_what_is_seen(case):
    plan, first, seen, chosen, keys = make_plan(**case)
    batch, queries, heads = first.shape
    size = batch * queries * heads
    rows = plan.rows.flatten()
    head = torch.arange(heads).expand(batch, queries, -1).flatten()
    assert rows[rows < size].sort().values.tolist() == [row for row in range(size) if int(head[row]) in chosen]

    place = torch.arange(block_count(keys) * BLOCK)
    shown = (place <= plan.last[..., None]) & (place >= plan.low[..., None])
    if plan.start is not None:
        is_sink = (place >= plan.start[..., None]) & (place < plan.sink_end[..., None])
        shown |= (place <= plan.last[..., None]) & is_sink
    last, start, sink_end = (
        field.expand(first.shape).reshape(-1, 1) for field in (seen.last, seen.start, seen.sink_end)
    )
    low = first.reshape(-1, 1)
    expected = (place <= last) & ((place >= low) | ((place >= start) & (place < sink_end)))
    expected = torch.cat([expected, torch.zeros(1, len(place), dtype=torch.bool)])  # of those that fill up
    assert torch.equal(shown, expected[plan.rows])

    blocks = shown.unflatten(2, (-1, BLOCK)).unflatten(-1, (-1, BLOCK)).transpose(3, 4)  # [B, G, M, K, 128, 128]
    partial, full = (listed(*lists, block_count(keys)) for lists in (plan.keys[:2], plan.keys[2:]))
    assert not (partial & full).any()
    assert torch.equal(blocks.flatten(-2).all(-1), full)
    assert not (blocks.flatten(-2).any(-1) & ~(partial | full)).any()
    for lists, flags in (plan.queries[:2], partial), (plan.queries[2:], full):
        assert torch.equal(listed(*lists, flags.shape[2]), flags.transpose(2, 3))


def test_order_is_on_from_the_end_then_off():
    """Blocks of entries that are on are read by few that are off."""
    plan, first, seen, _, _ = make_plan(rows=((2000,),), share=0.5)
    is_on = torch.cat([(first <= seen.start).flatten(), torch.zeros(1, dtype=torch.bool)])[plan.rows]
    for on, last in zip(is_on[0], plan.last[0], strict=True):
        count = int(on.sum())
        assert on[:count].all()
        assert last[:count].diff().max() <= 0
        real = int((last >= 0).sum())
        assert last[count:real].diff().min() >= 0
    read = plan.keys.partial_count + plan.keys.full_count
    assert int(read[..., is_on.unflatten(-1, (-1, BLOCK)).any(-1)[0].sum(-1).max() :].max()) <= 4  # a band and sinks


def test_no_list_for_gradients_unless_wanted():
    assert make_plan(gradients=False)[0].queries is None
