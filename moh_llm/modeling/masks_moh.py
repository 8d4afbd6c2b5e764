"""Which keys a mask shows, and local attention under any mask.

A mask of padding, wherever its zeros are, is a matter of which keys are counted (`ranks_of`). `Shown` takes every other
mask of attention: its time and memory are those of eager attention, and it is written to be read.

Shapes: B batch, T queries, S keys (of the cache and of this pass), H query heads, D head size.
"""

from typing import NamedTuple

import torch
from torch.nn.functional import dropout as drop

_HIDDEN = -1e4  # what is added to the score of a key that a query does not see, or less
_ROWS = 256  # queries whose scores are in memory at the same time


def visible_keys(mask: torch.Tensor) -> torch.Tensor:
    """Which keys a mask of attention shows: one of padding, a boolean one, or one that is added to scores."""
    return mask > _HIDDEN if mask.dim() == 4 and mask.is_floating_point() else mask != 0


def visible_counts(mask: object, inputs: torch.Tensor) -> torch.Tensor | None:
    """How many keys a mask shows up to each one, `[B, S]`; None where it shows queries `[B, T, ...]` different ones.

    It is a mask of padding, whose zeros may lie between the tokens of a row, or a boolean one for one query.
    """
    if not isinstance(mask, torch.Tensor):
        return None
    if mask.dim() == 4 and mask.dtype == torch.bool and mask.shape[1:3] == (1, 1) and inputs.shape[1] == 1:
        mask = mask[:, 0, 0]
    return (mask != 0).to(inputs.device).cumsum(-1) if mask.dim() == 2 else None


def ranks_of(
    positions: torch.Tensor, starts: torch.Tensor, counts: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and their documents' first tokens, as indices, counted among the visible keys of their row, `[B, T]`.

    A query that is not visible has the rank of the last token before it that is.
    """
    if counts is None:
        return positions, starts
    last = counts.shape[1] - 1
    return counts[:, positions[0].clamp_max(last)] - 1, (counts.gather(1, starts.clamp_max(last)) - 1).clamp_min(0)


def keys_of_ranks(ranks: torch.Tensor, counts: torch.Tensor | None) -> torch.Tensor:
    """Indices of the visible keys of these ranks `[B, ...]`; for ranks that there are not, of any visible one."""
    if counts is None:
        return ranks
    numbers = (ranks.flatten(1) + 1).clamp_min(1).minimum(counts[:, -1:])
    return torch.searchsorted(counts, numbers).view(ranks.shape)


class Shown(NamedTuple):
    """Which keys local attention shows each query, under a mask `[B, 1 or H, T, S]`.

    Attributes:
        seen: whether a query sees a key, `[B, 1 or H, T, S]`; all of them where the mask shows none.
        hidden: how many keys the mask shows that local attention does not, `[B, 1 or H, T]`.
        bias: what the mask adds to the scores of keys that it shows; None: nothing.
        all_on, early, lead, read: as in `Band`.
    """

    seen: torch.Tensor
    hidden: torch.Tensor
    bias: torch.Tensor | None
    all_on: torch.Tensor
    early: int | None = None
    lead: int = 0
    read = None

    @classmethod
    def of(cls, mask: torch.Tensor, positions: torch.Tensor, window: int, sinks: int, all_on_until: int) -> "Shown":
        """Of the keys that a mask shows a query the first ones, the last ones up to itself, and those after it.

        Arguments but the mask are those of `Band.of`.
        """
        visible = visible_keys(mask).expand(-1, -1, positions.shape[1], -1)
        own = positions.clamp_max(mask.shape[-1] - 1)[:, None, :, None]

        def numbered(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            """The number of each key among those that are visible, and of the last one up to the query."""
            numbers = keys.cumsum(-1, dtype=torch.int32)
            return numbers, numbers.gather(-1, own.expand(*keys.shape[:2], -1, -1))

        number, last = numbered(visible)
        seen = visible & ((number <= sinks) | (number > last - window))
        hidden = (visible & ~seen).sum(-1)
        _, last = numbered(visible.any(1, keepdim=True))  # of keys that some head sees
        all_on = last[:, 0, :, 0] <= max(all_on_until, window + sinks)
        bias = mask.masked_fill(~visible_keys(mask), 0) if mask.is_floating_point() else None
        return cls(seen | ~visible.any(-1, keepdim=True), hidden, bias, all_on)

    def attention(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        heads: torch.Tensor,
        scaling: float,
        dropout: float,
        distant: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Attention `[B, T, H, D]` of these heads to the keys that they see, and to the distant token for the others.

        Arguments are those of `local_attention`, with keys and values `[B, H, S, D]` of each head; `heads` are their
        ids.
        """

        def own(tensor: torch.Tensor) -> torch.Tensor:
            """Of these heads, if it is not the same for all."""
            return tensor if tensor.shape[1] == 1 else tensor.index_select(1, heads)

        seen, hidden = own(self.seen)[..., : keys.shape[2]], own(self.hidden)
        bias = None if self.bias is None else own(self.bias)[..., : keys.shape[2]].expand(seen.shape)
        distant_scores = distant[0] + hidden.clamp_min(1).log()
        distant_scores = distant_scores.masked_fill(hidden < 1, -torch.inf).unsqueeze(-1)
        outputs = []
        for first in range(0, queries.shape[2], _ROWS):
            part = slice(first, first + _ROWS)
            scores = queries[:, :, part] @ keys.transpose(2, 3) * scaling
            scores = scores if bias is None else scores + bias[:, :, part]
            scores = torch.cat([scores.masked_fill(~seen[:, :, part], -torch.inf), distant_scores[:, :, part]], dim=-1)
            weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
            weights = (drop(weights, dropout) if dropout else weights).to(values.dtype)
            outputs.append(weights[..., :-1] @ values + weights[..., -1:] * distant[1].unsqueeze(1).to(values.dtype))
        return torch.cat(outputs, dim=2).transpose(1, 2)
