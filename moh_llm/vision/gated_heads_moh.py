"""The gate of attention that computes all heads of whole images, and its load-balance loss.

Shapes: B batch, T tokens, H heads, U routed heads, D head size, C hidden size.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from moh_llm.modeling.head_plan_moh import HeadPlan
from moh_llm.modeling.heads_moh import MoHFallback
from moh_llm.modeling.routing_moh import MoHRouter, load_balancing_loss


class GatedHeads:
    """A mixin of modules: sum_i (g_i H_i + (1 - g_i) S_i) W_O^i, with fallbacks S_i, which are zero in the paper."""

    def add_routing(self, plan: HeadPlan, layer_idx: int) -> None:
        """Add the router, and the fallback of the heads that are not shared."""
        self.router = MoHRouter(plan, layer_idx)
        has_fallback = plan.head_fallback == "value" and self.router.num_routed > 0
        self.fallback = MoHFallback(plan, layer_idx) if has_fallback else None

    def gated(
        self, heads: Tensor, hidden_states: Tensor, query: Tensor, value: Tensor, router_logits: list[Tensor] | None
    ) -> Tensor:
        """Weigh the heads' outputs `[B, T, H, D]`; `hidden_states` `[B, T, C]` is the attention's input.

        `query` and `value` are `[B, T, H, D]`. `router_logits`, if given, receives this layer's, `[B, T, U]`. With a
        gate of 1 the result is `heads`, bit for bit.
        """
        logits, gate = self.router(hidden_states, query)
        if router_logits is not None:
            router_logits.append(logits)
        gate = gate.to(heads.dtype).unsqueeze(-1)
        if self.fallback is None:
            return gate * heads
        sees_itself_only = torch.zeros(1, heads.shape[1], dtype=torch.bool, device=heads.device)
        return gate * heads + (1 - gate) * self.fallback(hidden_states, value, sees_itself_only, None).to(heads.dtype)


def batch_balance_loss(router_logits: Sequence[Tensor], routers: Sequence[MoHRouter]) -> Tensor:
    """Load-balance loss (Eq. 7) over all tokens of a batch together, as the authors' code has it for images.

    It is the mean over the layers that route. With `router_score="normalized"` a layer's loss is also multiplied by its
    routed heads U, as in that code: an even load gives K. Threshold routers, whose loads are free, have none.
    """
    if routers[0].router_type == "threshold":
        return router_logits[0].new_zeros(())
    rows = [logits.flatten(0, -2).unsqueeze(0) for logits in router_logits]
    top_k = [router.top_k for router in routers]
    return load_balancing_loss(rows, top_k, router_score=routers[0].router_score)
