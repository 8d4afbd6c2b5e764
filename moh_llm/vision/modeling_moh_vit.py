"""ViT, DeiT and DINOv2 with Mixture-of-Head attention ("MoH: Multi-Head Attention as Mixture-of-Head Attention").

All of a base's weights keep their names and meaning; routers and fallbacks add a few tensors to each `attention`. With
all heads active and quantised scores a model is its base, bit for bit. All heads are computed, also those that are off.
"""

from typing import Any

from torch import Tensor
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.modeling_outputs import BaseModelOutputWithPooling, ImageClassifierOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.deit.modeling_deit import DeiTAttention, DeiTForImageClassification, DeiTModel
from transformers.models.dinov2.modeling_dinov2 import (
    Dinov2Attention,
    Dinov2Encoder,
    Dinov2ForImageClassification,
    Dinov2Model,
)
from transformers.models.vit.modeling_vit import (
    ViTAttention,
    ViTForImageClassification,
    ViTModel,
    eager_attention_forward,
)
from transformers.utils.generic import can_return_tuple

from moh_llm.modeling.heads_moh import RoutedModel
from moh_llm.modeling.routing_moh import MoHRouter
from moh_llm.vision.configuration_moh_vit import MoHDeiTConfig, MoHDinov2Config, MoHViTConfig, VisionHeadPlan
from moh_llm.vision.gated_heads_moh import GatedHeads, batch_balance_loss


class VisionAttention(GatedHeads):
    """A mixin for the attention of transformers' vision models, with a gate per token and head (Eq. 4)."""

    def __init__(self, config: VisionHeadPlan, layer_idx: int):
        super().__init__(config)
        self.add_routing(config, layer_idx)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        router_logits: list[Tensor] | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend over `hidden_states` `[B, T, C]`; return the output `[B, T, C]` and the attention weights, if any."""
        projections = (self.q_proj, self.k_proj, self.v_proj)
        query, key, value = (map_(hidden_states).unflatten(-1, (-1, self.head_dim)) for map_ in projections)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        states = (states.transpose(1, 2) for states in (query, key, value))
        dropout = self.attention_dropout if self.training else 0.0
        heads, weights = attend(self, *states, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs)
        heads = self.gated(heads.reshape(query.shape), hidden_states, query, value, router_logits)
        return self.o_proj(heads.flatten(-2).contiguous()), weights


class VisionModel(RoutedModel):
    """A mixin for backbones and classifiers: `routers`, `set_active_heads`, and router logits in the output."""

    _layers = "layers"  # where the layers are in the backbone

    @property
    def routers(self) -> list[MoHRouter]:
        """The routers, one per layer, first layer first."""
        return [layer.attention.router for layer in self.base_model.get_submodule(self._layers)]

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor | None = None,
        labels: Tensor | None = None,
        output_router_logits: bool | None = None,
        router_logits: list[Tensor] | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPooling | ImageClassifierOutput:
        """What the base's class gives, given its arguments and, for classifiers, `labels` `[B]`.

        With `output_router_logits` (default: the config's) the output also holds `router_logits` (per layer
        `[B, T, U]`) and `aux_loss`, the load-balance loss of `batch_balance_loss`; `loss` is then cross-entropy +
        `head_balance_coef` * `aux_loss` (Eq. 8). `router_logits` is the list that receives them, for inner models.
        With `num_items_in_batch`, the images of one step, `loss` is this pass's part of the step's.
        """
        asked = self.config.output_router_logits if output_router_logits is None else output_router_logits
        if asked := asked and router_logits is None:
            self.check_checkpointing()
        logits = [] if asked else router_logits
        given = kwargs if labels is None else kwargs | {"labels": labels}
        outputs = super().forward(pixel_values, router_logits=logits, return_dict=True, **given)
        if asked:
            outputs["router_logits"] = tuple(logits)
            outputs["aux_loss"] = batch_balance_loss(logits, self.routers)
            if labels is not None:
                share = len(labels) / kwargs.get("num_items_in_batch", len(labels))
                outputs["loss"] = outputs.loss + self.config.head_balance_coef * share * outputs.aux_loss
        return outputs


class VisionBackbone(VisionModel):
    """A mixin that puts the family's gated attention into each layer."""

    def __init__(self, config: VisionHeadPlan, **kwargs: Any):
        super().__init__(config, **kwargs)
        if hasattr(self, "encoder"):
            self.encoder = self._encoder(config)
        for index, layer in enumerate(self.get_submodule(self._layers)):
            layer.attention = self._attention(config, index)
        self.post_init()


class VisionClassifier(VisionModel):
    """A mixin that puts the family's gated backbone under its head."""

    _no_pooler = {"add_pooling_layer": False}

    def __init__(self, config: VisionHeadPlan):
        super().__init__(config)
        setattr(self, self.base_model_prefix, self._backbone(config, **self._no_pooler))
        self.post_init()


class MoHViTAttention(VisionAttention, ViTAttention):
    """ViT's attention with gates."""


class MoHDeiTAttention(VisionAttention, DeiTAttention):
    """DeiT's attention with gates."""


class MoHDinov2Attention(VisionAttention, Dinov2Attention):
    """DINOv2's attention with gates."""


class MoHViTModel(VisionBackbone, ViTModel):
    """ViT without a head on top."""

    config: MoHViTConfig
    _attention = MoHViTAttention


class MoHDeiTModel(VisionBackbone, DeiTModel):
    """DeiT without a head on top."""

    config: MoHDeiTConfig
    _attention = MoHDeiTAttention


class MoHDinov2Encoder(RoutedModel, Dinov2Encoder):
    """DINOv2's layers, which transformers initialises as a model of their own."""


class MoHDinov2Model(VisionBackbone, Dinov2Model):
    """DINOv2 without a head on top."""

    config: MoHDinov2Config
    _layers, _attention, _encoder = "encoder.layer", MoHDinov2Attention, MoHDinov2Encoder


class MoHViTForImageClassification(VisionClassifier, ViTForImageClassification):
    """ViT with a linear head on the class token."""

    config: MoHViTConfig
    _backbone = MoHViTModel


class MoHDeiTForImageClassification(VisionClassifier, DeiTForImageClassification):
    """DeiT with a linear head on the class token."""

    config: MoHDeiTConfig
    _backbone = MoHDeiTModel


class MoHDinov2ForImageClassification(VisionClassifier, Dinov2ForImageClassification):
    """DINOv2 with a linear head on the class token and the mean of the patches."""

    config: MoHDinov2Config
    _layers, _backbone, _no_pooler = "encoder.layer", MoHDinov2Model, {}


# Tensors have the names of the base's files, which are not those of its modules.
for _family in ("ViT", "DeiT", "Dinov2"):
    _mapping = get_checkpoint_conversion_mapping(f"{_family}Model")
    register_checkpoint_conversion_mapping(f"MoH{_family}Model", _mapping, overwrite=True)

__all__ = [
    "MoHDeiTForImageClassification",
    "MoHDeiTModel",
    "MoHDinov2ForImageClassification",
    "MoHDinov2Model",
    "MoHViTForImageClassification",
    "MoHViTModel",
]
