"""Sorts the queries of routed heads into blocks, so that one block-sparse attention call computes them.

The queries of all heads that share keys form one list of entries, one per (token, head). Entries whose head is on come
first, from the last token to the first, so that the longest blocks start first. Entries whose head is off follow in
token order. A block of entries therefore reads either a document from its start, or a band of keys and the sinks; few
blocks read both. The host never waits for the device, and shapes depend only on the shapes of the arguments.

Shapes: B batch, T queries, S keys, H query heads, D head size; G groups of heads that share keys, R heads of each,
N entries (T * R, filled up to blocks), M = N / 128 blocks of entries, K blocks of keys.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from moh_llm.modeling.seen_moh import Seen

from .compiled import compiled

BLOCK = 128
_NONE = 1 << 30  # after any key


class Blocks(NamedTuple):
    """The blocks that each of `rows` blocks reads, int32: counts `[B, G, rows]` and indices `[B, G, rows, all]`.

    Indices past the count are arbitrary. In a full block every query sees every key; in a partial block some pairs may
    be hidden.
    """

    partial_count: Tensor
    partial: Tensor
    full_count: Tensor
    full: Tensor


class Plan(NamedTuple):
    """Sorted entries, the keys each one sees, and the blocks of keys each block of entries reads.

    An entry sees key s if s <= last and (s >= low or start <= s < sink_end).

    Attributes:
        rows: row of each entry in the queries `[B * T * H, D]`, int64 `[B, G, N]`; B * T * H for padding entries.
        last: last visible key, int32 `[B, G, N]`; -1 for padding entries.
        low: first visible key, int32 `[B, G, N]`.
        start, sink_end: first sink and the key after the last sink, int32 `[B, G, N]`; None without sinks.
        keys: the blocks of keys that each block of entries reads.
        queries: the blocks of entries that read each block of keys, for the backward pass; None without gradients.
    """

    rows: Tensor
    last: Tensor
    low: Tensor
    start: Tensor | None
    sink_end: Tensor | None
    keys: Blocks
    queries: Blocks | None


def block_count(length: int) -> int:
    """Number of blocks for `length` items, at least two: torch.compile specialises on a size of one."""
    return max(-(-length // BLOCK), 2)


@functools.lru_cache(maxsize=1024)
def group_table(heads: tuple[int, ...], shared: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The groups of `heads`, int64 `[G]`, and each group's heads, `[G, R]`, padded with -1.

    `shared` is the number of query heads per key-value head. Cached, because a copy to a GPU makes the host wait.
    """
    groups = sorted({head // shared for head in heads})
    own = [[head for head in heads if head // shared == group] for group in groups]
    most = max(map(len, own))
    with torch.inference_mode(False):  # tensors of inference mode could not be used for gradients later
        table = torch.tensor([group + [-1] * (most - len(group)) for group in own], device=device)
        return torch.tensor(groups, device=device), table


@torch.no_grad()
def plan_of(first: Tensor, seen: Seen, table: Tensor, keys: int, gradients: bool) -> Plan:
    """Plan the heads in `table` `[G, R]`, given the first key of each query and head, `[B, T, H]`.

    `keys` is the number of keys (S); `gradients` adds the lists for the backward pass.
    """
    fields = seen.last, seen.start, *((seen.sink_end,) if seen.sinks else ())
    fields = [field[..., 0].expand(len(first), -1).contiguous() for field in fields]
    begin = torch.arange(0, block_count(keys) * BLOCK, BLOCK, device=first.device, dtype=torch.int32)
    return _planned(first, fields, table, begin, gradients)


@compiled
def _planned(first: Tensor, fields: list[Tensor], table: Tensor, begin: Tensor, gradients: bool) -> Plan:
    """`plan_of`; `fields` are last, start and optionally sink_end `[B, T]`, `begin` is the first key of each block."""
    batch, tokens, heads = first.shape
    groups, shared = table.shape
    last, start, *sink_end = fields

    # Sorted order: entries that are on from the last to the first, entries that are off, padding entries.
    is_real = (table >= 0).expand(batch, tokens, -1, -1)  # [B, T, G, R]
    is_on = is_real & (first[:, :, table.clamp_min(0)] <= start[..., None, None])
    is_real, is_on = (flags.transpose(1, 2).flatten(2) for flags in (is_real, is_on))  # [B, G, T * R], by tokens
    entries = torch.arange(tokens * shared, device=first.device)
    on, real = _counted(is_on), _counted(is_real)
    ons, reals = on[..., -1:], real[..., -1:]
    place = torch.where(is_on, ons - on, torch.where(is_real, ons + real - on - 1, reals + entries - real))
    size = block_count(tokens * shared) * BLOCK
    order = place.new_full((batch, groups, size), tokens * shared)
    order = order.scatter(-1, place, torch.where(is_real, entries, tokens * shared))

    is_void = order == tokens * shared
    token = torch.where(is_void, 0, order // shared)
    head = table[torch.arange(groups, device=first.device)[:, None], order % shared]
    row = torch.arange(batch, device=first.device)[:, None, None] * tokens + token
    rows = torch.where(is_void, batch * tokens * heads, row * heads + head)

    def entry(field: Tensor, void: int) -> Tensor:
        """A field `[B, T]` or `[B, T, H]`, gathered per entry."""
        values = field.reshape(-1)[torch.where(is_void, 0, rows if field.dim() == 3 else row)]
        return torch.where(is_void, void, values).int()

    last, low = entry(last, -1), entry(first, _NONE)
    sinks = (entry(start, _NONE), entry(sink_end[0], 0)) if sink_end else (None, None)
    some, full = _reading(last, low, *sinks, begin)
    blocks = list_blocks(some & ~full, full)
    transposed = list_blocks((some & ~full).transpose(-1, -2), full.transpose(-1, -2)) if gradients else None
    return Plan(rows, last, low, *sinks, blocks, transposed)


def _counted(flags: Tensor) -> Tensor:
    """Running count of set flags `[..., N]`. In two levels, because one long cumulative sum is sequential on a GPU."""
    blocks = pad(flags, (0, -flags.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK)).cumsum(-1)
    sums = blocks[..., -1]
    return (blocks + (sums.cumsum(-1) - sums).unsqueeze(-1)).flatten(-2)[..., : flags.shape[-1]]


def _reading(
    last: Tensor, low: Tensor, start: Tensor | None, sink_end: Tensor | None, begin: Tensor
) -> tuple[Tensor, Tensor]:
    """Whether blocks of entries read some, and all, of the blocks of keys that start at `begin`, `[B, G, M, K]`."""
    end = begin + BLOCK - 1

    def least(values: Tensor) -> Tensor:
        return values.unflatten(-1, (-1, BLOCK)).amin(-1, keepdim=True)

    def most(values: Tensor) -> Tensor:
        return values.unflatten(-1, (-1, BLOCK)).amax(-1, keepdim=True)

    is_empty = low > last
    some = (end >= least(torch.where(is_empty, _NONE, low))) & (begin <= most(torch.where(is_empty, -1, last)))
    if start is not None:
        has_none = start >= sink_end
        some = some | (
            (end >= least(torch.where(has_none, _NONE, start))) & (begin < most(torch.where(has_none, 0, sink_end)))
        )
    return some, (begin >= most(low)) & (end <= least(last))


def list_blocks(partial: Tensor, full: Tensor) -> Blocks:
    """The indices that are set in the last dimension, as `Blocks`."""
    return Blocks(*_listed(partial), *_listed(full))


def _listed(flags: Tensor) -> tuple[Tensor, Tensor]:
    """The count of set flags, int32 `[...]`, and their indices in order, int32 `[..., K]`, the other indices behind."""
    index = torch.arange(flags.shape[-1], device=flags.device)
    rank = flags.cumsum(-1)
    count = rank[..., -1:]
    place = torch.where(flags, rank - 1, count + index - rank)
    listed = torch.empty_like(place, dtype=torch.int32).scatter_(-1, place, index.int().expand_as(place))
    return count[..., 0].int(), listed
