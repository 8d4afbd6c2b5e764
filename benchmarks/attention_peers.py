"""What `attention.py` compares, and how it takes time and memory."""

import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from moh_llm.devices import empty_cache, synchronize

ON_CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_CUDA else "cpu")
if not ON_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are first imported

Run = Callable[[], Any]
Attention = Callable[..., torch.Tensor]
Row = dict[str, Any]
MATH_BYTES = 4 << 30  # the math backend writes all scores out; it is tried where they are no more than this


class Shape(NamedTuple):
    """A layer's shape: query heads, heads of keys and values, their size, and the widths of the layer."""

    heads: int
    groups: int
    size: int
    hidden: int
    intermediate: int


SIZES = {"llama3-8b": Shape(32, 8, 128, 4096, 14336), "tiny": Shape(8, 2, 64, 512, 1024)}


class Clock:
    """Milliseconds and memory of calls.

    On CUDA between events, each call after 256 MB were written, which leaves nothing of its inputs in
    the L2 cache. That takes about 0.1 ms, in which the call is already being sent: what Python needs
    beyond that counts. With `hide_launches` the device waits for another millisecond.
    """

    def __init__(self, rounds: int, seconds: float, hide_launches: bool):
        self.rounds, self.seconds, self.hide_launches = rounds, seconds, hide_launches
        self.flush = torch.empty(256 << 20, dtype=torch.int8, device=DEVICE) if ON_CUDA else None

    def turns(self, runs: dict[Any, Run], rounds: int | None = None) -> dict[Any, list[float]]:
        """Milliseconds of each in each round: one that does not count, two that do, and more while there is time."""
        found: dict[Any, list[float]] = {name: [] for name in runs}
        end = time.perf_counter() + self.seconds
        for number in range(1 + (rounds or self.rounds)):
            if number > 2 and time.perf_counter() > end:
                break
            taken = {name: self._once(run) for name, run in runs.items()}
            synchronize(DEVICE)
            if number:
                for name, ms in taken.items():
                    found[name].append(ms())
        return found

    def _once(self, run: Run) -> Callable[[], float]:
        """Call it; what comes back says how long it took, once the device is done."""
        if not ON_CUDA:
            began = time.perf_counter()
            run()
            taken = 1e3 * (time.perf_counter() - began)
            return lambda: taken
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.flush.zero_()
        if self.hide_launches:
            torch.cuda._sleep(2_000_000)  # clock cycles
        begin.record()
        run()
        end.record()
        return lambda: begin.elapsed_time(end)


def peak_mib(run: Run) -> float | None:
    """The most memory that a call takes beyond what is there before it, what it returns included."""
    if not ON_CUDA:
        return None
    synchronize(DEVICE)
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    run()
    synchronize(DEVICE)
    return (torch.accelerator.max_memory_allocated() - before) / 2**20


def attempt(run: Run) -> str | None:
    """Call it; why that failed, if it did. One peer that cannot run must not end the others."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a backend that cannot, says why before it raises
            run()
        synchronize(DEVICE)
    except Exception as error:
        empty_cache()
        return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:150]}"
    return None


def lacking_memory(need: float) -> str | None:
    """Words for what does not fit in the memory that is free; None if it fits."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if ON_CUDA:
        empty_cache()
        free = torch.cuda.mem_get_info()[0]
    return None if need <= free else f"does not fit: takes about {need / 1e9:.1f} GB, {free / 1e9:.1f} GB are free"


@dataclass
class Peer:
    """A way to attend: inputs (queries, keys and values first) to outputs `[B, T, H, D]`."""

    path: str
    share: int  # percent of the heads, or groups, that are on
    attend: Attention
    inputs: tuple[torch.Tensor, ...]
    flops: float = 0.0
    cache_bytes: float = 0.0  # what must be read of the cache
    ours: bool = False
    compared: int = 3  # gradients that must be those of dense attention times the gate

    def run(self, grad: torch.Tensor | None) -> Run:
        """Forward, or, given a gradient of the outputs, forward and the gradients of the inputs."""

        def forward() -> tuple[torch.Tensor, ...]:
            with torch.no_grad():
                return (self.attend(*self.inputs),)

        def both() -> tuple[torch.Tensor, ...]:
            return torch.autograd.grad(self.attend(*self.inputs), self.inputs, grad)

        return forward if grad is None else both


def measure(clock: Clock, peers: list[Peer], grad: torch.Tensor | None = None) -> list[Row]:
    """A row per peer; the first peer is dense attention, which the others are held against."""
    rows, runs, dense = [], {}, peers[0].attend
    for index, peer in enumerate(peers):
        run = peer.run(grad)
        row = {"path": peer.path, "share": peer.share, "gflop": peer.flops / 1e9 or None, "ours": peer.ours}
        row["failed"] = attempt(run)
        rows.append(row)
        if row["failed"]:
            continue
        row["peak_mib"] = peak_mib(run)
        if peer.ours:
            gated = replace(peer, attend=lambda q, k, v, gate: dense(q, k, v) * gate.to(q.dtype).unsqueeze(-1))
            pairs = list(zip(run(), gated.run(grad)(), strict=True))[: peer.compared]
            row["error"] = max(distance(*pair) for pair in pairs)
            del pairs
        if ON_CUDA or not peer.ours:  # times of the interpreter mean nothing
            runs[index] = run
    times = clock.turns(runs)
    for index, taken in times.items():
        rows[index] |= against(taken, times[0])
        rows[index]["gb_s"] = peers[index].cache_bytes / rows[index]["ms"] / 1e6 or None
    return rows


def against(taken: list[float], dense: list[float]) -> Row:
    """Median of milliseconds; median, least and most of the ratios to dense attention's time in the same round."""
    ratios = [a / b for a, b in zip(taken, dense, strict=True)]
    row = {"ms": statistics.median(taken), "ratio": statistics.median(ratios), "rounds": len(taken)}
    return row | {"least": min(ratios), "most": max(ratios)}


def distance(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference, relative to that of `expected`."""
    return ((got.float() - expected.float()).norm() / expected.float().norm()).item()


def dense_ways(query: torch.Tensor, key: torch.Tensor) -> Iterator[tuple[str, str, Attention]]:
    """Backend, way to share keys and values between heads, and attention so, of which any may be unable to run."""
    (batch, heads, length, size), (groups, keys) = query.shape, key.shape[1:3]

    def make(backend: SDPBackend, way: str) -> Attention:
        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            if way == "packed":
                q = q.reshape(batch, groups, heads // groups, size)
            if way == "repeated":
                k, v = (x.repeat_interleave(heads // groups, 1) for x in (k, v))
            with sdpa_kernel(backend):
                out = scaled_dot_product_attention(q, k, v, is_causal=length > 1, enable_gqa=way == "gqa")
            return out.reshape(batch, heads, length, size).transpose(1, 2)

        return attend

    backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    if batch * heads * keys * max(length, size) * 4 <= MATH_BYTES:
        backends.append(SDPBackend.MATH)
    for backend in backends:
        name = backend.name.split("_")[0].lower()
        # A single token sees all keys, so the heads of a group can be the queries of one head: no copy, no mask.
        for way in ("packed", "gqa", "repeated") if length == 1 else ("gqa", "repeated"):
            yield name, way, make(backend, way)


def best_dense(clock: Clock, inputs: tuple[torch.Tensor, ...], grad: torch.Tensor | None, flops: float) -> Peer:
    """The SDPA backend that is fastest here, among those that can run.

    Raises:
        RuntimeError: none can.
    """
    peers, runs, reasons = {}, {}, {}
    for backend, way, attend in dense_ways(*inputs[:2]):
        if way == "repeated" and any(name.startswith(backend) for name in peers):
            continue  # copies only where the backend needs them
        peer = Peer(f"SDPA ({backend}, {way})", 100, attend, inputs, flops)
        reason = attempt(peer.run(grad))
        if reason is None:
            peers[f"{backend}, {way}"], runs[f"{backend}, {way}"] = peer, peer.run(grad)
        else:
            reasons[f"{backend}, {way}"] = reason
    if not peers:
        raise RuntimeError(f"no SDPA backend runs: {reasons}")
    taken = clock.turns(runs, rounds=5)
    return peers[min(taken, key=lambda name: statistics.median(taken[name]))]


def flex(length: int) -> Attention:
    """Compiled FlexAttention with a causal block mask."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()  # it gives up compiling after a few shapes, and is slow then
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device=DEVICE)
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask, enable_gqa=True).transpose(1, 2)


def heads_on(share: int, heads: int) -> int:
    """How many heads are that many percent, at least one."""
    return max(1, round(share * heads / 100))


def random_gate(batch: int, length: int, heads: int, share: int, group_size: int = 1) -> torch.Tensor:
    """A gate `[B, T, H]` of ones and zeros: half of the active ones are shared, the others Top-K of random scores.

    With `group_size` > 1 so many heads in a row are on or off together.
    """
    on = heads_on(share, heads // group_size)
    scores = torch.rand(batch, length, heads // group_size, device=DEVICE)
    scores[..., : on // 2] = 2
    gate = torch.zeros_like(scores).scatter(-1, scores.topk(on, dim=-1).indices, 1.0)
    return gate.repeat_interleave(group_size, -1)
