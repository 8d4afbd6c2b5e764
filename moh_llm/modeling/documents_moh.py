"""Which tokens see nothing but themselves: the first ones of their documents.

Shapes: B batch, T tokens of this call, S keys (those of a cache first).
"""

import torch
from transformers.cache_utils import Cache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS


def first_tokens(
    inputs: torch.Tensor,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    past_key_values: Cache | None,
    use_cache: bool,
    implementation: str,
    paged: bool = False,
) -> torch.Tensor:
    """Whether a token is the first that attention shows it, `[B or 1, T]`.

    This is what transformers' masks make of the same arguments. What a query sees counts, and not the
    number of its position: logits do not depend on a shift of all positions.

    - A mask `[B, S]`: the first token of a row that is no padding. Documents are not told apart.
    - A mask `[B, 1 or H, T, S]` (boolean, or added to the scores): a query that sees one key.
    - No mask and no cache: the first token of a row, and where positions do not go on by one. With a
      cache the first token of a row only.
    - Flash attention tells documents apart in a batch of one row, with a cache, too, and in no other.
    - Attention that keeps keys itself (serving engines, paged caches, masks that are no tensors): position 0.

    Nothing here waits for the device. Padding may be marked or not: what stands there reaches nothing.

    Args:
        inputs: `[B, T, ...]`.
        attention_mask, position_ids, past_key_values: the model's arguments; positions `[B or 1, T]`.
        use_cache: whether the call makes a cache where there is none.
        implementation: the name of the attention implementation.
        paged: whether keys and values are in a paged cache.
    """
    if isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 4:
        visible = attention_mask != 0
        if attention_mask.is_floating_point():
            visible = attention_mask > torch.finfo(attention_mask.dtype).min / 2
        return (visible.sum(-1) == 1).any(1).to(inputs.device)
    # As create_causal_mask has it: there is no mask for an attention that has registered no way to make one.
    keeps_keys = paged or implementation not in ALL_MASK_ATTENTION_FUNCTIONS._global_mapping
    masked = attention_mask is not None
    if position_ids is not None and (keeps_keys or (masked and not isinstance(attention_mask, torch.Tensor))):
        return position_ids == 0
    before = 0 if past_key_values is None else past_key_values.get_seq_length()
    if isinstance(before, torch.Tensor):  # that of a static cache
        before = before.to(inputs.device)
    keys = torch.arange(inputs.shape[1], device=inputs.device)[None] + before
    if masked and isinstance(attention_mask, torch.Tensor):
        first = keys == (attention_mask != 0).int().argmax(-1, keepdim=True).to(inputs.device)
    else:
        first = keys == 0
    is_flash = "flash" in implementation
    tells_apart = inputs.shape[0] == 1 if is_flash else not (masked or use_cache or past_key_values is not None)
    if tells_apart and position_ids is not None:
        restarts = position_ids.diff(dim=-1) != 1
        first = first | torch.nn.functional.pad(restarts, (1, 0))
    return first


def first_seen(first: torch.Tensor) -> torch.Tensor:
    """The first token `[B, T]` (int32) that each one sees, given which are the first of their documents `[B, T]`."""
    places = torch.arange(first.shape[-1], device=first.device)
    return torch.where(first, places, 0).cummax(-1).values.to(torch.int32)


__all__ = ["first_seen", "first_tokens"]
