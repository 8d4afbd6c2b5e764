"""The class that serves MoH models in vLLM: its transformers backend; local fallbacks read its paged cache."""

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.models.transformers import TransformersForCausalLM
from vllm.platforms import current_platform
from vllm.sequence import IntermediateTensors

from moh_llm.modeling.attention_moh import MoHLlamaAttention
from moh_llm.modeling.documents_moh import Requests
from moh_llm.serving.paged import PagedLayout, near_keys, take


class MoHLlamaForVLLM(TransformersForCausalLM):
    """vLLM's layers compute attention of all heads, and the model's own code the local attention of heads that are off.

    The bands of local attention are made once for each step and are other ones in the next: the model runs eagerly.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        config = vllm_config.model_config.hf_config
        if config.head_fallback == "local" and not (
            current_platform.is_cpu() or vllm_config.model_config.enforce_eager
        ):
            raise ValueError("head_fallback='local' does not go into CUDA graphs: use --enforce-eager")
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self._layout: PagedLayout | None = None

    def _decorate_for_torch_compile(self) -> None:
        if self.config.head_fallback != "local":
            super()._decorate_for_torch_compile()

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs,
    ) -> torch.Tensor | IntermediateTensors:
        """Hidden states `[T, C]` of the tokens of all requests."""
        if self.config.head_fallback == "local":
            kwargs["band"] = self._band(positions)
        return super().forward(input_ids, positions, intermediate_tensors, inputs_embeds, **kwargs)

    def _band(self, positions: torch.Tensor) -> Requests:
        """The bands of this step's requests, with a function that reads their keys and values of a layer."""
        metadata = get_forward_context().attn_metadata
        if metadata is None:  # vLLM runs a model without a cache to see how much memory it takes
            return Requests([], torch.ones_like(positions[None], dtype=torch.bool), read=_nothing)
        layer = next(module for module in self.modules() if isinstance(module, MoHLlamaAttention)).attn
        metadata, config = metadata[layer.layer_name], self.config
        requests, of_request, places = near_keys(
            metadata.query_start_loc.tolist(),
            metadata.seq_lens.tolist(),
            *(config.local_window, config.local_sinks, config.local_start),
            len(positions),
            positions.device,
        )
        if not requests.parts:
            return requests._replace(read=_nothing)
        if self._layout is None:
            self._layout = PagedLayout(layer.kv_cache, layer.head_size, lambda *given: _write(layer, *given))
        blocks = metadata.block_table[of_request, places // self._layout.tokens]
        offsets = self._layout.offsets(layer.kv_cache, blocks, places)
        return requests._replace(read=lambda module: take(module.attn.kv_cache, offsets))


def _nothing(module: nn.Module) -> tuple[None, None]:
    """Keys and values of a layer where no request has heads off."""
    return None, None


def _write(
    layer: nn.Module, keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Keys and values into slots of a cache, as this layer of vLLM's does it."""
    layer.impl.do_kv_cache_update(layer, keys, values, cache, slots)
