"""Head load: the share of tokens that use each head (Fig. 3 and B). H heads of a layer, in the model's order."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from moh_llm.analysis.watch import LayerPass, last_routed_layer, shared_heads, watch
from moh_llm.metrics import Batch
from moh_llm.modeling import MoHLlamaPreTrainedModel


@dataclass(frozen=True)
class HeadLoad:
    """Head load on one text, all lists over layers.

    Attributes:
        tokens: how many were counted.
        load: per layer, the share of tokens that have each head on, `[H]`; 1 for shared heads.
        shared_heads: per layer, ids of the shared heads.
        balance: `load_balance` of each layer's routed heads, or of its groups where these are routed.
    """

    tokens: int
    load: list[list[float]]
    shared_heads: list[list[int]]
    balance: list[float | None]


@dataclass(frozen=True)
class LoadByText:
    """Head load of one layer on several texts, by their names.

    Attributes:
        layer: its number.
        shared_heads: ids of its shared heads.
        tokens: how many were counted of each text.
        load: share of each text's tokens that have each head on, `[H]`.
        balance: `load_balance` of the routed heads or groups on each text.
    """

    layer: int
    shared_heads: list[int]
    tokens: dict[str, int]
    load: dict[str, list[float]]
    balance: dict[str, float | None]


def head_load(model: MoHLlamaPreTrainedModel, batches: Iterable[Batch]) -> HeadLoad:
    """Activations / tokens of each head in each layer (Fig. 3), over every position of the batches.

    Raises:
        UserError: there are no tokens.
    """
    routers = model.routers
    counts = [torch.zeros(router.num_shared + router.num_routed, dtype=torch.int64) for router in routers]

    def take(seen: LayerPass) -> None:
        counts[seen.layer] += seen.on.sum((0, 1)).cpu()

    tokens = watch(model, batches, take)
    load = [(count.double() / tokens).tolist() for count in counts]
    return HeadLoad(
        tokens=tokens,
        load=load,
        shared_heads=[shared_heads(router) for router in routers],
        balance=[
            load_balance([shares[head] for head in router.routed_heads[:: router.group_size]])
            for router, shares in zip(routers, load, strict=True)
        ],
    )


def head_load_by_text(model: MoHLlamaPreTrainedModel, texts: Mapping[str, Iterable[Batch]]) -> LoadByText:
    """Head load of the last layer on several texts, such as benchmarks (Fig. 3 and B).

    The last layer that has routed heads: in one without, all loads are 1.

    Raises:
        UserError: the model has no routed heads, or a text has no tokens.
    """
    layer = last_routed_layer(model)
    found = {name: head_load(model, batches) for name, batches in texts.items()}
    return LoadByText(
        layer=layer,
        shared_heads=shared_heads(model.routers[layer]),
        tokens={name: load.tokens for name, load in found.items()},
        load={name: load.load[layer] for name, load in found.items()},
        balance={name: load.balance[layer] for name, load in found.items()},
    )


def load_balance(routed_load: Sequence[float]) -> float | None:
    """Entropy of routed heads' shares of all activations, over its maximum, log R.

    1 where R heads are used alike; log K / log R where all tokens use the same K of them. None where
    nothing can be uneven: below 2 heads, or where no head is ever on.
    """
    total = sum(routed_load)
    if len(routed_load) < 2 or total == 0:
        return None
    entropy = -sum(load / total * math.log(load / total) for load in routed_load if load)
    return entropy / math.log(len(routed_load))
