"""Local attention: each token sees the first tokens of its document, the last tokens, and a distant token for the rest.

The distant token is a score and a value per head. It stands for the tokens that are out of sight: its score grows with
the logarithm of their number, as their sum in the softmax does. Time and memory are linear in the number of tokens:
queries are taken in blocks, and a block of queries sees the keys of its band and the document's first ones. It runs on
`scaled_dot_product_attention` alone, on a CPU on its flash kernel.

Shapes: B batch, T queries, S keys (of the cache and of this pass), H query heads, KV key-value heads, D head size.
"""

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from .cache_moh import Kept, can_be_read, least_recent
from .documents_moh import Band
from .flash_attention_moh import (
    attention_and_distant,
    dtype_of_attention,
    flash_attention,
    has_flash_attention,
    has_flash_kernel,
)
from .masks_moh import Shown, keys_of_ranks, ranks_of, visible_keys

_WIDER = 8  # entries that the distant token adds to queries, keys and values: kernels want multiples of 8


def local_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    band: Band,
    scaling: float,
    dropout: float = 0.0,
    distant: tuple[torch.Tensor, torch.Tensor] | None = None,
    groups: torch.Tensor | slice | None = None,
) -> torch.Tensor:
    """Attention of each query to the keys that `band` shows it.

    With n keys out of sight the softmax has one more entry where n > 0, the distant token's: its score is that given
    plus log n. Query heads that share keys and values are queries of one attention, so that keys are copied once.

    Args:
        queries: `[B, H, T, D]`, after rotary embedding. As many heads in a row share each key-value head.
        keys, values: `[B, KV, S, D]`, those of a cache included; entries after a query are not read.
        band: of these queries.
        scaling: factor of the scores.
        dropout: probability.
        distant: scores of the distant token `[B, H, T]` (already scaled) and its values `[H, D]`.
        groups: the key-value heads that these queries share, as ids or a slice; None: all of them.

    Returns:
        Head outputs `[B, T, H, D]`.
    """
    batch, heads, length, size = queries.shape
    taken, is_step = [band.take(tensor, groups) for tensor in (keys, values)], band.step is not None
    merges = not dropout and has_flash_kernel(queries)
    if is_step and has_flash_attention(queries) and not dropout:
        return _of_step(queries, *taken, band.hidden, scaling, distant)
    count = taken[0].shape[2]
    blocks, shared = band.blocks(queries, count), heads // count
    scores, mask = None, None
    if distant is not None:
        scores = distant[0] + band.hidden.clamp_min(1).log().unsqueeze(1)
        scores = scores.masked_fill(band.hidden.unsqueeze(1) < 1, -torch.inf) if merges else scores
        scores = band.blocks(scores.unsqueeze(-1), count)
    if not is_step:  # else all keys that were taken are visible
        mask = band.mask(
            batch, shared, distant is not None and not merges, dtype_of_attention(keys) if merges else None
        )
    if merges:
        given = [tensor.flatten(0, 1) for tensor in (blocks, *taken)]
        token = None if scores is None else (scores[..., 0].flatten(0, 1), distant[1].view(count, shared, 1, size))
        out = attention_and_distant(*given, mask, scaling, token)
    else:
        if distant is not None:
            # One more entry of the queries is the score, and one of the values the weight of the distant token.
            scores = (scores / scaling).to(queries.dtype)
            blocks = torch.cat([blocks, scores, scores.new_zeros(1).expand(*scores.shape[:-1], _WIDER - 1)], dim=-1)
            kept = taken[0].shape[3] - (not is_step)  # the last key of a block that is no step is not visible
            taken = [pad(tensor[..., :kept, :], (0, _WIDER, 0, 1)) for tensor in taken]
            for tensor in taken:
                tensor[..., -1, size] = 1
        given = [tensor.flatten(0, 1) for tensor in (blocks.flatten(3, 4), *taken)]
        out = scaled_dot_product_attention(*given, attn_mask=mask, dropout_p=dropout, scale=scaling)
    # [B, N, KV, H / KV, block, D] to [B, T, H, D]
    out = out.view(blocks.shape[:-1] + out.shape[-1:])
    out = out.permute(0, 1, 4, 2, 3, 5).reshape(batch, -1, heads, out.shape[-1])[:, :length]
    if merges or distant is None:
        return out
    return out[..., :size] + out[..., size : size + 1] * distant[1].to(out.dtype)


def _of_step(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    hidden: torch.Tensor,
    scaling: float,
    distant: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """`local_attention` of one query per row, which sees all of these keys `[B, 1, KV, K, D]`, by `flash_attention`."""
    batch, heads, _, size = queries.shape
    count = keys.shape[2]
    own = queries.reshape(batch, count, -1, size)
    out, sums = flash_attention(own, keys[:, 0], values[:, 0], scale=scaling)
    if distant is not None:
        scores = (distant[0][..., 0] + hidden.log()).view(sums.shape)
        weights = torch.sigmoid(scores - sums).to(out.dtype)
        out = out.lerp(distant[1].to(out.dtype).view(count, -1, size), weights.unsqueeze(-1))
    return out.reshape(batch, 1, heads, size)


def band_of(
    mask: object,
    positions: torch.Tensor,
    starts: torch.Tensor,
    counts: torch.Tensor | None,
    window: int,
    sinks: int,
    all_on_until: int,
) -> Band | Shown | None:
    """Which keys local attention shows under a mask; arguments but the mask are those of `Band.of`.

    None where all queries are known to have all heads on.
    """
    if counts is None and isinstance(mask, torch.Tensor) and mask.dim() == 4:
        starts = starts.expand(-1, positions.shape[1]).cummax(-1).values
        if not _is_of_documents(mask, positions, starts):
            return Shown.of(mask.to(positions.device), positions, window, sinks, all_on_until)
    return Band.of(positions, starts, window, sinks, all_on_until, counts)


def _is_of_documents(mask: torch.Tensor, positions: torch.Tensor, starts: torch.Tensor) -> bool:
    """Whether a mask `[B, 1 or H, T, S]` shows each query its document up to itself, or nothing.

    Documents begin at `starts` `[B, T]`. Where that cannot be read it is not known.
    """
    if not can_be_read(mask):
        return False
    index, visible = torch.arange(mask.shape[-1], device=mask.device), visible_keys(mask)
    first, last = (tensor.to(mask.device)[:, None, :, None] for tensor in (starts, positions))
    shown = mask == 0 if mask.is_floating_point() else visible
    is_right = torch.where((index >= first) & (index <= last), shown, ~visible) | ~visible.any(-1, keepdim=True)
    begins = (starts[:, 1:] == starts[:, :-1]) | (starts[:, 1:] == positions[:, 1:])
    return bool(is_right.all() & begins.all())


def kept_tokens(
    mask: object,
    band: Band | Shown | None,
    positions: torch.Tensor,
    starts: torch.Tensor,
    counts: torch.Tensor | None,
    window: int,
    sinks: int,
    all_on_until: int,
) -> Kept:
    """What a `MoHCache` keeps after queries at `positions`, whose band is `band`; other arguments are `band_of`'s."""
    positions, starts = ranks_of(positions, starts, counts)
    last, start = positions[:, -1:], starts[:, -1:]
    first = keys_of_ranks(torch.maximum(positions[:, :1] - window + 1, starts[:, :1]), counts)
    late = keys_of_ranks(start + all_on_until - 1, counts) + 1
    recent = None
    if counts is not None:
        recent = keys_of_ranks(last + 1 - least_recent(window, sinks), counts)
        late = late.masked_fill(last < start + all_on_until - 1, torch.iinfo(late.dtype).max)
    elif mask is not None and not isinstance(band, Band):  # nothing is dropped
        recent = torch.zeros_like(start)
    numbers = torch.arange(sinks, device=start.device)
    return Kept(keys_of_ranks(start + numbers, counts), first, recent, late, mask is not None)
