"""Routing of Mixture-of-Head attention: which heads a token uses, and with which gate.

Shapes: B batch, T tokens, H query heads, U routed groups (single heads, or key-value groups), D head size, C hidden
size.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import initialization as init
from transformers.utils.generic import maybe_autocast

from .head_plan_moh import HeadPlan


def select_top_k(logits: Tensor, k: int) -> Tensor:
    """Return 1 at the `k` largest entries of the last dimension and 0 elsewhere, in the dtype of `logits`."""
    return torch.zeros_like(logits).scatter(-1, logits.topk(k, dim=-1).indices, 1.0)


def straight_through(hard: Tensor | float, soft: Tensor) -> Tensor:
    """Return the value of `hard` with the gradient of `soft` (Eq. 9 and 10)."""
    # The bracket keeps the value exact: `soft - soft` is zero in every dtype, while `(hard + soft) - soft` rounds.
    return hard + (soft - soft.detach())


def balance_factor(router_score: str, logits: Tensor) -> int:
    """By what Eq. 7 is multiplied in a layer with these logits `[..., U]`."""
    return logits.shape[-1] if router_score == "normalized" else 1


def load_balancing_loss(
    router_logits: Sequence[Tensor],
    top_k: Sequence[int],
    attention_mask: Tensor | None = None,
    row_weights: Tensor | None = None,
    router_score: str = "quantized",
) -> Tensor:
    """Load-balance loss (Eq. 7), averaged over rows and over the layers that have routed heads.

    For a row and layer it is the sum over routed groups of P_i * f_i: P_i is the mean softmax score of group i over the
    row's tokens, f_i the share of tokens that select it. An even load gives K / U. Without routed heads it is zero.
    With `router_score="normalized"` each layer's is multiplied by U, as in the authors' code: an even load gives K.

    Args:
        router_logits: `[B, T, U]` per layer; layers may differ in U, and U may be 0.
        top_k: number of routed groups that a token selects (K), per layer.
        attention_mask: `[B, >= T]`, 0 at padding; its last T columns belong to the logits. Masks of other ranks are
            ignored.
        row_weights: `[B]`, weight of each row in the mean; default: its number of tokens.
    """
    losses = []
    for logits, k in zip(router_logits, top_k, strict=True):
        if logits.shape[-1] == 0:
            continue
        scores = logits.softmax(-1)
        selected, mask = select_top_k(logits, k), torch.ones_like(logits[..., :1])
        if attention_mask is not None and attention_mask.dim() == 2:
            mask = (attention_mask[:, -logits.shape[1] :, None] != 0).to(mask)
        tokens = mask.sum(1, keepdim=True)
        share = mask / tokens.clamp_min(1)
        rows = balance_factor(router_score, logits) * ((scores * share).sum(1) * (selected * share).sum(1)).sum(-1)
        weights = tokens[:, 0, 0] if row_weights is None else row_weights.to(rows)
        losses.append((rows * weights).sum() / weights.sum().clamp_min(1))
    if not losses:
        return torch.zeros((), device=router_logits[0].device if router_logits else None)
    return torch.stack([loss.to(losses[0].device) for loss in losses]).mean()


class MoHLinear(nn.Module):
    """A small linear map. Not an `nn.Linear`, so that quantisation, adapters and serving engines do not change it."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.register_parameter("bias", nn.Parameter(torch.zeros(out_features)) if bias else None)
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, hidden_states: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Map `[..., in_features]` to `[..., out_features]` in `dtype` (default: the dtype of `hidden_states`)."""
        dtype, weight = dtype or hidden_states.dtype, self.weight
        bias = None if self.bias is None else self.bias.to(dtype)
        is_half = hidden_states.dtype == weight.dtype != dtype
        if is_half and hidden_states.is_cuda and torch.version.cuda and not torch.is_grad_enabled():
            out = torch.mm(hidden_states.flatten(0, -2), weight.t(), out_dtype=dtype)  # equally exact, without copies
            return (out if bias is None else out + bias).view(*hidden_states.shape[:-1], -1)
        return nn.functional.linear(hidden_states.to(dtype), weight.to(dtype), bias)


class IndexedModule(nn.Module):
    """A module with ids of heads or groups in a buffer, `index`, that is not saved."""

    def __init__(self, ids: Iterable[int]):
        super().__init__()
        self._ids = list(ids)
        self.register_buffer("index", torch.tensor(self._ids, dtype=torch.int64), persistent=False)

    def reset_index(self) -> None:
        """Fill the buffer again after the module was made on the meta device."""
        init.copy_(self.index, torch.tensor(self._ids, dtype=torch.int64, device=self.index.device))

    def of_heads(self, own: Tensor, dim: int, count: int, shard: "HeadShard | None") -> Tensor:
        """Scatter `own` to all `count` heads along `dim` (0 for other heads), or to the heads of `shard`."""
        shape = list(own.shape)
        shape[dim] = count
        heads = own.new_zeros(shape).index_copy(dim, self.index, own)
        return heads if shard is None else shard.take(heads, dim)


@dataclass(frozen=True)
class HeadShard:
    """Heads of one process under tensor parallelism: `count` heads from `first`, in whole key-value groups."""

    first: int
    count: int
    group: Any  # of torch.distributed

    @classmethod
    def from_weight(cls, weight: Tensor, found: float, config: HeadPlan) -> "HeadShard":
        """Make the shard of a process whose query projection `weight` has `found` heads.

        Raises ValueError if the heads were not split by transformers' tensor parallelism.
        """
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        mesh = getattr(weight, "device_mesh", None)
        if mesh is None:
            way = "use transformers' tensor parallelism (tp_plan='auto'), or pipeline or data parallelism"
            raise ValueError(f"this device has {found:g} of {heads} heads, but routing needs all of them; {way}")
        mesh = mesh["tp"] if mesh.ndim > 1 else mesh
        if groups % (size := mesh.size()):
            raise ValueError(f"{groups} key-value heads cannot be split over {size} devices; tp_size must divide them")
        return cls(mesh.get_local_rank() * (heads // size), heads // size, mesh.get_group())

    def take(self, tensor: Tensor, dim: int = -1) -> Tensor:
        """Select this process's heads from a tensor over all heads."""
        return tensor.narrow(dim, self.first, self.count)

    def gather(self, part: Tensor) -> Tensor:
        """Gather the parts of all processes along the last dimension, without gradient."""
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, part.contiguous(), group=self.group)
        return torch.cat(parts, dim=-1)


class MoHRouter(IndexedModule):
    """Scores the routed groups of one layer and builds the gate of all heads.

    A group is the unit of routing: one head, or the `group_size` heads of a key-value group. `num_shared`, `num_routed`
    and `num_active` count heads; `routed_groups` and `top_k` count groups. The model's `set_active_heads` changes
    `num_active` and `top_k`. `index` holds the shared groups, then the routed ones, then those that are never on.
    """

    def __init__(self, config: HeadPlan, layer_idx: int):
        shared, routed = config.shared_heads_per_layer[layer_idx], config.routed_heads(layer_idx)
        local = config.never_on_heads_per_layer[layer_idx]
        # Sorted heads of a group are consecutive, so every `heads_per_group`-th id stands for its group.
        ids = [*shared, *routed, *local][:: config.heads_per_group]
        super().__init__(head // config.heads_per_group for head in ids)
        self.layer_idx, self.routed_heads = layer_idx, routed
        never = sorted([*routed, *local]) if config.router_type == "none" else local
        self._kinds = tuple(shared), tuple(never)
        self.num_shared, self.num_routed = len(shared), len(routed)
        self.mean_active = self.num_active = config.active_heads_per_layer[layer_idx]
        self.group_size = config.heads_per_group
        self.shared_groups, self.routed_groups = self.num_shared // self.group_size, self.num_routed // self.group_size
        self.num_heads, self.local_groups = config.heads_of_layer(layer_idx), len(local) // self.group_size
        self.router_type, self.router_score = config.router_type, config.router_score
        self.top_k = self.top_k_of(self.num_active)

        hidden, has_stages = config.hidden_size, self.router_type == "two_stage"
        if self.num_routed and (has_stages or self.router_type in ("linear", "threshold")):
            self.routed = MoHLinear(hidden, self.routed_groups, bias=not has_stages)
        if has_stages and self.shared_groups > (self.router_score == "normalized"):  # a single one then weighs 1
            self.shared = MoHLinear(hidden, self.shared_groups, bias=False)
        if has_stages and self.num_shared and self.num_routed:
            self.stage = MoHLinear(hidden, 2, bias=False)

    @property
    def is_full(self) -> bool:
        """Whether every token has all heads on."""
        return self.num_active == self.num_heads

    @property
    def is_trained(self) -> bool:
        """Whether training changes the selection: the router has weights that are trained, or none (query_norm)."""
        weights = list(self.parameters())
        return not weights or any(weight.requires_grad for weight in weights)

    def kinds(self, shard: HeadShard | None = None) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Sorted ids (within `shard`) of the heads that are always on, and of the heads that are never selected."""
        if shard is None:
            return self._kinds
        own = range(shard.first, shard.first + shard.count)
        return tuple(tuple(head - shard.first for head in kind if head in own) for kind in self._kinds)

    def top_k_of(self, active: int) -> int:
        """Number of routed groups that a token selects if it uses `active` heads; ValueError if that is impossible."""
        if active == self.num_heads:
            return self.routed_groups
        heads, rule = self.num_shared + self.num_routed, ""
        if self.router_type == "threshold" and active != self.mean_active:
            rule = f"be {self.mean_active}, the mean number of heads with router_type='threshold', or"
        elif not self.num_shared <= active <= heads:
            rule = f"lie between num_shared_heads={self.num_shared} and {heads}, or"
        elif active % self.group_size:
            rule = f"be whole key-value groups of {self.group_size} heads, or"
        if rule:
            rule += f" be num_attention_heads={self.num_heads} (layer {self.layer_idx})"
            raise ValueError(f"num_active_heads={active} must {rule}")
        return (active - self.num_shared) // self.group_size

    def forward(
        self,
        hidden_states: Tensor,
        query_states: Tensor,
        all_on: Tensor | bool | None = None,
        shard: HeadShard | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Route every token.

        Args:
            hidden_states: the attention layer's input `[B, T, C]`.
            query_states: queries before rotary embedding `[B, T, H, D]`; with `shard`, only those of its heads.
            all_on: tokens that have all heads on whatever their logits, bool `[B or 1, T]`; True for all tokens.

        Returns:
            Logits of the routed groups `[B, T, U]` and the gate of all heads `[B, T, H]`, in float32 or wider, so that
            rounding does not decide between heads.
        """
        with maybe_autocast(device_type=hidden_states.device.type, enabled=False):
            if self.router_type == "two_stage":  # its three maps share one copy
                hidden_states = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
            logits = self._routed_logits(hidden_states, query_states, shard)
            if all_on is True:
                return logits, logits.new_ones(*logits.shape[:-1], self.num_heads)
            selected = self.select(logits)
            needs_scores = torch.is_grad_enabled() or self.router_type == "two_stage"
            if self.router_score == "quantized" and not needs_scores:  # the gate is 0 or 1
                parts = [logits.new_ones(*logits.shape[:-1], self.shared_groups), selected]
            else:
                shared_score, routed_score = self._scores(hidden_states, logits, selected)
                if self.router_score == "quantized":
                    parts = [straight_through(1.0, shared_score), straight_through(selected, routed_score)]
                else:
                    parts = [shared_score, selected * routed_score]
            gate = self._of_heads(*parts)
            return logits, torch.where(all_on[..., None], 1.0, gate) if isinstance(all_on, Tensor) else gate

    def _of_heads(self, shared: Tensor, routed: Tensor) -> Tensor:
        """Expand the gates of the shared and the routed groups to all heads, `[B, T, H]`."""
        others = routed.new_full((*routed.shape[:-1], self.local_groups), float(self.is_full))
        gate = torch.cat([shared, routed, others], dim=-1)
        gate = torch.zeros_like(gate).index_copy(-1, self.index, gate)
        return gate if self.group_size == 1 else gate.unsqueeze(-1).expand(*gate.shape, self.group_size).flatten(-2)

    def _scores(self, hidden_states: Tensor, logits: Tensor, selected: Tensor) -> tuple[Tensor, Tensor]:
        """Scores of the shared and the routed groups."""
        shared, stages = logits.new_ones(*logits.shape[:-1], self.shared_groups), 1
        routed = logits.sigmoid() if self.router_type == "threshold" else logits.softmax(-1)
        if hasattr(self, "shared"):
            shared = self.shared(hidden_states, logits.dtype).softmax(-1)
        if self.router_score == "normalized":  # as the authors' code has it
            shared, stages = self.shared_groups * shared, 2
            routed = self.top_k * nn.functional.normalize(selected * routed, p=1, dim=-1)
        if not hasattr(self, "stage"):
            return shared, routed
        shared_stage, routed_stage = (stages * self.stage(hidden_states, logits.dtype).softmax(-1)).split(1, -1)
        return shared_stage * shared, routed_stage * routed

    def select(self, logits: Tensor) -> Tensor:
        """Select routed groups by their logits `[..., U]`: 1 where a token has the group on, else 0."""
        if self.router_type == "threshold" and not self.is_full:
            return (logits > 0).to(logits.dtype)
        return select_top_k(logits, self.top_k) if self.top_k else torch.zeros_like(logits)

    def _routed_logits(self, hidden_states: Tensor, query_states: Tensor, shard: HeadShard | None) -> Tensor:
        dtype = torch.promote_types(hidden_states.dtype, torch.float32)
        if self.router_type != "query_norm":
            if self.router_type == "none" or not self.num_routed:
                return hidden_states.new_zeros(*hidden_states.shape[:-1], self.routed_groups, dtype=dtype)
            return self.routed(hidden_states, dtype)
        # The norm of all queries of a group, concatenated.
        norms = query_states.unflatten(-2, (-1, self.group_size)).flatten(-2).to(dtype).norm(dim=-1)
        norms = norms if shard is None else shard.gather(norms)
        norms = norms.index_select(-1, self.index[self.shared_groups : self.shared_groups + self.routed_groups])
        if self.routed_groups < 2:
            return norms  # one group has no spread to divide by
        # Clamped: the deviation is zero if heads are copies of one another.
        return norms / norms.std(dim=-1, keepdim=True).clamp_min(torch.finfo(norms.dtype).eps)
