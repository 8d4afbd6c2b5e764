"""FlexAttention of sorted queries: its log-sum-exp, how often it is compiled, and what it does not take."""

import pytest
import torch

from moh_llm.attention import Call, flex
from moh_llm.attention.plan import group_table, plan_of
from tests.attention.naive import first_of, seen_of


def arguments(length, heads=4, groups=2, rows=1, gradients=False):
    torch.manual_seed(length)
    seen = seen_of([[length]] * rows, window=32, sinks=2)
    first = first_of(torch.rand(rows, length, heads) < 0.5, seen)
    states = [torch.randn(rows, heads, length, 16), *torch.randn(2, rows, groups, length, 16)]
    distant = torch.randn(rows, length, heads), torch.randn(heads, 16)
    for tensor in (*states, *distant):
        tensor.requires_grad_(gradients)
    return Call(*states, first, seen, 0.25, distant)


def test_log_sum_exp_and_what_sees_nothing():
    torch.manual_seed(0)
    seen = seen_of([[70]], window=0)
    first = first_of(torch.rand(1, 70, 2) < 0.5, seen)
    _, table = group_table((0, 1), 2, torch.device("cpu"))
    plan = plan_of(first, seen, table, 70, gradients=False)
    query = torch.randn(1, 1, plan.rows.shape[2], 16)
    key, value = torch.randn(2, 1, 1, 70, 16)
    out, lse = flex.sorted_attention(query, key, value, plan, 0.3)
    place = torch.arange(70)
    seen_keys = (place <= plan.last[..., None]) & (place >= plan.low[..., None])
    scores = (query.double() @ key.double().transpose(2, 3) * 0.3).masked_fill(~seen_keys, -torch.inf)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), atol=1e-5, rtol=1e-5)
    nothing = ~seen_keys.any(-1)
    assert nothing.any()
    assert not out[nothing].any()
    exact = (scores.softmax(-1) @ value.double())[~nothing]
    torch.testing.assert_close(out[~nothing].double(), exact, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("gradients", [False, True])
def test_lengths_share_a_compilation(counter, gradients):
    """Places, taking apart, the sorted call, weights, merging, going backward: once for all; the plan: twice."""
    for length in range(200, 2001, 600):
        given = arguments(length, gradients=gradients)
        with torch.set_grad_enabled(gradients):
            out = flex.flex_attention(given)
        if gradients:
            out.sum().backward()
        assert counter.frame_count <= (8 if gradients else 7)


@pytest.mark.parametrize("gradients", [False, True])
def test_is_part_of_a_compiled_model(gradients):
    """One graph, as `torch.compile(model, fullgraph=True)` wants it."""
    given = arguments(150, gradients=gradients)._replace(kinds=((0,), (3,)))
    torch._dynamo.reset()
    whole = torch.compile(flex.flex_attention, fullgraph=True, backend="eager")
    expected = flex.flex_attention(given)
    torch.testing.assert_close(whole(given), expected, atol=1e-5, rtol=1e-5)
