"""One budget of heads for the whole model, spent where dropping a head costs least."""

import math
from collections.abc import Mapping, Sequence

from moh_llm.errors import UserError


def allocate(costs: Sequence[Mapping[int, float]], total: int) -> list[int]:
    """How many heads each layer drops, so that `total` are dropped at the least summed cost.

    Exact, by dynamic programming over layers: costs need not be convex in the number of drops.

    Args:
        costs: per layer, number of drops -> cost; dropping none costs nothing and need not be named.
        total: drops in all layers together.

    Raises:
        UserError: the layers together cannot drop so many.
    """
    best = [0.0] + [math.inf] * total
    choices = []
    for layer in costs:
        options = {0: 0.0, **layer}
        after, choice = [math.inf] * (total + 1), [0] * (total + 1)
        for spent in range(total + 1):
            for drops, cost in options.items():
                if drops <= spent and best[spent - drops] + cost < after[spent]:
                    after[spent], choice[spent] = best[spent - drops] + cost, drops
        best = after
        choices.append(choice)
    if math.isinf(best[total]):
        most = sum(max(layer, default=0) for layer in costs)
        raise UserError(f"impossible head plan: {total} heads cannot be dropped, the layers can drop {most}")
    plan = []
    for choice in reversed(choices):
        plan.append(choice[total])
        total -= choice[total]
    return plan[::-1]
