"""Section of `gpu.py` that says where the time of a layer goes: its kernels, by PyTorch's profiler."""

import functools
from collections import defaultdict

import torch
from gpu_layers import PINNED, PLANS, arguments_of, balance, layer_of, whole
from gpu_operation import name_of
from gpu_rows import Record, Row, Run, Sizes, device_of
from torch.profiler import ProfilerActivity, profile

from moh_llm.devices import synchronize

PASSES = 4
SHOWN = ("fixed 50 %", "mixed 50 %")


def kernels(record: Record, sizes: Sizes) -> None:
    """Microseconds of each kernel in attention of a layer: the base's, and those of two plans, at the first length."""
    device, dtype = device_of()
    name, shape = next(iter(sizes.shapes.items()))
    length = sizes.lengths[0]
    inputs = torch.randn(1, length, shape.width, device=device, dtype=dtype)
    base = layer_of(shape, sizes, None, None)
    for gradients in (False, True):
        module, args, kwargs = arguments_of(base, inputs)
        hidden = args[0] if args else kwargs["hidden_states"]
        runs = {"base": whole(module, args, kwargs, gradients, PINNED["cudnn"] if device.type == "cuda" else None)}
        for plan in SHOWN:
            model = layer_of(shape, sizes, PLANS[plan], base)
            balance(model, hidden)
            runs[plan] = whole(*arguments_of(model, inputs), gradients, None)
        for plan, run in runs.items():
            record.note(f"{name}, 1 x {length}, {name_of(gradients)}, {plan}", functools.partial(profiled, run, device))


def profiled(run: Run, device: torch.device) -> Row:
    """Of each kernel the microseconds and the launches in one pass, the longest first."""
    for _ in range(3):
        run()
    synchronize(device)
    on_cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    with profile(activities=activities) as found:
        for _ in range(PASSES):
            run()
        synchronize(device)
    times, launches = defaultdict(float), defaultdict(float)
    for event in found.events():
        if not on_cuda or event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name] += (event.device_time if on_cuda else event.self_cpu_time_total) / PASSES
            launches[event.name] += 1 / PASSES
    order = sorted(times, key=times.get, reverse=True)
    kernels = {name: [round(times[name], 1), launches[name]] for name in order}
    return {"us": round(sum(times.values()), 1), "kernels": kernels}
