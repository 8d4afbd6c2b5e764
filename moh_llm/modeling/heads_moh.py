"""What MoH models of text and of images share beside the routers: value fallbacks, and the number of heads in use."""

import contextlib
from collections.abc import Iterator, Sequence
from numbers import Integral

import torch
from torch import Tensor, nn
from transformers import initialization as init

from .head_plan_moh import HeadPlan
from .routing_moh import HeadShard, IndexedModule, MoHLinear, MoHRouter


class MoHFallback(IndexedModule):
    """The value fallback of a routed head that is off: b_h + a_h(x) v, with a_h linear in the layer's input x.

    v is the token's own value vector in the head's group. A head mostly attends to a few sinks, whose mixture hardly
    varies (b_h), and to the token itself (a_h(x) v). The first token of a document sees only itself: its fallback is v.
    """

    def __init__(self, config: HeadPlan, layer_idx: int):
        super().__init__(config.routed_heads(layer_idx))
        self.num_heads = config.heads_of_layer(layer_idx)
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.own_value = MoHLinear(config.hidden_size, len(self._ids))
        self.bias = nn.Parameter(torch.zeros(len(self._ids), config.head_dim))

    def forward(self, hidden_states: Tensor, own_value: Tensor, is_first: Tensor, shard: HeadShard | None) -> Tensor:
        """The fallback of each head and token, `[B, T, H, D]`.

        `hidden_states` `[B, T, C]` is the layer's input, `own_value` `[B, T, KV, D]` holds the tokens' values, and
        `is_first` `[B or 1, T]` marks the first token of each document.
        """
        share = self.of_heads(self.own_value(hidden_states), -1, self.num_heads, shard)
        share = torch.where(is_first.unsqueeze(-1), 1.0, share.to(own_value.dtype)).unsqueeze(-1)
        bias = self.of_heads(self.bias, 0, self.num_heads, shard).to(own_value.dtype)
        bias = torch.where(is_first[..., None, None], 0.0, bias)
        return bias + share * own_value.repeat_interleave(self.num_key_value_groups, dim=2)


class RoutedModel:
    """Initialisation and the head budget that all MoH models share; inherited before a model's own class."""

    routers: list[MoHRouter]  # one per layer, first layer first

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, MoHLinear):
            init.normal_(module.weight, mean=0.0, std=self.config.initializer_range)
        if isinstance(module, MoHLinear | MoHFallback) and module.bias is not None:
            init.zeros_(module.bias)
        if isinstance(module, IndexedModule):
            module.reset_index()

    def set_active_heads(self, num_active_heads: int | Sequence[int] | None) -> None:
        """Set how many heads a token uses (shared + Top-K), in all layers or per layer; None: the config's number.

        Raises ValueError for a list of another length, and for a number that a layer cannot have.
        """
        if num_active_heads is None:
            num_active_heads = [router.mean_active for router in self.routers]
        elif isinstance(num_active_heads, Integral):  # NumPy's, too
            num_active_heads = [int(num_active_heads)] * len(self.routers)
        if (given := len(num_active_heads)) != (layers := len(self.routers)):
            raise ValueError(f"num_active_heads has {given} entries for {layers} layers; give one each, or one for all")
        top_k = [router.top_k_of(active) for router, active in zip(self.routers, num_active_heads, strict=True)]
        for router, active, k in zip(self.routers, num_active_heads, top_k, strict=True):
            for own in (part for part in router.modules() if isinstance(part, MoHRouter)):  # PEFT may keep two
                own.num_active, own.top_k = active, k

    def check_checkpointing(self) -> None:
        """Raise ValueError where gradient checkpointing would leave router logits without a gradient."""
        modules = self.modules() if self.training and torch.is_grad_enabled() else ()
        used = [part._gradient_checkpointing_func for part in modules if getattr(part, "gradient_checkpointing", False)]
        if any(getattr(how, "keywords", {}).get("use_reentrant", True) for how in used):  # as DeepSpeed's, without any
            raise ValueError("router logits need gradient checkpointing with use_reentrant=False")

    @contextlib.contextmanager
    def all_heads_active(self) -> Iterator[None]:
        """A context in which every head is on: with quantised scores the model is then its base."""
        before = [router.num_active for router in self.routers]
        self.set_active_heads([router.num_heads for router in self.routers])
        try:
            yield
        finally:
            self.set_active_heads(before)
