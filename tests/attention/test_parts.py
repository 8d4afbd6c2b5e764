"""Interval attention by parts, with FlexAttention for sorted queries, against a plain loop in float64."""

import pytest
import torch

from moh_llm.attention import Call, flex, parts
from moh_llm.attention.flex import flex_attention
from tests.attention.naive import first_of, naive_attention, seen_of

WHOLE, DOCUMENTS, PADDED = [[50]], [[30, 20], [7, 43]], [[-9, 41], [44, -6]]
ALL_KINDS = (0, 5), (1, 2)


def differences(
    rows=WHOLE, queries=None, heads=4, groups=2, size=16, share=0.5, kinds=None, with_distant=True, **seen_fields
):
    """The largest errors of outputs and of all gradients, relative to the largest value of each."""
    torch.manual_seed(0)
    batch, keys = len(rows), sum(map(abs, rows[0]))
    queries = queries or keys
    seen = seen_of(rows, queries, **{"window": 8, "sinks": 2} | seen_fields)
    always, never = kinds or ((), ())
    on = torch.rand(batch, queries, heads) < share
    on[:, :, list(always)], on[:, :, list(never)] = True, False
    first = first_of(on, seen)
    leaves = [torch.randn(batch, heads, queries, size), *torch.randn(2, batch, groups, keys, size)]
    if with_distant:
        leaves += [torch.randn(batch, queries, heads), torch.randn(heads, size)]
    gradient, results = torch.randn(batch, queries, heads, size), []
    for dtype in (torch.float64, torch.float32):
        own = [leaf.to(dtype).requires_grad_() for leaf in leaves]
        given = *own[:3], first, seen, 0.3, tuple(own[3:]) or None
        exact = dtype == torch.float64
        out = naive_attention(*given) if exact else flex_attention(Call(*given, kinds=kinds))
        assert out.shape == (batch, queries, heads, size)
        given = torch.autograd.grad(out, own, gradient.to(dtype), allow_unused=True, materialize_grads=True)
        results.append([out.detach(), *given])
    return [
        float((ours - exact).abs().max() / exact.abs().max().clamp_min(1)) for exact, ours in zip(*results, strict=True)
    ]


@pytest.mark.parametrize(
    "case",
    [
        {},
        {"heads": 8, "groups": 1, "size": 8},
        {"heads": 6, "groups": 2, "size": 64, "kinds": ALL_KINDS},
        {"rows": DOCUMENTS, "heads": 6, "groups": 2, "kinds": ALL_KINDS},
        {"rows": PADDED},
        {"rows": DOCUMENTS, "queries": 17},
        {"rows": [[-9, 41]], "queries": 1},
        {"share": 1.0},
        {"share": 0.0},
        {"local_start": 20},
        {"kinds": ((0, 1, 2), ())},
        {"kinds": ((0, 1, 2, 3), ())},
        {"kinds": ((), (0, 1, 2, 3))},
        {"with_distant": False},
        {"with_distant": False, "window": 0, "sinks": 0},
        {"sinks": 0},
        {"rows": [[150]], "window": 40, "sinks": 4},
    ],
    ids=str,
)
def test_is_the_loop(case):
    assert max(differences(**case)) < 1e-5


def plain_windows(query, key, value, scaling, window):
    """What the windowed kernel of a GPU computes."""
    key, value = (states.repeat_interleave(query.shape[1] // key.shape[1], 1) for states in (key, value))
    place = torch.arange(key.shape[2])
    last = place[-query.shape[2] :, None]
    scores = (query @ key.transpose(2, 3) * scaling).masked_fill((place > last) | (place <= last - window), -torch.inf)
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


@pytest.mark.parametrize(
    "case",
    [
        {},
        {"sinks": 0},
        {"with_distant": False},
        {"local_start": 20},
        {"local_start": 60},
        {"kinds": ((), (0, 1, 2, 3))},
        {"rows": [[50], [50]], "heads": 4, "groups": 1, "kinds": ((1,), (0, 2))},
        {"rows": DOCUMENTS},
    ],
    ids=str,
)
def test_windows_are_the_loop(case, monkeypatch):
    monkeypatch.setattr(parts, "why_not_windowed", lambda *states: None)
    monkeypatch.setattr(flex, "KERNELS", flex.KERNELS._replace(windowed=plain_windows))
    assert max(differences(**{"kinds": ((0,), (2, 3))} | case)) < 1e-5
