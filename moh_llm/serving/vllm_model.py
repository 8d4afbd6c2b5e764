"""The class that serves MoH models in vLLM: its transformers backend; local fallbacks read its paged cache."""

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.models.transformers import TransformersForCausalLM
from vllm.platforms import current_platform
from vllm.sequence import IntermediateTensors

from moh_llm.modeling.attention_moh import MoHLlamaAttention
from moh_llm.modeling.seen_moh import Seen
from moh_llm.serving.paged import EngineCache, PagedLayout, near_keys, take


class MoHLlamaForVLLM(TransformersForCausalLM):
    """vLLM's layers compute attention of all heads, and the model's own code that of heads that are off.

    The keys that these read are found once for each step and are other ones in the next: the model runs eagerly.
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
            kwargs["seen"], kwargs["cache"] = self._seen(positions)
        return super().forward(input_ids, positions, intermediate_tensors, inputs_embeds, **kwargs)

    def _seen(self, positions: torch.Tensor) -> tuple[Seen, EngineCache | None]:
        """Which keys the tokens of this step's requests see, and what reads them of a layer; None: all heads are on."""
        metadata, config = get_forward_context().attn_metadata, self.config
        window, sinks = config.local_window, config.local_sinks
        if metadata is None:  # vLLM runs a model without a cache to see how much memory it takes
            tokens = torch.arange(len(positions), device=positions.device)[None]
            return Seen.from_positions(tokens, tokens, window, sinks)._replace(lead=len(positions)), None
        layer = next(module for module in self.modules() if isinstance(module, MoHLlamaAttention)).attn
        metadata = metadata[layer.layer_name]
        edges, lengths = (tensor.cpu().long() for tensor in (metadata.query_start_loc, metadata.seq_lens))
        seen, request, places = near_keys(edges, lengths, window, sinks, config.local_start, len(positions))
        if seen.lead == len(positions):
            return seen, None
        if self._layout is None:
            self._layout = PagedLayout(layer.kv_cache, layer.head_size, lambda *given: _write(layer, *given))
        seen = seen._make(value.to(positions.device) if isinstance(value, torch.Tensor) else value for value in seen)
        request, places = request.to(positions.device), places.to(positions.device)
        blocks = metadata.block_table[request, places // self._layout.tokens]
        offsets = self._layout.offsets(layer.kv_cache, blocks, places)
        return seen, EngineCache(lambda module: take(module.attn.kv_cache, offsets))


def _write(
    layer: nn.Module, keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Keys and values into slots of a cache, as this layer of vLLM's does it."""
    layer.impl.do_kv_cache_update(layer, keys, values, cache, slots)
