"""Sections of `gpu.py` without MoH: facts, dense attention, attention of the last keys."""

import functools
import importlib
import importlib.metadata
import inspect
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import torch
from gpu_rows import Record, Row, Run, Shape, Sizes, device_of
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from moh_llm.devices import name_device

Attention = Callable[..., torch.Tensor]
PACKAGES = ("torch", "triton", "transformers", "flash-attn-4", "flash-attn", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12")
SIGNATURES = (
    "torch.ops.aten._flash_attention_forward.default",
    "torch.ops.aten._flash_attention_backward.default",
    "torch.ops.aten._scaled_dot_product_cudnn_attention.default",
    "torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default",
    "torch.nn.attention.varlen.varlen_attn",
    "torch.nn.attention.flex_attention.flex_attention",
    "flash_attn.cute.interface._flash_attn_fwd",
    "flash_attn.cute.interface._flash_attn_bwd",
    "flash_attn.cute.interface.flash_attn_func",
    "flash_attn.cute.block_sparsity.BlockSparseTensorsTorch",
)


# ---- facts


def facts(record: Record, sizes: Sizes) -> None:
    """Versions, the card, what it moves and multiplies, and the signatures that backends rest on."""
    device, dtype = device_of()
    record.note("versions", lambda: versions(device))
    record.note("card", functools.partial(card, device))
    record.note("speed", lambda: speed(record, device, dtype))
    for name in SIGNATURES:
        record.note(name, functools.partial(signature, name))


def versions(device: torch.device) -> Row:
    found: Row = {"device": name_device(device), "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def card(device: torch.device) -> Row:
    if device.type != "cuda":
        return {"note": "no CUDA device"}
    fields = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,memory.total"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", "-i", "0"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    return dict(zip(fields.split(","), said.strip().split(", "), strict=False))


def speed(record: Record, device: torch.device, dtype: torch.dtype) -> Row:
    """Bytes that a copy moves, read and written, and FLOPs of a product of random matrices, per second."""
    count, side = (1 << 30, 8192) if device.type == "cuda" else (1 << 20, 128)
    source = torch.empty(count, dtype=torch.int8, device=device)
    target, left, right = torch.empty_like(source), *torch.randn(2, side, side, device=device, dtype=dtype)
    times = record.clock.turns({"copy": lambda: target.copy_(source), "product": lambda: left @ right})
    copy, product = (sorted(times[name])[len(times[name]) // 2] / 1e3 for name in ("copy", "product"))
    return {"copy_gb_s": round(2 * count / copy / 1e9), "product_tflops": round(2 * side**3 / product / 1e12, 1)}


def signature(name: str) -> Row:
    if name.startswith("torch.ops."):
        found = functools.reduce(getattr, name.removeprefix("torch.").split("."), torch)
        return {"signature": str(found._schema)}
    module, _, member = name.rpartition(".")
    return {"signature": str(inspect.signature(getattr(importlib.import_module(module), member)))}


# ---- dense and windowed attention


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


class Late:
    """A run that is made when it is first called, so that what fails then is that row's."""

    def __init__(self, make: Callable[[], Run]):
        self.make, self.run = make, None

    def __call__(self) -> Any:
        if self.run is None:
            self.run = self.make()
        return self.run()


def graphs_of(runs: dict[str, Run]) -> dict[str, Run | str]:
    """The same as CUDA graphs, which are recorded when they are first called."""
    if device_of()[0].type != "cuda":
        return dict.fromkeys(runs, "no CUDA device")
    return {peer: Late(functools.partial(graphed, run)) for peer, run in runs.items()}


def sdpa(backend: SDPBackend) -> Attention:
    """Causal attention `[B, T, H, D]` by one backend of SDPA, which shares keys within groups itself."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

    return attend


def aten_flash(window: int | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """FlashAttention-2 as PyTorch carries it, of the last `window` keys, or of all."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    sides = {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}
    length = q.shape[1]
    return torch.ops.aten._flash_attention_forward(
        q, k, v, None, None, length, length, 0.0, window is None, False, scale=q.shape[-1] ** -0.5, **sides
    )[0]


def fa4(window: int | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """FlashAttention-4, of the last `window` keys, or of all."""
    from flash_attn.cute.interface import flash_attn_func

    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    sides = {"causal": True} if window is None else {"window_size": (window - 1, 0)}
    found = flash_attn_func(q, k, v, **sides)
    return found[0] if isinstance(found, tuple) else found


DENSE: dict[str, Attention] = {
    "cudnn": sdpa(SDPBackend.CUDNN_ATTENTION),
    "flash (FA2)": sdpa(SDPBackend.FLASH_ATTENTION),
    "fa4": functools.partial(fa4, None),
}
BASES = ("cudnn", "flash (FA2)")  # what SDPA has: the base's attention is pinned to each, and the faster one counts


def flops(shape: Shape, length: int, gradients: bool, rows: int = 1) -> float:
    """Of causal attention: two products, and five more of the backward pass."""
    return (7 if gradients else 2) * rows * shape.heads * shape.size * length * (length + 1)


def sizes_of_heads(sizes: Sizes) -> Iterator[tuple[str, Shape]]:
    """LLaMA3-8B's heads, and as many of half the size."""
    shape = sizes.shapes["llama3-8b"]
    yield from ((f"D {size}", shape._replace(size=size)) for size in (shape.size, shape.size // 2))


def name_of(gradients: bool) -> str:
    return "with backward" if gradients else "forward"


def dense(record: Record, sizes: Sizes) -> None:
    """Causal attention by cuDNN, FA2 and FA4."""
    for length in sizes.lengths:
        for name, shape in sizes_of_heads(sizes):
            for gradients in (False, True):
                inputs = states(shape, length, gradients)
                runs = {peer: pass_of(attend, inputs, gradients) for peer, attend in DENSE.items()}
                work = {"flops": flops(shape, length, gradients)}
                record.cell(f"{name}, {length}, {name_of(gradients)}", runs, runs, {peer: work for peer in runs})


def window(record: Record, sizes: Sizes) -> None:
    """Attention of the last keys by FA2 and FA4, beside dense attention."""
    for length in sizes.lengths:
        for name, shape in sizes_of_heads(sizes):
            for gradients in (False, True):
                inputs = states(shape, length, gradients)
                runs = {peer: pass_of(DENSE[peer], inputs, gradients) for peer in BASES}
                for peer, attend in (("window, FA2", aten_flash), ("window, fa4", fa4)):
                    runs[peer] = pass_of(functools.partial(attend, sizes.window), inputs, gradients)
                record.cell(f"{name}, {length}, {name_of(gradients)}", runs, BASES)
