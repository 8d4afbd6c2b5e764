"""Backends of `interval_attention`: the operation of `moh_llm.modeling.interval_attention_moh`, faster.

`import moh_llm` registers `interval_attention` with transformers, where MoH layers find it, those of a checkpoint's own
code, too. Each backend is a function of the same arguments, and one beside it that says why it does not take them:

- ``decode``: one new token per row on a GPU, by Triton.
- ``flash``: flash-attn-4, on Hopper and Blackwell GPUs.
- ``flex``: FlexAttention, on any GPU.
- ``cpu``: PyTorch's flash attention for CPUs.
- ``reference``: what travels with checkpoints; it takes everything.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface
from transformers.utils import logging

from moh_llm.attention import cpu, decode, flash, flex, rotary
from moh_llm.attention.compiled import DEVICES
from moh_llm.modeling.interval_attention_moh import NAME, Distant, reference_attention
from moh_llm.modeling.seen_moh import Seen

# Of each backend its function, and the one that says why it does not take the same arguments. The first that does is
# chosen.
BACKENDS: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., str | None]]] = {
    "decode": (decode.decode_attention, decode.why_not),
    "flash": (flash.flash_attention, flash.why_not),
    "flex": (flex.flex_attention, flex.why_not),
    "cpu": (cpu.cpu_attention, cpu.why_not),
}


class Choice(NamedTuple):
    """The backend that was chosen, and why: what those before it lack."""

    name: str
    why: str


def choose(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    first: torch.Tensor,
    seen: Seen,
    scaling: float,
    distant: Distant | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> Choice:
    """The backend for these arguments of `interval_attention`."""
    if seen.visible is not None and query.shape[2] > 1:
        return Choice("reference", "a mask hides keys between others")
    if dropout:
        return Choice("reference", "there is dropout")
    reasons = []
    for name, (_, why_not) in BACKENDS.items():
        reason = why_not(query, key, value, first, seen, scaling, distant, dropout, **kwargs)
        if reason is None:
            return Choice(name, "; ".join(reasons))
        reasons.append(f"{name}: {reason}")
    return Choice("reference", "; ".join(reasons))


def choose_for(device: torch.device | str, dtype: torch.dtype, head_dim: int, length: int = 256) -> Choice:
    """The backend of a prompt of so many tokens, or of a step of decoding, for inference on this device."""
    states = torch.zeros(1, 1, 256, head_dim, device=device, dtype=dtype)
    positions = torch.arange(256 - length, 256, device=device)[None]
    seen = Seen.of(positions, torch.zeros_like(positions), window=16)._replace(is_causal=length == 256)
    with torch.no_grad():
        first = seen.first(torch.ones(1, length, 1, dtype=torch.bool, device=device))
        return choose(states[:, :, -length:], states, states, first, seen, 1.0)


def interval_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    first: torch.Tensor,
    seen: Seen,
    scaling: float,
    distant: Distant | None = None,
    dropout: float = 0.0,
    kinds: tuple[tuple[int, ...], tuple[int, ...]] | None = None,
    module: torch.nn.Module | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """`moh_llm.modeling.interval_attention_moh.interval_attention`, by the backend that is chosen.

    `kinds` are the sorted ids of heads that are on for every token, and of those that are off for every token that
    `seen.all_on` does not name; None where this is not known.
    """
    if not isinstance(key, torch.Tensor):  # what a cache that lays keys out in its own way gives in their place
        more = {"kinds": kinds, "module": module, **kwargs}
        return key.attend(interval_attention, query, first, seen, scaling, distant, dropout, **more)
    if query.device.type in DEVICES and torch.is_autocast_enabled(query.device.type):  # as autocast has it for SDPA
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)  # queries are wider after rotary embedding
    given = query, key, value, first, seen, scaling, distant, dropout
    name = choose(*given, kinds=kinds).name
    return reference_attention(*given) if name == "reference" else BACKENDS[name][0](*given, kinds=kinds)


def _instead_of_moh_sparse(*given: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """SDPA, for models that ask for the implementation of earlier versions."""
    message = "attn_implementation='moh_sparse' is gone: heads that are off choose their attention by what is there"
    logging.get_logger(__name__).warning_once(message)
    return sdpa_attention_forward(*given, **kwargs)


AttentionInterface.register(NAME, interval_attention)
AttentionInterface.register(rotary.NAME, rotary.rotary_embedding)
AttentionInterface.register("moh_sparse", _instead_of_moh_sparse)
AttentionMaskInterface.register("moh_sparse", sdpa_mask)
