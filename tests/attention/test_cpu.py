"""Attention on a CPU equals a loop in float64, and so do its gradients."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from moh_llm.attention import Call, choose, cpu, cpu_parts, cpu_selected
from moh_llm.attention.cpu import cpu_attention, why_not
from moh_llm.modeling.seen_moh import Seen
from tests.attention.naive import first_of, naive_attention, seen_of

BOUNDS = {torch.float32: 1e-5, torch.float64: 1e-10}
LAYOUTS = {
    "one token": ([[1], [1]], None),
    "one text": ([[41], [41]], None),
    "packed": ([[9, 1, 4, 27], [20, 21]], None),
    "padding on the left": ([[-11, 30], [41], [-40, 1]], None),
    "a chunk of a text": ([[41]], 13),
    "a chunk of rows with padding": ([[-11, 30], [-30, 11]], 13),
    "a step": ([[41], [41]], 1),
    "a step of rows with padding": ([[-11, 30], [-11, 30], [41], [-40, 1]], 1),
}


def given(seen, heads=4, kv=2, size=8, dtype=torch.float32, distant=True, share=0.5, after=0):
    """Arguments of `cpu_attention` but `seen` and the scaling, where so many heads are on, and `after` empty keys."""
    draw = torch.Generator().manual_seed(1)
    batch, keys, queries = len(seen.start), int(seen.last.max()) + 1, seen.last.shape[1]
    normal = lambda *shape: torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype)  # noqa: E731
    query = normal(batch, queries, heads, size).transpose(1, 2)
    key, value = (normal(batch, kv, keys + after, size) for _ in range(2))
    first = first_of(torch.rand(batch, queries, heads, generator=draw) < share, seen)
    return query, key, value, first, (normal(batch, queries, heads), normal(heads, size)) if distant else None


def attend(seen, query, key, value, first, distant, kinds=None) -> torch.Tensor:
    call = Call(query, key, value, first, seen, 0.3, distant, kinds=kinds)
    assert why_not(call) is None
    return cpu_attention(call)


def assert_is_the_loop(seen, given, kinds=None) -> None:
    query, key, value, first, distant = given
    exact = [tensor.double() for tensor in (query, key, value)]
    distant = distant and tuple(tensor.double() for tensor in distant)
    expected = naive_attention(*exact, first, seen, 0.3, distant)
    found, bound = attend(seen, *given, kinds), BOUNDS[query.dtype]
    assert found.dtype == query.dtype
    torch.testing.assert_close(found.double(), expected, rtol=bound, atol=bound)


@pytest.fixture(params=[8, 256])
def block(request, monkeypatch) -> None:
    """Blocks of selected attention that these texts fill, with all heads selected; and dense attention."""
    monkeypatch.setattr(cpu_selected, "_BLOCK", request.param)
    if request.param == 8:
        monkeypatch.setattr(cpu, "_LEAST_QUERIES", 1)
        monkeypatch.setattr(cpu, "_OVERHEAD", -1000)


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("window", [(6, 0, 0), (6, 2, 0), (1, 3, 13), (0, 0, 0)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_is_the_loop(layout, window) -> None:
    rows, queries = LAYOUTS[layout]
    seen = seen_of(rows, queries, *window)
    for distant in (True, False):
        assert_is_the_loop(seen, given(seen, distant=distant and window[0] > 0, after=5 if queries else 0))


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(("heads", "kv", "size"), [(3, 3, 8), (4, 2, 40), (5, 1, 64), (8, 2, 128), (16, 2, 8)])
def test_heads_that_share_keys(heads, kv, size, dtype) -> None:
    for queries in (None, 1):
        seen = seen_of([[-5, 28], [33]], queries, 6, 2)
        for share in (0.0, 0.5, 1.0):
            assert_is_the_loop(seen, given(seen, heads, kv, size, dtype=dtype, share=share))


def with_kinds(first, seen, always=(), never=()) -> torch.Tensor:
    """`first` with these heads always on, and those never but for tokens that have all heads on."""
    on = first <= seen.start
    on[..., list(always)] = True
    on[..., list(never)] = False
    return first_of(on, seen)


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize(("always", "never"), [((), ()), ((0, 3), (2, 7, 8)), ((0, 1, 2), (3, 4, 5)), (range(9), ())])
@pytest.mark.parametrize("layout", ["one text", "packed", "padding on the left", "a chunk of a text", "a step"])
def test_heads_that_are_always_or_never_on(layout, always, never) -> None:
    rows, queries = LAYOUTS[layout]
    seen = seen_of(rows, queries, 5, 2, 12)._replace(scratch={})
    query, key, value, first, distant = given(seen, heads=9, kv=3)
    first = with_kinds(first, seen, always, never)
    for _ in range(2):  # of two layers
        assert_is_the_loop(seen, (query, key, value, first, distant), (tuple(always), tuple(never)))


@pytest.mark.parametrize("trained", [True, False])
def test_any_heads_may_never_be_on(trained) -> None:
    """Key-value heads are shared by different numbers of the other heads."""
    seen = seen_of([[7]], None, 2, 1)
    query, key, value, first, distant = given(seen, heads=6, kv=2)
    for number in range(2**6):
        never = tuple(head for head in range(6) if number >> head & 1)
        states = query.requires_grad_(trained), key, value, with_kinds(first, seen, never=never), distant
        assert_is_the_loop(seen, states, ((), never))


@pytest.mark.parametrize("window", [(6, 2, 0), (5, 1, 14), (0, 0, 0)])
@pytest.mark.parametrize(("always", "never"), [((), ()), ((0,), (2, 5)), ((0, 1, 2, 3), (4, 5)), (range(6), ())])
@pytest.mark.parametrize("layout", ["one token", "one text", "packed", "padding on the left"])
def test_gradients_are_the_loops(layout, always, never, window) -> None:
    seen = seen_of(LAYOUTS[layout][0], None, *window)._replace(scratch={})
    *states, first, distant = given(seen, heads=6, kv=2, dtype=torch.float64, distant=window[0] > 0)
    first = with_kinds(first, seen, always, never)
    wanted = torch.randn(
        len(first), first.shape[1], 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2)
    )
    found = []
    for attention in (attend, lambda seen, *given, kinds: naive_attention(*given[:4], seen, 0.3, given[4])):
        leaves = [tensor.clone().requires_grad_() for tensor in (*states, *(distant or ()))]
        out = attention(seen, *leaves[:3], first, distant and tuple(leaves[3:]), kinds=(tuple(always), tuple(never)))
        out.backward(wanted)
        found.append([out, *(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves)])
    for own, expected in zip(*found, strict=True):
        torch.testing.assert_close(own, expected.expand(own.shape), rtol=1e-10, atol=1e-10)


def test_the_other_half_of_a_training_step() -> None:
    """Without gradients, after a pass with them, for the same queries: what was computed once is not again."""
    seen = seen_of([[9, 32], [41]], None, 6, 2)._replace(scratch={})
    query, key, value, first, distant = given(seen)
    off = seen.first((first > seen.start) | seen.all_on[..., None])
    attend(seen, query.requires_grad_(), key, value, first, distant)
    with torch.no_grad():
        assert_is_the_loop(seen, (query, key, value, off, distant))
        assert_is_the_loop(seen, (query, key, value, first, distant))  # anew


@pytest.mark.parametrize("queries", [None, 1])
def test_what_is_kept_of_a_pass_is_of_its_keys_alone(queries) -> None:
    scratch = {}
    for rows in ([[41], [41]], [[9, 32], [-11, 30]]):
        seen = seen_of(rows, queries, 6, 2)._replace(scratch=scratch)
        assert_is_the_loop(seen, given(seen))


@pytest.mark.parametrize("queries", [1, 13])
def test_rows_that_begin_together_and_hide_different_numbers_of_keys(queries) -> None:
    """As of a cache that keeps the first and the last tokens alone of rows with padding."""
    seen = seen_of([[41], [41], [-11, 30], [41]], queries, 6, 2)
    dropped = torch.tensor([0, 90, 0, 9])[:, None, None]
    assert_is_the_loop(seen._replace(hidden=seen.hidden + dropped), given(seen, dtype=torch.float64))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_long_texts_of_odd_numbers_of_heads(threads, monkeypatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(cpu_parts, "_CHUNK", 16)
    monkeypatch.setattr(cpu_parts, "_LEAST_CHUNKS", 16)
    for rows, queries in LAYOUTS.values():
        seen = seen_of(rows, queries, 6, 2)
        assert_is_the_loop(seen, given(seen, heads=3, kv=3, share=0.9))


@pytest.mark.parametrize("share", [0.2, 0.5, 1.0])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_long_caches(threads, share, monkeypatch) -> None:
    """Of rows that begin together and not, where all threads read a part of what is left over."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for rows in ([[41]], [[41], [-11, 30], [-11, 30], [-11, 30], [-11, 30], [-40, 1]]):
        seen = seen_of(rows, 1, 6, 2)
        assert_is_the_loop(seen, given(seen, heads=6, kv=3, share=share, after=5))


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float64, 1e-12)])
def test_precision_with_whole_blocks(dtype, bound) -> None:
    length = 700
    positions = torch.arange(length)[None]
    seen = Seen.from_positions(positions, torch.zeros_like(positions))._replace(is_causal=True)
    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, length, 8, generator=draw).to(dtype) for heads in (4, 2, 2))
    on = torch.rand(1, length, 4, generator=draw) < 0.5
    full = scaled_dot_product_attention(
        *(t.double() for t in (query, key, value)), is_causal=True, scale=0.3, enable_gqa=True
    )
    expected = full.transpose(1, 2) * on.unsqueeze(-1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "_LEAST_QUERIES", 1)
        found = cpu_attention(Call(query, key, value, seen.first(on), seen, 0.3))
    assert (found.double() - expected).norm() < bound * expected.norm()


@pytest.mark.parametrize("trained", [True, False])
def test_autocast(trained) -> None:
    """Queries are wider than keys and values where rotary embedding is; outputs have the dtype that SDPA gives."""
    seen = seen_of([[9, 24], [33]], None, 6, 2)
    *states, first, distant = given(seen)
    expected = naive_attention(*(tensor.double() for tensor in states), first, seen, 0.3, distant)
    states = states[0].requires_grad_(trained), states[1], states[2].bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        found = attend(seen, *states, first, distant)
    assert found.dtype == torch.bfloat16
    assert (found.double() - expected).norm() < 1e-2 * expected.norm()
    if trained:
        found.float().square().sum().backward()
        assert states[0].grad.dtype == torch.float32 and states[0].grad.isfinite().all()


def test_what_is_left_to_the_reference() -> None:
    seen = seen_of([[33]], 20, 6, 2)
    states = given(seen)
    query, key, value, first, distant = states

    def reason(seen, query=query) -> str | None:
        return why_not(Call(query, key, value, first, seen, 0.3, distant))

    assert reason(seen) is None
    assert choose(Call(query, key, value, first, seen, 0.3, distant, dropout=0.1)) == ("reference", "there is dropout")
    assert "keys" in reason(seen._replace(visible=torch.ones(1, 33, dtype=torch.bool)))
    assert "keys" in reason(seen._replace(is_consecutive=False))
    assert "CPU" in reason(seen, query.to("meta"))
    assert "cache" in reason(seen, query.clone().requires_grad_())
    reasons = []
    torch.compile(lambda query: reasons.append(reason(seen, query)) or query + 1, backend="eager")(query)
    assert "compiled" in reasons[0]
