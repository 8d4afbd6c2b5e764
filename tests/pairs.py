"""Pairs of a dense model and the MoH model with the same weights."""

from collections.abc import Callable

import pytest
import torch
from transformers import LlamaForCausalLM

from moh_llm.conversion.base import MOH_FIELDS
from moh_llm.modeling import MoHLlamaConfig, MoHLlamaForCausalLM
from moh_llm.records.tensors import is_routing_weight


@pytest.fixture
def make_pair(make_llama, tmp_path) -> Callable[..., tuple[LlamaForCausalLM, MoHLlamaForCausalLM]]:
    """A dense LLaMA and a MoH model that holds its weights, both through `from_pretrained`.

    Keywords are config fields of either, and `dtype` and `attn_implementation` for loading.
    """

    def make(dtype=torch.float32, attn_implementation="sdpa", **fields):
        plan = {key: fields.pop(key) for key in MOH_FIELDS & fields.keys()}
        folder = make_llama(**fields)
        dense = LlamaForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attn_implementation)
        config = {k: v for k, v in dense.config.to_dict().items() if k not in ("model_type", "architectures", "dtype")}
        torch.manual_seed(1)
        moh = MoHLlamaForCausalLM(MoHLlamaConfig(**config, **plan))
        missing, unexpected = moh.load_state_dict(LlamaForCausalLM.from_pretrained(folder).state_dict(), strict=False)
        assert not unexpected and all(map(is_routing_weight, missing))
        for attention in (layer.self_attn for layer in moh.model.layers):
            if attention.fallback is not None:
                for name in ("bias", "distant_value"):  # zero in a fresh model
                    if hasattr(attention.fallback, name):
                        torch.nn.init.normal_(getattr(attention.fallback, name))
        # Through a folder, so that dtype is handled as for a user (rotary tables stay float32).
        moh.save_pretrained(tmp_path / "moh")
        moh = MoHLlamaForCausalLM.from_pretrained(
            tmp_path / "moh", dtype=dtype, attn_implementation=attn_implementation
        )
        return dense.eval(), moh.eval()

    return make
