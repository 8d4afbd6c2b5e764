"""The kernels of the backends on a CUDA device against masked attention in float64."""

import math
from collections.abc import Callable

import pytest
import torch

from moh_llm.attention import flash, flex
from moh_llm.attention.plan import Plan, group_table, plan_of
from moh_llm.attention.windowed import why_not_windowed, windowed_attention
from tests.attention.naive import first_of, seen_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

HEADS, SHARED, LENGTH, WINDOW = 8, 4, 1024, 200
FORWARD, BACKWARD = 0.01, 0.02  # relative to norms: weights and outputs are rounded to bfloat16, 0.004


@pytest.fixture(params=[64, 128])
def size(request) -> int:
    return request.param


def random_states(length: int, keys: int, groups: int, heads: int, size: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = (2, heads, length, size), (2, groups, keys, size), (2, groups, keys, size)
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]


def check(call: Callable, states: list[torch.Tensor], seen: torch.Tensor) -> None:
    """Outputs, log-sum-exp and gradients of both, where `seen` `[..., length, S]`; what sees nothing gives zeros."""
    torch.manual_seed(1)
    scaling = states[0].shape[-1] ** -0.5
    query, key, value = wide = [state.detach().double().requires_grad_() for state in states]
    key, value = (state.repeat_interleave(query.shape[1] // key.shape[1], 1) for state in (key, value))
    scores = (query @ key.transpose(-1, -2) * scaling).masked_fill(~seen, -math.inf)
    lse = scores.logsumexp(-1)
    finite = lse > -math.inf
    out = (scores - lse.masked_fill(~finite, 0)[..., None]).exp() @ value
    weights = torch.randn(out.shape, device="cuda"), torch.randn(int(finite.sum()), device="cuda")

    def gradients(out: torch.Tensor, lse: torch.Tensor, states: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad((out * weights[0]).sum() + (lse[finite] * weights[1]).sum(), states)

    found_out, found_lse = call(*states, scaling)
    assert torch.equal(found_lse > -math.inf, finite)
    torch.testing.assert_close(found_lse[finite].double(), lse[finite], atol=1e-3, rtol=1e-3)
    assert (found_out - out).norm() <= FORWARD * out.norm() and not found_out[~finite].any()
    for own, expected in zip(gradients(found_out, found_lse, states), gradients(out, lse, wide), strict=True):
        assert (own - expected).norm() <= BACKWARD * expected.norm()


def seen_by_causal(length: int, keys: int, window: int | None) -> torch.Tensor:
    place, own = torch.arange(keys, device="cuda"), torch.arange(keys - length, keys, device="cuda")[:, None]
    return (place <= own) & (place > own - (window or keys))


def skip_without(lack: str | None) -> None:
    if lack is not None:
        pytest.skip(lack)


@pytest.mark.parametrize("length", [LENGTH, 300])
def test_windows(size, length):
    skip_without(why_not_windowed(torch.device("cuda"), torch.bfloat16, size))
    states = random_states(length, LENGTH, HEADS // SHARED, HEADS, size)
    seen = seen_by_causal(length, LENGTH, WINDOW)
    check(lambda *states: windowed_attention(*states, WINDOW), states, seen)


@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("length", [LENGTH, 300])
def test_flash_attn_4(size, length, window):
    skip_without(flash.lack(torch.device("cuda"), torch.bfloat16, size))
    states = random_states(length, LENGTH, HEADS // SHARED, HEADS, size)
    check(lambda *args: flash.causal_attention(*args, window), states, seen_by_causal(length, LENGTH, window))


def plan_of_half(share: float, sinks: int) -> Plan:
    """Of rows with padding and with two documents, this share of the entries on."""
    seen = seen_of([[-24, LENGTH - 24], [LENGTH // 2 + 60, LENGTH // 2 - 60]], window=WINDOW, sinks=sinks)
    seen = seen._replace(
        **{name: field.cuda() for name, field in seen._asdict().items() if isinstance(field, torch.Tensor)}
    )
    torch.manual_seed(0)
    first = first_of(torch.rand(2, LENGTH, HEADS, device="cuda") < share, seen)
    _, table = group_table(tuple(range(1, HEADS)), SHARED, torch.device("cuda"))
    return plan_of(first, seen, table, LENGTH, gradients=True)


@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize("share", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("backend", [flex, flash], ids=["flex", "flash"])
def test_sorted_queries(size, backend, share, sinks):
    if backend is flash:
        skip_without(flash.lack(torch.device("cuda"), torch.bfloat16, size))
    plan = plan_of_half(share, sinks)
    groups, entries = plan.last.shape[1:]
    place = torch.arange(LENGTH, device="cuda")
    seen = place >= plan.low[..., None]
    if sinks:
        seen |= (place >= plan.start[..., None]) & (place < plan.sink_end[..., None])
    states = random_states(entries, LENGTH, groups, groups, size)
    check(
        lambda query, key, value, scaling: backend.sorted_attention(query, key, value, plan, scaling),
        states,
        seen & (place <= plan.last[..., None]),
    )
