"""Which keys the queries of a pass see: their document, a window of it, what masks hide.

Shapes: B batch, T queries, S keys (of the cache and of this pass), H query heads.
"""

from typing import NamedTuple

import torch


class Seen(NamedTuple):
    """The keys that the queries of one forward pass see: what all layers have in common.

    A query of a head that is on sees the keys from `start` to `last`. A query of a head that is off sees those from
    `near` to `last`, those from `start` to before `sink_end`, and one distant token for the `hidden` others. All
    indices count keys. They are int64 `[B or 1, T, 1]`, or `[B, T, H]` where a mask differs between heads.

    Attributes:
        last: the last key that a query sees: its own, unless a mask shows later ones.
        start: the first key of its document.
        near: the first key of its window; `last + 1` where heads that are off see nothing.
        sink_end: the key after its sinks; `start` where there are none.
        hidden: how many keys a head that is off does not see; zero or less where none.
        window: how many keys, up to a query's own, a head that is off sees at most; 0: none.
        sinks: how many sinks.
        all_on: which tokens have all heads on whatever their scores, bool `[B or 1, T]`; None: not one.
        lead: how many first queries of each row are known to be of this kind.
        is_causal: whether it is known that each row is one document from key 0 on, of T = S tokens.
        is_consecutive: whether `last` are consecutive numbers, the same for all rows.
        visible: which keys a mask shows beside all this, bool `[B, S]` or `[B, 1 or H, T, S]`, or what it adds to
            scores; None: all. The other fields then count visible keys, as if the others were not there.
    """

    last: torch.Tensor
    start: torch.Tensor
    near: torch.Tensor
    sink_end: torch.Tensor
    hidden: torch.Tensor
    window: int
    sinks: int
    all_on: torch.Tensor | None = None
    lead: int = 0
    is_causal: bool = False
    is_consecutive: bool = True
    visible: torch.Tensor | None = None

    def first(self, on: torch.Tensor) -> torch.Tensor:
        """The first key of each query and head, `[B, T, H]`, given which heads are on, bool `[B, T, H]`."""
        return torch.where(on, self.start, self.near)
