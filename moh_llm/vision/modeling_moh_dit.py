"""DiT of diffusers with Mixture-of-Head attention ("MoH: Multi-Head Attention as Mixture-of-Head Attention").

All of a base's weights keep their names and meaning; each block's `attn1.processor` holds a router, and fallbacks if
asked for. With all heads active and quantised scores the model is its base, bit for bit. The router reads what the
attention reads: the norm's output, shifted and scaled by timestep and class. All heads are computed.
"""

from dataclasses import dataclass
from typing import Any

from diffusers import DiTTransformer2DModel, ModelMixin  # noqa: F401 (a pipeline looks for ModelMixin in this module)
from diffusers.configuration_utils import register_to_config
from diffusers.models.attention_processor import Attention
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from moh_llm.modeling.head_plan_moh import HeadPlan
from moh_llm.modeling.heads_moh import RoutedModel
from moh_llm.modeling.routing_moh import MoHRouter
from moh_llm.vision.gated_heads_moh import GatedHeads


@dataclass(kw_only=True)
class DiTHeadPlan(HeadPlan):
    """The head plan of a DiT, whose layers may differ in their number of heads."""

    hidden_size: int
    head_dim: int
    num_hidden_layers: int
    num_attention_heads: int
    heads_per_layer: list[int] | None = None

    def __post_init__(self) -> None:
        self.complete_head_plan()

    @property
    def num_key_value_heads(self) -> int:
        """Every head has its own keys and values."""
        return self.num_attention_heads

    def heads_of_layer(self, layer_idx: int) -> int:
        """Number of heads of a layer."""
        return self.heads_per_layer[layer_idx] if self.heads_per_layer else self.num_attention_heads


class MoHDiTProcessor(GatedHeads, nn.Module):
    """An attention processor of diffusers with a gate per token and head (Eq. 4)."""

    def __init__(self, plan: DiTHeadPlan, layer_idx: int):
        super().__init__()
        self.add_routing(plan, layer_idx)

    def __call__(
        self,
        attn: Attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        router_logits: list[Tensor] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Attend over `hidden_states` `[B, T, C]`, the block's modulated norm; return `[B, T, C]`.

        `encoder_hidden_states` and `attention_mask` are None in a DiT. diffusers passes on the members of
        `cross_attention_kwargs` that are named here.
        """
        projections = (attn.to_q, attn.to_k, attn.to_v)
        query, key, value = (map_(hidden_states).unflatten(-1, (attn.heads, -1)) for map_ in projections)
        heads = scaled_dot_product_attention(*(states.transpose(1, 2) for states in (query, key, value)))
        heads = self.gated(heads.transpose(1, 2), hidden_states, query, value, router_logits)
        return attn.to_out[1](attn.to_out[0](heads.flatten(-2)))


class MoHDiTTransformer2DModel(RoutedModel, DiTTransformer2DModel):
    """A `DiTTransformer2DModel` with a router in each block; it takes that class's place in `DiTPipeline`.

    Arguments are those of that class and these of `HeadPlan`. Where layers differ in their heads, `heads_per_layer`
    (`list[int]`) has their numbers; the model's width stays `num_attention_heads` times `attention_head_dim`.

    `model(..., cross_attention_kwargs={"router_logits": logits})` appends each layer's router logits `[B, T, U]` to the
    list `logits`, for `batch_balance_loss(logits, model.routers)`.
    """

    @register_to_config
    def __init__(
        self,
        *,
        heads_per_layer: list[int] | None = None,
        num_shared_heads: int | list[int] | None = None,
        num_active_heads: int | list[int] | None = None,
        shared_heads: list[list[int]] | None = None,
        router_type: str = "query_norm",
        router_score: str = "quantized",
        head_fallback: str = "none",
        head_balance_coef: float = 0.01,
        moh_format: int = 1,
        **kwargs: Any,
    ):
        plan = {name: value for name, value in self.config.items() if not name.startswith("_")}
        super().__init__(**kwargs)  # which registers its own arguments
        sizes = {"num_hidden_layers": self.config.num_layers, "num_attention_heads": self.config.num_attention_heads}
        self.plan = DiTHeadPlan(hidden_size=self.inner_dim, head_dim=self.attention_head_dim, **sizes, **plan)
        self.register_to_config(moh_format=self.plan.moh_format)
        for index, block in enumerate(self.transformer_blocks):
            heads = self.plan.heads_of_layer(index)
            if heads != block.attn1.heads:
                how = {"dim_head": self.plan.head_dim, "bias": self.config.attention_bias}
                block.attn1 = Attention(self.inner_dim, heads=heads, dropout=self.config.dropout, **how)
            block.attn1.set_processor(MoHDiTProcessor(self.plan, index))

    @staticmethod
    def _get_init_keys(model_class: type) -> set[str]:
        # `kwargs` stands for the base's arguments, which diffusers would drop from a configuration.
        base = DiTTransformer2DModel
        return base._get_init_keys(model_class) | base._get_init_keys(base)

    @property
    def routers(self) -> list[MoHRouter]:
        """The routers, one per layer, first layer first."""
        return [block.attn1.processor.router for block in self.transformer_blocks]


__all__ = ["DiTHeadPlan", "MoHDiTProcessor", "MoHDiTTransformer2DModel"]
