"""The arguments of one attention call, as every backend takes them."""

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from moh_llm.modeling.interval_attention_moh import Distant
from moh_llm.modeling.seen_moh import Seen

Kinds = tuple[tuple[int, ...], tuple[int, ...]]
FLOAT16 = (torch.bfloat16, torch.float16)


class Call(NamedTuple):
    """The arguments of `moh_llm.modeling.interval_attention_moh.interval_attention`, which documents them.

    `kinds` are the sorted ids of the heads that are always on and of those that are never on (tokens in `seen.all_on`
    excepted); None if they are not known.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    first: Tensor
    seen: Seen
    scaling: float
    distant: Distant | None = None
    dropout: float = 0.0
    kinds: Kinds | None = None

    @property
    def wants_gradients(self) -> bool:
        """Whether autograd records queries, keys, values or the distant token."""
        given = self.query, self.key, self.value, *(self.distant or ())
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)

    @property
    def is_one_dtype(self) -> bool:
        """Whether queries, keys and values have the same dtype."""
        return self.query.dtype == self.key.dtype == self.value.dtype


def equal_groups(heads: Iterable[int], shared: int) -> list[tuple[int, ...]]:
    """Split `heads`, of which `shared` share keys, so that all groups of a part have the same number of heads."""
    groups, kinds = defaultdict(list), defaultdict(list)
    for head in heads:
        groups[head // shared].append(head)
    for group in groups.values():
        kinds[len(group)] += group
    return [tuple(kind) for kind in kinds.values()]
