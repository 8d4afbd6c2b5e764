"""Sections of `gpu.py` about the backends of interval attention: compiling them, and decoding."""

import functools
import itertools
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from gpu_operation import graphs_of, name_of, pass_of, states
from gpu_rows import Record, Row, Run, Shape, Sizes, device_of, reason
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from moh_llm import attention
from moh_llm.devices import synchronize
from moh_llm.modeling.interval_attention_moh import interval_attention
from moh_llm.modeling.seen_moh import Seen

Kinds = tuple[tuple[int, ...], tuple[int, ...]]
BACKENDS = ("flash", "flex")  # of prefills on a GPU


class Call(NamedTuple):
    """Arguments of `interval_attention`: tensors that have gradients, and the others."""

    inputs: list[torch.Tensor]  # query, key, value, distant tokens' scores and values
    first: torch.Tensor
    seen: Seen
    kinds: Kinds

    def arguments(self, *inputs: torch.Tensor) -> attention.Call:
        query, key, value, score, distant = inputs
        scaling = query.shape[-1] ** -0.5
        return attention.Call(query, key, value, self.first, self.seen, scaling, (score, distant), kinds=self.kinds)

    def run(self, backend: Callable[[attention.Call], torch.Tensor], gradients: bool) -> Run:
        return pass_of(lambda *inputs: backend(self.arguments(*inputs)), self.inputs, gradients)


def split_heads(shape: Shape, always: float, never: float) -> Kinds:
    """Heads that are always on and never on, by shares of all; each kind is of as many groups as possible."""
    step = shape.heads // shape.groups
    order = [head for first in range(step) for head in range(first, shape.heads, step)]
    on, off = int(always * shape.heads), int(never * shape.heads + 0.5)
    return tuple(sorted(order[:on])), tuple(sorted(order[on : on + off]))


def chosen(call: Call) -> Row:
    """Which backend the package takes for a call, and why, without gradients where the inputs have none."""
    try:
        choice = attention.choose(call.arguments(*call.inputs))
    except Exception as error:
        return {"backend": reason(error)}
    return {"backend": choice.name, "why": choice.why}


# ---- compiling


def compile_units(sizes: Sizes) -> list[tuple[str, str, bool]]:
    """Backend, shape and pass of what is compiled into the caches on disk, each in a process of its own."""
    return [*itertools.product(BACKENDS, sizes.shapes, (False, True))]


def compile_unit(record: Record, sizes: Sizes, number: int) -> None:
    """Make and run one of the calls."""
    backend, name, gradients = compile_units(sizes)[number]

    def run() -> Row:
        begin = time.time()
        short_call(sizes, sizes.shapes[name], backend, gradients)()
        synchronize(device_of()[0])
        return {"seconds": time.time() - begin}

    record.note(f"{backend}, {name}, {name_of(gradients)}", run)


def short_call(sizes: Sizes, shape: Shape, backend: str, gradients: bool) -> Run:
    """A prefill of random states by a backend, with heads of every kind, routed ones on for half of the tokens.

    Raises RuntimeError where the backend does not take it.
    """
    device, dtype = device_of()
    length, heads = sizes.compiled, shape.heads
    positions = torch.arange(length, device=device)[None]
    start = min(sizes.start, length // 4)
    seen = Seen.from_positions(positions, torch.zeros_like(positions), sizes.window, sizes.sinks, start)
    seen = seen._replace(is_causal=True)
    on, kinds = torch.rand(1, length, heads, device=device) < 0.5, split_heads(shape, 0.25, 0.25)
    for ids, state in zip(kinds, (True, False), strict=True):
        on[..., list(ids)] = state
    sizes_of_distant = (1, length, heads), (heads, shape.size)
    distant = [torch.randn(size, device=device, dtype=dtype, requires_grad=gradients) for size in sizes_of_distant]
    call = Call([*states(shape, length, gradients), *distant], seen.first(on | seen.all_on[..., None]), seen, kinds)
    attend, why_not = attention.BACKENDS[backend]
    if refused := why_not(call.arguments(*call.inputs)):
        raise RuntimeError(refused)
    return call.run(attend, gradients)


def by_the_model(call: attention.Call) -> torch.Tensor:
    return interval_attention(*call[:-1], kinds=call.kinds)


# ---- decoding


def decoding_peers(inputs: list[torch.Tensor]) -> dict[str, Run]:
    """Dense attention of one token per row: by backends of SDPA, keys shared by it or as queries of one head."""
    query, key, value = inputs
    packed = query.reshape(len(query), key.shape[1], -1, query.shape[-1])
    ways = {"shared": (query, True), "packed": (packed, False)}

    def attend(backend: SDPBackend, q: torch.Tensor, gqa: bool) -> torch.Tensor:
        with sdpa_kernel(backend), torch.no_grad():
            return scaled_dot_product_attention(q, key, value, enable_gqa=gqa)

    backends = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
    backends["efficient"] = SDPBackend.EFFICIENT_ATTENTION
    pairs = itertools.product(backends, ways)
    return {f"{name}, {way}": functools.partial(attend, backends[name], *ways[way]) for name, way in pairs}


def decode(record: Record, sizes: Sizes) -> None:
    """Interval attention of one token per row over a cache, in a CUDA graph."""
    device, dtype = device_of()
    for name, shape in sizes.shapes.items():
        for context in sizes.contexts:
            for rows in sizes.rows:
                size = rows, shape.groups, context, shape.size
                key, value = (torch.randn(size, device=device, dtype=dtype) for _ in range(2))
                query = torch.randn(rows, shape.heads, 1, shape.size, device=device, dtype=dtype)
                runs = decoding_peers([query, key, value])
                bases = list(runs)
                more: dict[str, Row] = {}
                for plan in ("groups", "heads", "fixed groups"):
                    call = step_of([query, key, value], shape, sizes, plan)
                    runs[f"{plan}, 50 %"] = call.run(by_the_model, False)
                    more[f"{plan}, 50 %"] = chosen(call)
                cell = f"{name}, {rows} rows over {context}"
                record.cell(f"{cell}, graph", graphs_of(runs), bases, more)


def step_of(inputs: list[torch.Tensor], shape: Shape, sizes: Sizes, plan: str) -> Call:
    """A step of decoding in which half of the groups or heads are on, random ones in each row or the same."""
    query, key, _ = inputs
    device, rows, context = query.device, len(query), key.shape[2]
    position = torch.full((1, 1), context - 1, device=device)
    seen = Seen.from_positions(position, torch.zeros_like(position), sizes.window, sizes.sinks, sizes.start)
    step = 1 if plan == "heads" else shape.heads // shape.groups
    half = max(1, shape.heads // step // 2)
    scores = torch.rand(rows, 1, shape.heads // step, device=device)
    if plan == "fixed groups":
        scores[:] = torch.arange(shape.heads // step, device=device).neg()
    on = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, scores.topk(half, dim=-1).indices, True)
    on = on.repeat_interleave(step, -1)
    kinds: Kinds = ((), ())
    if plan == "fixed groups":
        kinds = tuple(range(half * step)), tuple(range(half * step, shape.heads))
    distant = torch.randn(rows, 1, shape.heads, device=device, dtype=query.dtype)
    values = torch.randn(shape.heads, shape.size, device=device, dtype=query.dtype)
    return Call([*inputs, distant, values], seen.first(on), seen, kinds)
