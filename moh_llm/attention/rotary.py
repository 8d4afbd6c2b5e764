"""Rotary embedding on a GPU: transformers' function, compiled to one pass over queries and keys."""

import functools

import torch
from transformers.models.llama import modeling_llama as llama

from .call import FLOAT16
from .compiled import DEVICES, can_compile, compiled

NAME = "moh_rotary"  # its name in transformers' registry of attention functions


def rotary_embedding(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply rotary embedding to queries `[B, H, T, D]` and keys `[B, KV, T, D]`, bit for bit as transformers does.

    `cos` and `sin` are `[B or 1, T, D]`. Single tokens are not compiled, since the call costs more than it saves.
    Neither is float32, where compiled code fuses a product and a sum and rounds once.
    """
    dtypes = {states.dtype for states in (query, key, cos, sin)}
    is_plain = len(dtypes) > 1 or query.dtype not in FLOAT16 or query.shape[2] == 1
    if is_plain or torch.compiler.is_compiling() or query.device.type not in DEVICES or not can_compile(query.device):
        return llama.apply_rotary_pos_emb(query, key, cos, sin)
    # Not views: dynamo guards on the base of a view.
    by_token = (states.transpose(1, 2).contiguous() for states in (query, key))
    query, key = _rotated(*(torch.ops.aten._unsafe_view(states, states.shape) for states in by_token), cos, sin)
    return query.transpose(1, 2), key.transpose(1, 2)


@functools.partial(compiled, emulate_precision_casts=True)  # rounds after each operation, as eager code does
def _rotated(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rotary_embedding` of queries `[B, T, H, D]` and keys `[B, T, KV, D]`."""
    return llama.apply_rotary_pos_emb(query, key, cos, sin, unsqueeze_dim=2)
