"""Decoding over a cache against the plain loop in float64; in Triton's interpreter without a GPU."""

from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

pytest.importorskip("triton")

from moh_llm.attention import Call
from moh_llm.attention import decode as decoding
from moh_llm.attention.decode import decode_attention, tiles, why_not
from moh_llm.modeling.seen_moh import Seen
from tests.attention.naive import naive_attention, seen_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture
def short_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Even short caches are cut into parts, and memory that nothing was written to holds NaN."""
    monkeypatch.setattr(decoding, "SHORTEST_PART", 64)
    monkeypatch.setattr(decoding, "_programs_wanted", lambda device: 64)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def draw(seen: Seen, on: torch.Tensor, shared: int, size: int, keys: int, dtype: torch.dtype = torch.float32) -> Inputs:
    """A query, keys and values of heads that `shared` share, first keys, and a distant token."""
    torch.manual_seed(keys + size)
    batch, _, heads = on.shape
    query = torch.randn(batch, heads, 1, size, device=DEVICE, dtype=dtype)
    key, value = torch.randn(2, batch, keys, heads // shared, size, device=DEVICE, dtype=dtype).transpose(2, 3)
    distant = torch.randn(batch, 1, heads, device=DEVICE), torch.randn(heads, size, device=DEVICE, dtype=dtype)
    return query, key, value, seen.first(on.to(DEVICE)), distant


def on_device(seen: Seen) -> Seen:
    return Seen(*(x.to(DEVICE) if isinstance(x, torch.Tensor) else x for x in seen))


def expected(query, key, value, first, seen, distant=None) -> torch.Tensor:
    query, key, value = (x.cpu().double() for x in (query, key, value))
    distant = None if distant is None else tuple(x.cpu().double() for x in distant)
    seen = Seen(*(x.cpu() if isinstance(x, torch.Tensor) else x for x in seen))
    return naive_attention(query, key, value, first.cpu(), seen, 0.3, distant)


def distance(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Norm of the difference, relative to that of what is wanted."""
    assert got.shape == wanted.shape
    assert got.isfinite().all()
    return ((got.cpu().double() - wanted).norm() / wanted.norm().clamp_min(1e-12)).item()


def spoil_unseen(key: torch.Tensor, value: torch.Tensor, first: torch.Tensor, seen: Seen) -> None:
    """NaN, in place, where nothing may be read: behind the last key, in padding, in blocks that a whole group hides."""
    batch, groups, keys, size = key.shape
    block = tiles(first.shape[2] // groups, size, key.dtype)["BN"]
    n = torch.arange(keys, device=key.device)
    low = first.view(batch, groups, -1).amin(-1)
    for b in range(batch):
        last, start, sink_end = (x.expand(batch, 1, 1)[b, 0, 0] for x in (seen.last, seen.start, seen.sink_end))
        for g in range(groups):
            hidden = (n // block < low[b, g] // block) & ((n // block > (sink_end - 1) // block) | (sink_end <= start))
            for x in (key, value):
                x[b, g][(n > last) | (n < start) | hidden] = torch.nan


@pytest.mark.parametrize(
    ("rows", "heads", "shared", "size", "share", "window", "sinks", "dtype", "has_distant"),
    [
        ([[330], [-70, 260]], 4, 2, 16, 0.4, 40, 3, torch.float32, True),  # padding of more than a block
        ([[130, 130]], 3, 1, 80, 0.5, 50, 0, torch.float32, False),  # a second document; no power of two
        ([[-130, 200], [329, 1]], 8, 8, 96, 0.0, 70, 70, torch.float32, True),  # sinks of more than a block
        ([[1], [1]], 4, 2, 8, 0.5, 4, 1, torch.float32, True),  # the first token of all
        ([[150]], 6, 3, 128, 0.0, 5, 2, torch.float32, False),  # no head is on
        ([[150]], 4, 4, 64, 1.0, 5, 2, torch.float32, True),  # all are
        ([[-5, 200]], 6, 3, 32, 0.4, 0, 0, torch.float32, False),  # without a fallback
        ([[200]], 4, 2, 128, 0.5, 33, 4, torch.bfloat16, True),
        ([[150], [-40, 110]], 4, 4, 64, 0.2, 33, 4, torch.float16, True),
    ],
)
@pytest.mark.usefixtures("short_parts")
def test_equals_the_loop(rows, heads, shared, size, share, window, sinks, dtype, has_distant):
    seen = on_device(seen_of(rows, queries=1, window=window, sinks=sinks))
    on = torch.rand(len(rows), 1, heads, generator=torch.Generator().manual_seed(size)) < share
    keys = sum(map(abs, rows[0])) + 70  # the room of a static cache
    query, key, value, first, distant = draw(seen, on, shared, size, keys, dtype)
    distant = distant if has_distant else None
    wanted = expected(query, key, value, first, seen, distant)
    spoil_unseen(key, value, first, seen)
    got = decode_attention(Call(query, key, value, first, seen, 0.3, distant))
    assert got.dtype == dtype
    assert distance(got, wanted) < TOLERANCES[dtype]
    assert not got.cpu()[wanted == 0].any()


@pytest.mark.usefixtures("short_parts")
def test_rows_of_different_lengths_and_any_strides():
    """Rows end where their own `last` says, and tensors are read where they lie."""
    seen = seen_of([[300], [300]], queries=1, window=20, sinks=2)
    last = torch.tensor([299, 100])[:, None, None]
    seen = on_device(seen._replace(last=last, near=last - 19, hidden=last - 21))
    on = torch.tensor([[[True, False, False, False]]]).expand(2, 1, 4)
    query, key, value, first, distant = draw(seen, on, 2, 16, 300)
    wanted = expected(query, key, value, first, seen, distant)
    spoil_unseen(key, value, first, seen)
    query = query.transpose(1, 2).contiguous().transpose(1, 2)
    key = torch.cat([key, key], -1)[..., 16:]  # rows that are parts of wider ones
    value = value.transpose(2, 3).contiguous().transpose(2, 3)  # neighbours are not neighbours in memory
    first = torch.stack([first, first], -1)[..., 1]
    distant = torch.cat([distant[0], distant[0]], -1)[..., 4:], distant[1].t().contiguous().t()
    assert distance(decode_attention(Call(query, key, value, first, seen, 0.3, distant)), wanted) < 1e-5


@pytest.mark.usefixtures("short_parts")
def test_keys_that_a_mask_hides():
    """A mask with holes, shorter than a static cache, of which a whole part is hidden; one row sees nothing."""
    seen = on_device(seen_of([[200]] * 3, queries=1, window=20, sinks=2))
    visible = torch.ones(3, 203, dtype=torch.bool, device=DEVICE)
    visible[0, 3:140], visible[0, 195], visible[1, 199], visible[2] = False, False, False, False
    seen = seen._replace(visible=visible[:, :201])
    on = torch.tensor([[[True, False, False, False]]]).expand(3, 1, 4)
    query, key, value, first, _ = draw(seen, on, 2, 16, 260)
    got = decode_attention(Call(query, key, value, first, seen, 0.3))
    # Indices are of keys here, where those of the loop are of visible ones: each row is the one without hidden keys.
    for row in range(2):
        kept = visible[row, :200].nonzero()[:, 0]
        numbers = visible[row].cumsum(0) - visible[row].long()  # how many are visible before a key
        places = (x.expand(3, 1, 1)[row, 0, 0] for x in (seen.start, seen.near, seen.sink_end))
        start, near, sink_end = (numbers[place].view(1, 1, 1) for place in places)
        shorter = Seen(torch.full_like(start, len(kept) - 1), start, near, sink_end, seen.hidden[:1], 20, 2)
        own_first = shorter.first(on[:1].to(DEVICE))
        wanted = expected(query[[row]], key[[row]][:, :, kept], value[[row]][:, :, kept], own_first, shorter)
        assert distance(got[[row]], wanted) < 1e-5
    assert not got[2].any()


def test_one_graph_serves_every_length_of_a_static_cache():
    """`torch.compile(fullgraph=True)` traces the operation, and a later token does not trace it again."""
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def step(query, key, value, on, last, distant):
        last = last[None, None, None]
        start = torch.zeros_like(last)
        near = (last - 7).clamp_min(0)
        visible = torch.arange(40, device=last.device)[None] <= last[0]  # of a static cache's mask
        seen = Seen(last, start, near, start + 1, near - 1, 8, 1, visible=visible)
        return decode_attention(Call(query * 2, key, value, seen.first(on), seen, 0.3, distant)) + 1

    on = torch.tensor([[[True, False]]])
    for last in (5, 20, 33):
        seen = on_device(seen_of([[last + 1]], queries=1, window=8, sinks=1))
        query, key, value, _, distant = draw(seen, on, 1, 16, 40)
        wanted = expected(query * 2, key, value, seen.first(on.to(DEVICE)), seen, distant) + 1
        with torch.no_grad():
            got = step(query, key, value, on.to(DEVICE), torch.tensor(last, device=DEVICE), distant)
        assert distance(got, wanted) < 1e-5
    assert counter.frame_count == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_graph_serves_every_length():
    """How far a row goes and which heads are on is read from tensors at each replay, never by the host."""
    seen = on_device(seen_of([[-40, 5000]] * 2, queries=1, window=300, sinks=4))
    on = torch.rand(2, 1, 8, device=DEVICE) < 0.5
    query, key, value, first, distant = draw(seen, on, 4, 64, 6000, torch.bfloat16)
    with torch.no_grad():
        decode_attention(Call(query, key, value, first, seen, 0.3, distant))  # compiled before the capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = decode_attention(Call(query, key, value, first, seen, 0.3, distant))
        for later in (0, 1, 900):
            for x in (seen.last, seen.near, seen.hidden):
                x += later
            first.copy_(seen.first(torch.rand(2, 1, 8, device=DEVICE) < 0.5))
            graph.replay()
            assert distance(got, expected(query, key, value, first, seen, distant)) < 1e-2


def test_operation_is_registered_as_torch_wants_it():
    """Schema, shapes without data, and tracing with sizes that change."""
    seen = on_device(seen_of([[-2, 30], [32]], queries=1, window=8, sinks=1))
    query, key, value, first, distant = draw(seen, torch.tensor([[[True, False]]] * 2), 2, 16, 32)
    bounds = (seen.start, seen.sink_end, seen.last, seen.hidden)
    visible = torch.ones(2, 32, dtype=torch.bool, device=DEVICE)
    torch.library.opcheck(decoding.decode, (query, key, value, first, *bounds, 0.3, *distant, visible))
    torch.library.opcheck(decoding.decode, (query, key, value, first, *bounds, 0.3), test_utils="test_faketensor")


def test_says_for_what_it_does_not_serve():
    """Tensors without data stand for those of a GPU, which need not be here."""
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        seen = Seen(*(torch.zeros(2, 1, 1, dtype=torch.long) for _ in range(5)), window=0, sinks=0)
        query, key = torch.empty(2, 4, 1, 64, device="cuda"), torch.empty(2, 2, 9, 64, device="cuda")
        first = torch.zeros(2, 1, 4, dtype=torch.long)
        arguments = {"query": query, "key": key, "value": key, "first": first, "seen": seen, "scaling": 1.0}
        assert why_not(Call(**arguments)) is None
        padded = seen._replace(visible=torch.ones(2, 9, dtype=torch.bool))
        assert why_not(Call(**arguments | {"seen": padded})) is None
        assert why_not(Call(**arguments, kinds=((), ()), distant=(query, query))) is None
        leaf = torch.empty_like(query, requires_grad=True)
        double, large = query.double(), query.repeat(1, 1, 1, 5)
        differing = seen._replace(start=first)
        for change in (
            {"query": query.repeat(1, 1, 2, 1)},
            {"query": torch.empty(2, 4, 1, 64)},
            {"query": double, "key": double, "value": double},
            {"query": large, "key": large, "value": large},
            {"seen": seen._replace(visible=torch.ones(2, 1, 1, 9, dtype=torch.bool))},
            {"seen": differing},
            {"query": leaf},
        ):
            assert why_not(Call(**arguments | change)), change
        with torch.no_grad():
            assert why_not(Call(**arguments | {"query": leaf})) is None


def test_there_are_no_gradients_rather_than_wrong_ones():
    seen = on_device(seen_of([[9]], queries=1))
    query, key, value, first, _ = draw(seen, torch.ones(1, 1, 2, dtype=torch.bool), 1, 16, 9)
    with pytest.raises(RuntimeError, match="no gradients"):
        decode_attention(Call(query.requires_grad_(), key, value, first, seen, 0.3))
