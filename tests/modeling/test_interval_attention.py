"""The reference of interval attention, and the gradient of the gate, against plain loops in float64."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from moh_llm.modeling import interval_attention_moh
from moh_llm.modeling.interval_attention_moh import (
    NAME,
    interval_attention,
    masked_attention,
    near_attention,
    reference_attention,
)
from moh_llm.modeling.seen_moh import paged_keys
from tests.attention.naive import first_of, naive_attention, seen_of

pytestmark = pytest.mark.usefixtures("reference")
LAYOUTS = {  # documents of each row, padding below zero; the last tokens that are queries
    "one document": ([[21], [21]], None),
    "packed": ([[9, 1, 11], [13, 8]], None),
    "padding before": ([[-6, 15], [21]], None),
    "padding after": ([[15, -6], [21]], None),
    "padding around packed": ([[-2, 9, 4, -6], [9, 12]], None),
    "a step": ([[21], [-4, 17]], 1),
    "a chunk": ([[21], [-4, 17], [13, 8]], 9),
}
HEADS = [(1, 1, 8), (4, 2, 16), (9, 3, 12), (4, 1, 64), (5, 1, 8), (6, 1, 32), (7, 1, 8), (8, 1, 128)]
SEEN = {"window": 5, "sinks": 2, "local_start": 0}
SEENS = {
    "window": SEEN,
    "no sinks": SEEN | {"window": 3, "sinks": 0},
    "first tokens": SEEN | {"local_start": 12},
    "a token": SEEN | {"window": 1},
    "wider than the text": SEEN | {"window": 40},
    "nothing": {"window": 0, "sinks": 0},
}
CASES = [
    *((layout, (4, 2, 16), "window", "some") for layout in LAYOUTS),
    *(("packed", heads, "window", "some") for heads in HEADS),
    *((layout, (6, 2, 8), seen, "some") for seen in SEENS for layout in ("one document", "padding around packed")),
    *(("a chunk", (6, 2, 8), seen, "some") for seen in SEENS),
    *((layout, (6, 2, 8), "window", gate) for gate in ("all", "none") for layout in ("one document", "a chunk")),
]


def make_case(layout: str, heads: tuple[int, int, int], seen: str, gate: str, spare: int = 0) -> tuple:
    """Arguments of `interval_attention` in float64; `spare` keys after the last one are a static cache's."""
    torch.manual_seed(0)
    rows, queries = LAYOUTS[layout]
    what = seen_of(rows, queries, **SEENS[seen])
    batch, length, (heads, groups, size) = len(rows), what.last.shape[1], heads
    query = torch.randn(batch, heads, length, size, dtype=torch.float64)
    key, value = torch.randn(2, batch, groups, 21 + spare, size, dtype=torch.float64)
    key[:, :, 21:] = value[:, :, 21:] = 1e3
    share = {"some": 0.5, "all": 1.0, "none": 0.0}[gate]
    first = first_of(torch.rand(batch, length, heads) < share, what)
    distant = torch.randn(batch, length, heads, dtype=torch.float64), torch.randn(heads, size, dtype=torch.float64)
    distant = distant if what.window else None
    return query, key, value, first, what, size**-0.5, distant


@pytest.fixture(params=[512, 8], ids=["one block", "blocks"])
def blocks(request, monkeypatch) -> None:
    """Queries in one block, and in many."""
    monkeypatch.setattr(interval_attention_moh, "_ROWS", request.param)
    monkeypatch.setattr(interval_attention_moh, "_BLOCK", request.param)


def check(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_is_the_loop(case):
    for spare in (0, 4):
        arguments = make_case(*case, spare=spare)
        expected = naive_attention(*arguments)
        for with_gradients in (False, True):  # which are two paths on a CPU
            with torch.set_grad_enabled(with_gradients):
                check(reference_attention(*arguments), expected)
        check(masked_attention(*arguments), expected)
        check(interval_attention(*arguments, kinds=((0,), ()), module=None), expected)
        query, key, value, first, seen, scaling, distant = arguments
        check(reference_attention(*arguments[:-1]), naive_attention(*arguments[:-1]))  # without distant tokens
        if seen.window:
            off = seen.near.expand_as(first)
            expected = naive_attention(query, key, value, off, seen, scaling, distant)
            check(near_attention(query, key, value, seen, scaling, distant), expected)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("layout", ["one document", "padding around packed", "a chunk"])
@pytest.mark.parametrize("seen", ["window", "first tokens", "nothing"])
def test_gradients_are_those_of_the_loop(layout, seen):
    query, key, value, first, what, scaling, distant = make_case(layout, (6, 2, 8), seen, "some", spare=2)
    wanted = [query, key, value, *(distant or ())]
    for tensor in wanted:
        tensor.requires_grad_()
    arguments = query, key, value, first, what, scaling, distant

    def gradients(out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weight = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
        return torch.autograd.grad((out * weight).sum(), wanted, allow_unused=True, materialize_grads=True)

    expected = gradients(naive_attention(*arguments))
    for found in (reference_attention(*arguments), masked_attention(*arguments)):
        for own, other in zip(gradients(found), expected, strict=True):
            check(own, other)


def test_requests_side_by_side():
    """A chunk of one request, a step of another, and the first token of a third."""
    positions = torch.tensor([[*range(9, 20), 13, 0]])
    seen = paged_keys(positions, torch.tensor([0, 11, 12, 13]), torch.tensor([0, 20, 34, 35]), 5, 2, 0)
    query = torch.randn(1, 6, 13, 8, dtype=torch.float64)
    key, value = torch.randn(2, 1, 2, 35, 8, dtype=torch.float64)
    distant = torch.randn(1, 13, 6, dtype=torch.float64), torch.randn(6, 8, dtype=torch.float64)
    arguments = query, key, value, first_of(torch.rand(1, 13, 6) < 0.5, seen), seen, 0.3, distant
    with torch.no_grad():
        check(reference_attention(*arguments), naive_attention(*arguments))
    check(reference_attention(*arguments), naive_attention(*arguments))


class Largest(TorchDispatchMode):
    """The number of entries of the largest tensor that is made."""

    entries = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **kwargs or {})
        made = [part for part in tree_leaves(out) if isinstance(part, torch.Tensor)]
        self.entries = max([self.entries, *(tensor.numel() for tensor in made)])
        return out


@pytest.mark.parametrize("with_gradients", [False, True])
@pytest.mark.parametrize("documents", [1, 2])
def test_memory_is_linear(monkeypatch, documents, with_gradients):
    monkeypatch.setattr(interval_attention_moh, "_ROWS", 16)
    monkeypatch.setattr(interval_attention_moh, "_BLOCK", 16)
    largest = []
    for length in (512, 1024):
        seen = seen_of([[length // documents] * documents], window=16, sinks=2)
        states = (torch.randn(1, heads, length, 8) for heads in (4, 2, 2))
        first = first_of(torch.rand(1, length, 4) < 0.5, seen)
        with torch.set_grad_enabled(with_gradients), Largest() as mode:
            reference_attention(*states, first, seen, 0.3)
        largest.append(mode.entries)
    assert largest[1] <= 2.5 * largest[0]  # how many are on is drawn


def test_dropout_keeps_the_mean():
    query, key, value, first, seen, scaling, distant = make_case("packed", (4, 2, 16), "window", "some")
    arguments = query, key, value, first, seen, scaling, distant
    expected = reference_attention(*arguments)
    for attend in (reference_attention, masked_attention):
        draws = torch.stack([attend(*arguments, 0.3) for _ in range(200)])
        error = (draws.mean(0) - expected).abs() / (draws.std(0) / math.sqrt(len(draws)) + 1e-9)
        assert error.max() < 6 and draws.std(0).max() > 0.1


FALLBACKS = {
    "none": {"head_fallback": "none"},
    "value": {"head_fallback": "value"},
    "local": {"head_fallback": "local", "local_window": 4, "local_sinks": 2},
    "start": {"head_fallback": "local", "local_window": 4, "local_sinks": 2, "local_start": 9}
    | {"never_on_heads": [[3], [2]]},
}


def gradients_of(moh, kind: str, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients of all weights, those that have none left out."""
    moh.set_gate_gradient(kind)
    moh.zero_grad()
    logits = moh(ids, use_cache=False, output_router_logits=False).logits
    (logits * torch.sin(torch.arange(logits.numel(), dtype=logits.dtype)).view_as(logits)).sum().backward()
    return {name: weight.grad.clone() for name, weight in moh.named_parameters() if weight.grad is not None}


def both_branches(layer, out, gate, replaced, attend, seen) -> torch.Tensor:
    """g H + (1 - g) S `[B, T, H, D]`, with both computed for every head and token."""
    full = attend(first=seen.first(torch.ones_like(gate, dtype=torch.bool)))
    other = attend(first=seen.first(torch.zeros_like(gate, dtype=torch.bool)))
    if layer.config.head_fallback != "local":
        other = torch.zeros_like(full) if replaced is None else replaced
    gate = gate.to(full.dtype).unsqueeze(-1)
    return gate * full + (1 - gate) * other


@pytest.fixture
def one_layer(make_pair):
    """A model of one layer in float64; of several ones the branches of one would change the inputs of the next."""

    def make(name: str, layers: int = 1):
        fields = {"num_shared_heads": 1, "num_active_heads": 2, "router_type": "linear"} | FALLBACKS[name]
        if "never_on_heads" in fields:
            fields["never_on_heads"] = fields["never_on_heads"][:layers]
        return make_pair(dtype=torch.float64, num_hidden_layers=layers, **fields)[1].train()

    return make


@pytest.mark.parametrize("name", FALLBACKS)
def test_the_exact_gradient_of_gates_is_autograds(one_layer, ids, name, monkeypatch):
    moh = one_layer(name, layers=2)
    found = gradients_of(moh, "exact", ids)
    monkeypatch.setattr(type(moh.model.layers[0].self_attn), "_gated", both_branches)
    expected = gradients_of(moh, "exact", ids)
    assert found.keys() == expected.keys() and any("router" in key for key in found)
    for key, gradient in expected.items():
        torch.testing.assert_close(found[key], gradient, rtol=1e-9, atol=1e-10, msg=key)


@pytest.mark.parametrize("name", ["value", "local"])
def test_without_the_gradient_of_gates_all_others_stay(one_layer, ids, name):
    moh = one_layer(name)
    exact, none = gradients_of(moh, "exact", ids), gradients_of(moh, "none", ids)
    for key, gradient in none.items():
        if not any(part in key for part in (".router.", "embed", "input_layernorm")):  # what the router does not read
            torch.testing.assert_close(gradient, exact[key])
    assert not any(".router." in key and gradient.any() for key, gradient in none.items())


def test_frozen_routers_cost_one_attention(one_layer, ids, monkeypatch):
    moh, called = one_layer("local"), []
    monkeypatch.setitem(
        ALL_ATTENTION_FUNCTIONS._global_mapping,
        NAME,
        lambda *args, **more: called.append(1) or reference_attention(*args),
    )
    for kind, frozen, times in (("exact", False, 2), ("none", False, 1), ("exact", True, 1)):
        for router in moh.routers:
            router.requires_grad_(not frozen)
        called.clear()
        gradients_of(moh, kind, ids)
        assert len(called) == times, (kind, frozen)
