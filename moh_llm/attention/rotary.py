"""Rotary embedding on a GPU: transformers' function, compiled to one pass over queries and keys."""

import functools

import torch
from transformers.models.llama import modeling_llama as llama

from .call import FLOAT16
from .compiled import DEVICES, can_compile, compiled

NAME = "moh_rotary"  # under which MoH layers find it in transformers' list of attention functions


def rotary_embedding(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries `[B, H, T, D]` and keys `[B, KV, T, D]` after rotary embedding, bit for bit those of transformers.

    `cos` and `sin` are `[B or 1, T, D]`. Not compiled are a single new token, which is not worth the call, and float32,
    where compiled code rounds a product and a sum only once.
    """
    dtypes = {states.dtype for states in (query, key, cos, sin)}
    is_plain = len(dtypes) > 1 or query.dtype not in FLOAT16 or query.shape[2] == 1
    if is_plain or torch.compiler.is_compiling() or query.device.type not in DEVICES or not can_compile(query.device):
        return llama.apply_rotary_pos_emb(query, key, cos, sin)
    # No views: of a view dynamo looks at what it is a view of.
    by_token = (states.transpose(1, 2).contiguous() for states in (query, key))
    query, key = _rotated(*(torch.ops.aten._unsafe_view(states, states.shape) for states in by_token), cos, sin)
    return query.transpose(1, 2), key.transpose(1, 2)


@functools.partial(compiled, emulate_precision_casts=True)  # each operation rounds, as it does by itself
def _rotated(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rotary_embedding` of queries `[B, T, H, D]` and keys `[B, T, KV, D]`."""
    return llama.apply_rotary_pos_emb(query, key, cos, sin, unsqueeze_dim=2)
