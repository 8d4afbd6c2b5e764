"""Sections of `gpu.py` about attention of whole layers with several plans: its time, and that of each kernel."""

import contextlib
import functools
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from gpu_backends import Call, by_the_model, chosen, split_heads
from gpu_operation import DENSE, PINNED, gradient_of, graphs_of, name_of, pass_of
from gpu_rows import Record, Row, Run, Shape, Sizes, device_of
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaModel, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from moh_llm.devices import synchronize
from moh_llm.modeling import MoHLlamaConfig, MoHLlamaModel
from moh_llm.modeling.interval_attention_moh import NAME

PLANS = {  # shares of heads that are always and never on; of the others half are on
    "fixed 50 %": (0.5, 0.5),
    "mixed 50 %": (0.25, 0.25),
    "75 %": (0.5, 0.0),
    "routed 50 %": (0.0, 0.0),
}
ROWS = {"smollm2-135m": 8}  # up to 8,192 tokens, where one row does not fill a GPU
VOCABULARY = 1024
PASSES = 4  # of a profile


def config_of(shape: Shape, sizes: Sizes, plan: tuple[float, float] | None, **more: Any) -> LlamaConfig:
    """Of the dense model, or of the plan, with local fallbacks."""
    fields = {"num_attention_heads": shape.heads, "num_key_value_heads": shape.groups, "head_dim": shape.size}
    fields |= {"hidden_size": shape.width, "max_position_embeddings": 1 << 17, "vocab_size": VOCABULARY}
    fields |= {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None} | more
    if plan is None:
        return LlamaConfig(**fields)
    shared, local = split_heads(shape, *plan)
    routed = shape.heads - len(shared) - len(local)
    layers = fields["num_hidden_layers"]
    return MoHLlamaConfig(
        **fields,
        num_shared_heads=len(shared),
        shared_heads=[list(shared)] * layers,
        never_on_heads=[list(local)] * layers,
        num_active_heads=len(shared) + routed // 2,
        router_type="threshold" if routed else "none",
        head_fallback="local",
        local_window=sizes.window,
        local_sinks=sizes.sinks,
        local_start=sizes.start,
    )


def layer_of(shape: Shape, sizes: Sizes, plan: tuple[float, float] | None, base: nn.Module | None) -> PreTrainedModel:
    """A decoder of one layer with random weights, those of `base` where it is given; routers are frozen."""
    device, dtype = device_of()
    config = config_of(shape, sizes, plan, num_hidden_layers=1, intermediate_size=8)
    torch.manual_seed(0)
    with torch.device(device):
        model = (LlamaModel if plan is None else MoHLlamaModel)(config).to(dtype).eval()
    if base is not None:
        model.load_state_dict(base.state_dict(), strict=False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".router." not in name)
    return model


def balance(model: PreTrainedModel, hidden: torch.Tensor) -> None:
    """Biases with which half of the tokens have each routed head on."""
    router = model.layers[0].self_attn.router
    if hasattr(router, "routed"):
        with torch.no_grad():
            router.routed.bias -= router.routed(hidden).flatten(0, 1).float().median(0).values.to(hidden.dtype)


@contextlib.contextmanager
def calls_of(found: list[Call]) -> Iterator[None]:
    """Within the block arguments of `interval_attention` are kept."""
    before = ALL_ATTENTION_FUNCTIONS.get(NAME)

    def attend(query, key, value, first, seen, scaling, distant, dropout=0.0, kinds=((), ()), **kwargs):
        found.append(Call([query, key, value, *distant], first, seen, kinds))
        return query.transpose(1, 2)

    ALL_ATTENTION_FUNCTIONS[NAME] = attend
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS[NAME]
        if before is not None:
            ALL_ATTENTION_FUNCTIONS.register(NAME, before)


def arguments_of(model: PreTrainedModel, inputs: torch.Tensor) -> tuple[nn.Module, dict[str, Any]]:
    """The model's attention, and the keyword arguments that it is called with."""
    module, kept = model.layers[0].self_attn, []
    handle = module.register_forward_pre_hook(lambda _, args, kwargs: kept.append(kwargs), with_kwargs=True)
    try:
        with torch.no_grad():
            model(inputs_embeds=inputs, use_cache=False)
    finally:
        handle.remove()
    return module, kept[0]


def whole(module: nn.Module, kwargs: dict[str, Any], gradients: bool, pinned: SDPBackend | None) -> Run:
    """Attention of a layer from its input on: forward, or with gradients of the input and of all that is trained."""
    hidden = kwargs["hidden_states"].detach().requires_grad_(gradients)
    kwargs = kwargs | {"hidden_states": hidden}
    wanted = [hidden, *(parameter for parameter in module.parameters() if parameter.requires_grad)]
    grad = gradient_of(hidden)

    def run() -> Any:
        with contextlib.nullcontext() if pinned is None else sdpa_kernel(pinned):
            if not gradients:
                with torch.no_grad():
                    return module(**kwargs)[0]
            out = module(**kwargs)[0]
            return torch.autograd.grad(out, wanted, grad, allow_unused=True)

    return run


def random_like(states: torch.Tensor, width: int) -> torch.Tensor:
    """Random states of another width."""
    return torch.randn(*states.shape[:-1], width, device=states.device, dtype=states.dtype)


def projections(module: nn.Module, hidden: torch.Tensor, gradients: bool) -> Run:
    """The linear maps of attention alone."""
    maps = module.q_proj, module.k_proj, module.v_proj, module.o_proj
    wide = random_like(hidden, module.o_proj.in_features).requires_grad_(gradients)
    own = hidden.detach().requires_grad_(gradients)
    grads = [random_like(hidden, layer.out_features) for layer in maps]

    def run() -> Any:
        if not gradients:
            with torch.no_grad():
                return [layer(own) for layer in maps[:3]], maps[3](wide)
        outs = [layer(wide if layer is maps[3] else own) for layer in maps]
        wanted = [own, wide, *(layer.weight for layer in maps)]
        return torch.autograd.grad(outs, wanted, grads)

    return run


def layer(record: Record, sizes: Sizes) -> None:
    """Attention of a layer with each plan beside the dense layer's, and interval attention beside dense attention."""
    for name, shape in sizes.shapes.items():
        for length in sizes.lengths:
            rows = ROWS.get(name, 1) if length <= 8192 else 1
            for gradients in (False, True):
                cell = f"{name}, {rows} x {length}, {name_of(gradients)}"
                measure_layer(record, sizes, cell, shape, rows, length, gradients)


def measure_layer(
    record: Record, sizes: Sizes, cell: str, shape: Shape, rows: int, length: int, gradients: bool
) -> None:
    """The cells of one shape, length and pass: a layer, and the operation alone, in CUDA graphs."""
    if time.time() > record.until:
        record.note(cell, dict)
        return
    device, dtype = device_of()
    inputs = torch.randn(rows, length, shape.width, device=device, dtype=dtype)
    base = layer_of(shape, sizes, None, None)
    module, kwargs = arguments_of(base, inputs)
    hidden = kwargs["hidden_states"]
    runs: dict[str, Run] = {"projections": projections(module, hidden, gradients)}
    runs |= {peer: whole(module, kwargs, gradients, pinned) for peer, pinned in PINNED.items()}
    operations: dict[str, Run] = {}
    more: dict[str, Row] = {}
    for plan, shares in PLANS.items():
        model = layer_of(shape, sizes, shares, base)
        balance(model, hidden)
        calls: list[Call] = []
        with calls_of(calls):
            module, kwargs = arguments_of(model, inputs)
        runs[plan] = whole(module, kwargs, gradients, None)
        if calls:  # without calls all heads are on
            call = calls[0]._replace(inputs=[x.detach().requires_grad_(gradients) for x in calls[0].inputs])
            operations[plan] = call.run(by_the_model, gradients)
            more[plan] = chosen(call) | {"keys": round(keys_of(call), 3)}
            states = call.inputs[:3]
    less = {peer: "projections" for peer in runs if peer != "projections"}
    record.cell(f"{cell}, graph", graphs_of(runs), PINNED, more, less)
    if operations:
        operations = {peer: pass_of(attend, states, gradients) for peer, attend in DENSE.items()} | operations
        record.cell(f"{cell}, operation", graphs_of(operations), DENSE, more)


def keys_of(call: Call) -> float:
    """Share of the keys of causal attention that heads read."""
    last, start, sink_end = call.seen.last, call.seen.start, call.seen.sink_end
    read = (last - call.first + 1).clamp_min(0) + (torch.minimum(sink_end, call.first) - start).clamp_min(0)
    return (read.sum() / (last - start + 1).expand_as(read).sum()).item()


def kernels(record: Record, sizes: Sizes) -> None:
    """Microseconds of each kernel in attention of a layer: the base's, and those of two plans, at the first length."""
    device, dtype = device_of()
    name, shape = next(iter(sizes.shapes.items()))
    length = sizes.lengths[0]
    inputs = torch.randn(1, length, shape.width, device=device, dtype=dtype)
    base = layer_of(shape, sizes, None, None)
    for gradients in (False, True):
        module, kwargs = arguments_of(base, inputs)
        hidden = kwargs["hidden_states"]
        runs = {"base": whole(module, kwargs, gradients, PINNED["cudnn"] if device.type == "cuda" else None)}
        for plan in ("fixed 50 %", "mixed 50 %"):
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
