"""Backends of `interval_attention`: the operation of `moh_llm.modeling.interval_attention_moh`, faster.

`import moh_llm` registers `interval_attention` with transformers, where MoH layers find it, including the layers of a
checkpoint's own code. Each backend is a function of a `Call`, with a second function that says why it refuses one:

- ``decode``: one new token per row on a GPU, by Triton.
- ``flash``: flash-attn-4, on Hopper and Blackwell GPUs.
- ``flex``: FlexAttention, on any GPU.
- ``cpu``: PyTorch's flash attention for CPUs.
- ``reference``: the PyTorch code that travels with checkpoints; it takes every call.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.modeling_utils import AttentionInterface

from moh_llm.attention import cpu, decode, flash, flex
from moh_llm.attention.call import Call, Kinds
from moh_llm.attention.compiled import DEVICES, ROTARY, rotary_embedding
from moh_llm.modeling.interval_attention_moh import NAME, Distant, reference_attention
from moh_llm.modeling.seen_moh import Seen

# name -> (attend, why_not), in order of preference: the first backend that takes a call computes it.
BACKENDS: dict[str, tuple[Callable[[Call], Tensor], Callable[[Call], str | None]]] = {
    "decode": (decode.decode_attention, decode.why_not),
    "flash": (flash.flash_attention, flash.why_not),
    "flex": (flex.flex_attention, flex.why_not),
    "cpu": (cpu.cpu_attention, cpu.why_not),
}


class Choice(NamedTuple):
    """The chosen backend, and why the ones before it refused."""

    name: str
    why: str


def choose(call: Call) -> Choice:
    """Choose the backend of a call."""
    if call.seen.visible is not None and call.query.shape[2] > 1:
        return Choice("reference", "a mask hides keys between others")
    if call.dropout:
        return Choice("reference", "there is dropout")
    reasons = []
    for name, (_, why_not) in BACKENDS.items():
        reason = why_not(call)
        if reason is None:
            return Choice(name, "; ".join(reasons))
        reasons.append(f"{name}: {reason}")
    return Choice("reference", "; ".join(reasons))


def choose_for(device: torch.device | str, dtype: torch.dtype, head_dim: int, length: int = 256) -> Choice:
    """Choose the backend for inference over a prompt of `length` tokens, or for a decoding step (`length=1`)."""
    states = torch.zeros(1, 1, 256, head_dim, device=device, dtype=dtype)
    positions = torch.arange(256 - length, 256, device=device)[None]
    seen = Seen.from_positions(positions, torch.zeros_like(positions), window=16)._replace(is_causal=length == 256)
    with torch.no_grad():
        first = seen.first(torch.ones(1, length, 1, dtype=torch.bool, device=device))
        return choose(Call(states[:, :, -length:], states, states, first, seen, 1.0))


def interval_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first: Tensor,
    seen: Seen,
    scaling: float,
    distant: Distant | None = None,
    dropout: float = 0.0,
    kinds: Kinds | None = None,
    module: torch.nn.Module | None = None,
    **kwargs: Any,
) -> Tensor:
    """`moh_llm.modeling.interval_attention_moh.interval_attention`, by the backend that `choose` picks."""
    if not isinstance(key, Tensor):  # a cache with a layout of its own
        call = Call(query, key, value, first, seen, scaling, distant, dropout, kinds)
        return key.attend(interval_attention, call, module=module, **kwargs)
    if query.device.type in DEVICES and torch.is_autocast_enabled(query.device.type):  # autocast does this for SDPA
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)  # queries are wider after rotary embedding
    call = Call(query, key, value, first, seen, scaling, distant, dropout, kinds)
    name = choose(call).name
    return reference_attention(*call[:-1]) if name == "reference" else BACKENDS[name][0](call)


AttentionInterface.register(NAME, interval_attention)
AttentionInterface.register(ROTARY, rotary_embedding)
