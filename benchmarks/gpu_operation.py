"""Section of `gpu.py` without MoH, facts, and passes of dense attention."""

import functools
import importlib.metadata
from collections.abc import Callable

import torch
from gpu_rows import Record, Row, Run, Shape, Sizes, device_of
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from moh_llm.devices import name_device

Attention = Callable[..., torch.Tensor]
PACKAGES = ("torch", "triton", "transformers", "flash-attn-4", "flash-attn", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12")


# ---- facts


def facts(record: Record, sizes: Sizes) -> None:
    """Versions, and what the card moves and multiplies."""
    device, dtype = device_of()
    record.note("versions", lambda: versions(device))
    record.note("speed", lambda: speed(record, device, dtype))


def versions(device: torch.device) -> Row:
    found: Row = {"device": name_device(device), "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    here = {one.name.lower().replace("_", "-"): one.version for one in importlib.metadata.distributions()}
    return found | {name: here.get(name) for name in PACKAGES}


def speed(record: Record, device: torch.device, dtype: torch.dtype) -> Row:
    """Bytes that a copy moves, read and written, and FLOPs of a product of random matrices, per second."""
    count, side = (1 << 30, 8192) if device.type == "cuda" else (1 << 20, 128)
    source = torch.empty(count, dtype=torch.int8, device=device)
    target, left, right = torch.empty_like(source), *torch.randn(2, side, side, device=device, dtype=dtype)
    times = record.clock.turns({"copy": lambda: target.copy_(source), "product": lambda: left @ right})
    copy, product = (sorted(times[name])[len(times[name]) // 2] / 1e3 for name in ("copy", "product"))
    return {"copy_gb_s": round(2 * count / copy / 1e9), "product_tflops": round(2 * side**3 / product / 1e12, 1)}


# ---- dense attention


def states(shape: Shape, length: int, gradients: bool, rows: int = 1) -> list[torch.Tensor]:
    """Random queries `[B, H, T, D]`, keys and values `[B, KV, T, D]`, laid out as projections leave them."""
    device, dtype = device_of()
    drawn = (
        torch.randn(rows, length, heads, shape.size, device=device, dtype=dtype).transpose(1, 2)
        for heads in (shape.heads, shape.groups, shape.groups)
    )
    return [tensor.requires_grad_(gradients) for tensor in drawn]


def pass_of(attend: Attention, inputs: list[torch.Tensor], gradients: bool) -> Run:
    """Forward, or forward and the gradients of those inputs that have them."""

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return attend(*inputs)

    wanted, grads = [tensor for tensor in inputs if tensor.requires_grad], []

    def both() -> tuple[torch.Tensor, ...]:
        out = attend(*inputs)
        grads.append(gradient_of(out)) if not grads else None
        return torch.autograd.grad(out, wanted, grads[0])

    return both if gradients else forward


def gradient_of(out: torch.Tensor) -> torch.Tensor:
    """Random numbers for the gradient of an output, the same for every dtype."""
    generator = torch.Generator(out.device).manual_seed(0)
    return torch.randn(out.shape, generator=generator, device=out.device, dtype=device_of()[1]).to(out.dtype)


def graphed(run: Run) -> Run:
    """The same as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def graphs_of(runs: dict[str, Run]) -> dict[str, Run]:
    """The same as CUDA graphs, which are recorded when they are first called; on other devices as they are."""
    if device_of()[0].type != "cuda":
        return runs

    def late(run: Run) -> Run:
        recorded = functools.cache(functools.partial(graphed, run))  # what fails then is that row's
        return lambda: recorded()()

    return {peer: late(run) for peer, run in runs.items()}


def sdpa(backend: SDPBackend) -> Attention:
    """Causal attention `[B, T, H, D]` by one backend of SDPA, which shares keys within groups itself."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

    return attend


# What SDPA has: the base's attention is pinned to each, and the faster one counts.
PINNED = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash (FA2)": SDPBackend.FLASH_ATTENTION}
DENSE: dict[str, Attention] = {peer: sdpa(backend) for peer, backend in PINNED.items()}


def name_of(gradients: bool) -> str:
    return "with backward" if gradients else "forward"
