"""Every architecture that converts is its base with all heads on, and comes back byte for byte."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
)

from moh_llm.cli import main
from moh_llm.modeling import MoHLlamaForCausalLM

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS = {
    "llama, grouped": (LlamaConfig, {}),
    "llama, multi-head with biases": (
        LlamaConfig,
        {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True},
    ),
    "llama 3.2, tied": (LlamaConfig, {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    # Numbers that are LLaMA's defaults for another size of model.
    "llama, 32 value heads": (LlamaConfig, {"hidden_size": 128, "num_attention_heads": 64, "num_key_value_heads": 32}),
    "mistral": (MistralConfig, {"sliding_window": None}),
    "mistral, wide heads": (MistralConfig, {"sliding_window": None, "head_dim": 16, "num_key_value_heads": 1}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"head_dim": 16, "attention_bias": True}),
    "mixtral": (MixtralConfig, {"head_dim": 8, "num_local_experts": 4, "router_aux_loss_coef": 0.02}),
    "mixtral, bfloat16, in parts": (
        MixtralConfig,
        {"head_dim": 16, "num_experts_per_tok": 3, "dtype": torch.bfloat16, "max_shard_size": "20KB"},
    ),
}
# What says the same of the model in any family, and what a LLaMA's config has more or less than Mistral's.
_ASIDE = {"_name_or_path", "transformers_version", "model_type", "architectures", "sliding_window"}
_ASIDE |= {"attention_bias", "mlp_bias", "pretraining_tp"}


class Converted(NamedTuple):
    """A base, its conversion, and the command's exit status."""

    base: Path
    output: Path
    status: int


@pytest.fixture(scope="module", params=MODELS)
def converted(request, make_model, convert, tmp_path_factory) -> Converted:
    config_class, fields = MODELS[request.param]
    base, output = make_model(config_class, **fields), tmp_path_factory.mktemp("converted") / "moh"
    return Converted(base, output, convert(base, output))


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(1, 257, (2, 40), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def logits_of(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model.eval()(ids).logits


def test_all_heads_on_is_the_base(converted, ids, one_thread):
    assert converted.status == 0
    moh = MoHLlamaForCausalLM.from_pretrained(converted.output)
    expected = logits_of(AutoModelForCausalLM.from_pretrained(converted.base), ids)
    with moh.all_heads_active():
        assert torch.equal(logits_of(moh, ids), expected)
    assert not torch.equal(logits_of(moh, ids), expected)


def test_the_way_back(converted, read_tensors, ids, tmp_path, one_thread):
    assert main(["convert", str(converted.output), "--to-dense", "--output-dir", str(tmp_path / "dense")]) == 0
    original, restored = read_tensors(converted.base), read_tensors(tmp_path / "dense")
    assert restored.keys() == original.keys()
    for name, tensor in original.items():
        assert restored[name].dtype == tensor.dtype and torch.equal(restored[name], tensor), name

    base, dense = (AutoConfig.from_pretrained(folder) for folder in (converted.base, tmp_path / "dense"))
    # A Mistral without a sliding window is a LLaMA; nothing in a MoH model tells them apart.
    assert dense.model_type == base.model_type.replace("mistral", "llama")
    kept = {key: value for key, value in base.to_dict().items() if key not in _ASIDE}
    assert {key: value for key, value in dense.to_dict().items() if key in kept} == kept
    models = [AutoModelForCausalLM.from_pretrained(folder) for folder in (converted.base, tmp_path / "dense")]
    assert type(models[1]).__name__ == dense.architectures[0]
    assert torch.equal(logits_of(models[0], ids), logits_of(models[1], ids))
    assert not list((tmp_path / "dense").glob("*.py"))
