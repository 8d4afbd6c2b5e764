"""Sections of `gpu.py` about the backends of interval attention: compiling them, exactness, sorted calls, decoding."""

import functools
import importlib
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from gpu_operation import BASES, DENSE, graphs_of, name_of, pass_of, states
from gpu_rows import Record, Row, Run, Shape, Sizes, device_of, distance, reason
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from moh_llm import attention
from moh_llm.attention.plan import Plan, group_table, plan_of
from moh_llm.devices import synchronize
from moh_llm.modeling.interval_attention_moh import interval_attention, masked_attention, reference_attention
from moh_llm.modeling.seen_moh import Seen

Kinds = tuple[tuple[int, ...], tuple[int, ...]]
SHARES = (100, 75, 50)  # percent of the entries that are on
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

    def attend(self, backend: Callable[[attention.Call], torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
        return backend(self.arguments(*inputs))

    def run(self, backend: Callable[..., torch.Tensor], gradients: bool) -> Run:
        return pass_of(functools.partial(self.attend, backend), self.inputs, gradients)


def split_heads(shape: Shape, always: float, never: float) -> Kinds:
    """Heads that are always on and never on, by shares of all; each kind is of as many groups as possible."""
    step = shape.heads // shape.groups
    order = [head for first in range(step) for head in range(first, shape.heads, step)]
    on, off = int(always * shape.heads), int(never * shape.heads + 0.5)
    return tuple(sorted(order[:on])), tuple(sorted(order[on : on + off]))


def call_of(
    shape: Shape, sizes: Sizes, length: int, share: float, kinds: Kinds, gradients: bool, rows: int = 1,
    documents: tuple[int, ...] = (),
) -> Call:  # fmt: skip
    """A prefill of random states, whose routed heads are on for a share of the tokens.

    `documents` are where documents after the first one begin, in each row.
    """
    device, dtype = device_of()
    positions = torch.arange(length, device=device)[None]
    starts = torch.zeros_like(positions)
    for begin in documents:
        starts[:, begin:] = begin
    seen = Seen.from_positions(positions, starts, sizes.window, sizes.sinks, min(sizes.start, length // 4))
    seen = seen._replace(is_causal=not documents)
    on = torch.rand(rows, length, shape.heads, device=device) < share
    for ids, state in zip(kinds, (True, False), strict=True):
        on[..., list(ids)] = state
    first = seen.first(on | seen.all_on[..., None])
    distant = torch.randn(rows, length, shape.heads, device=device, dtype=dtype)
    values = torch.randn(shape.heads, shape.size, device=device, dtype=dtype)
    inputs = [*states(shape, length, gradients, rows), *(x.requires_grad_(gradients) for x in (distant, values))]
    return Call(inputs, first, seen, kinds)


def backend_of(name: str, call: Call) -> Callable[..., torch.Tensor] | str:
    """A backend's function, or why it does not take a call."""
    if name == "reference":
        return reference
    if name not in attention.BACKENDS:
        return "there is no such backend"
    attend, why_not = attention.BACKENDS[name]
    try:
        return why_not(call.arguments(*call.inputs)) or attend
    except Exception as error:
        return reason(error)


def chosen(call: Call) -> Row:
    """Which backend the package takes for a call, and why, without gradients where the inputs have none."""
    try:
        choice = attention.choose(call.arguments(*call.inputs))
    except Exception as error:
        return {"backend": reason(error)}
    return {"backend": choice.name, "why": choice.why}


# ---- compiling


def compile_units(sizes: Sizes) -> dict[str, Callable[[], Run]]:
    """What is compiled into the caches on disk, each in a process of its own: short calls, made when asked for."""
    units: dict[str, Callable[[], Run]] = {}
    for gradients in (False, True):
        for name, shape in sizes.shapes.items():
            for backend in BACKENDS:
                make = functools.partial(short_call, sizes, shape, backend, gradients)
                units[f"{backend}, {name}, {name_of(gradients)}"] = make
    return units


def compile_unit(record: Record, sizes: Sizes, number: int) -> None:
    """Make and run one of the calls."""
    name, make = [*compile_units(sizes).items()][number]

    def run() -> Row:
        begin = time.time()
        make()()
        synchronize(device_of()[0])
        return {"seconds": time.time() - begin}

    record.note(name, run)


def short_call(sizes: Sizes, shape: Shape, backend: str, gradients: bool) -> Run:
    return runnable(
        backend, call_of(shape, sizes, sizes.checked, 0.5, split_heads(shape, 0.25, 0.25), gradients), gradients
    )


def runnable(backend: str, call: Call, gradients: bool) -> Run:
    """A call of a backend. Raises RuntimeError where it does not take it."""
    found = backend_of(backend, call)
    if isinstance(found, str):
        raise RuntimeError(found)
    return call.run(found, gradients)


# ---- exactness


def correct(record: Record, sizes: Sizes) -> None:
    """Each backend against the operation by the letter in float64, on the same numbers: outputs, then gradients."""
    length = sizes.checked
    for name, shape in sizes.shapes.items():
        for plan, kinds in (("mixed", split_heads(shape, 0.25, 0.25)), ("all routed", ((), ()))):
            for documents in ((), (length // 3,)):
                call = call_of(shape, sizes, length, 0.5, kinds, gradients=True, documents=documents)
                words = f"{name}, {plan}, {length}{', two documents' if documents else ''}"
                exact = functools.cache(functools.partial(exactly, call))
                for backend in ("reference", *BACKENDS):
                    for gradients in (False, True):
                        error = functools.partial(error_of, call, backend, exact, gradients)
                        record.note(f"{words}, {backend}, {name_of(gradients)}", error)


def exactly(call: Call) -> list[torch.Tensor]:
    """Outputs and gradients in float64, by all scores and a mask."""
    own = call._replace(inputs=[tensor.detach().double().requires_grad_() for tensor in call.inputs])
    return [own.run(by_the_letter, False)(), *own.run(by_the_letter, True)()]


def by_the_model(call: attention.Call) -> torch.Tensor:
    return interval_attention(*call[:-1], kinds=call.kinds)


def by_the_letter(call: attention.Call) -> torch.Tensor:
    return masked_attention(*call[:-1])


def reference(call: attention.Call) -> torch.Tensor:
    return reference_attention(*call[:-1])


def error_of(call: Call, backend: str, exact: Callable[[], list[torch.Tensor]], gradients: bool) -> Row:
    """The norm of the difference over that of what is right: of the output or, the largest, of gradients."""
    found = runnable(backend, call, gradients)()
    pairs = zip(found, exact()[1:], strict=True) if gradients else [(found, exact()[0])]
    return {"error": max(distance(*pair) for pair in pairs)}


# ---- sorted calls


def sorted_calls(record: Record, sizes: Sizes) -> None:
    """Sorted queries of LLaMA3-8B's shape, all heads routed, by each backend at shares of entries that are on.

    "whole" is interval attention: the plan, sorting, the call, and putting its outputs back.
    """
    shape = sizes.shapes["llama3-8b"]
    for length in sizes.lengths:
        for gradients in (False, True):
            inputs = states(shape, length, gradients)
            runs: dict[str, Run | str] = {peer: pass_of(DENSE[peer], inputs, gradients) for peer in BASES}
            for share in SHARES:
                call = call_of(shape, sizes, length, share / 100, ((), ()), gradients)
                for name in BACKENDS:
                    runs[f"{name}, {share} %"] = sorted_run(name, call, gradients)
            for name in BACKENDS:
                whole = backend_of(name, call)
                runs[f"{name}, whole, {SHARES[-1]} %"] = whole if isinstance(whole, str) else call.run(whole, gradients)
            runs[f"plan, {SHARES[-1]} %"] = functools.partial(planned, call, gradients)
            record.cell(f"{length}, {name_of(gradients)}", runs, BASES)


def planned(call: Call, gradients: bool) -> Plan:
    """The plan of a call whose heads are all routed."""
    query, key, *_ = call.inputs
    heads = query.shape[1]
    _, table = group_table(tuple(range(heads)), heads // key.shape[1], query.device)
    return plan_of(call.first, call.seen, table, key.shape[2], gradients)


def sorted_run(name: str, call: Call, gradients: bool) -> Run | str:
    """A backend's attention of sorted queries, or why it has none."""
    found = backend_of(name, call)
    if isinstance(found, str):
        return found
    query, key, value, *_ = call.inputs
    plan, scaling = planned(call, gradients), query.shape[-1] ** -0.5
    rows = query.detach().transpose(1, 2).flatten(0, 2)
    entries = rows[plan.rows.clamp_max(len(rows) - 1)].requires_grad_(gradients)
    attend = importlib.import_module(f"moh_llm.attention.{name}").sorted_attention
    return pass_of(lambda q, k, v: attend(q, k, v, plan, scaling)[0], [entries, key, value], gradients)


# ---- decoding


def decoding_peers(inputs: list[torch.Tensor]) -> dict[str, Run]:
    """Dense attention of one token per row: by backends of SDPA, keys shared by it or as queries of one head."""
    query, key, value = inputs
    packed = query.reshape(len(query), key.shape[1], -1, query.shape[-1])
    found = {}
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        for way, q, gqa in (("shared", query, True), ("packed", packed, False)):

            def run(backend: SDPBackend = backend, q: torch.Tensor = q, gqa: bool = gqa) -> torch.Tensor:
                with sdpa_kernel(backend), torch.no_grad():
                    return scaled_dot_product_attention(q, key, value, enable_gqa=gqa)

            found[f"{backend.name.split('_')[0].lower()}, {way}"] = run
    return found


def decode(record: Record, sizes: Sizes) -> None:
    """Interval attention of one token per row over a cache, eager, where launches decide, and in a CUDA graph."""
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
                record.cell(f"{cell}, eager", runs, bases, more)
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
