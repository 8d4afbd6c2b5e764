"""A model run layer by layer from disk is the model."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, MistralConfig, MixtralConfig, Qwen2Config, Qwen3Config

from moh_llm.conversion.layers import LayerwiseModel, run_layer
from moh_llm.metrics import logits_of
from moh_llm.modeling import MoHLlamaConfig, MoHLlamaForCausalLM
from moh_llm.records.model import read_weight_map

SIZES = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
PLAN = {
    "num_shared_heads": [1, 2, 0],
    "shared_heads": [[2], [1, 3], []],
    "num_active_heads": [2, 4, 3],
    "router_type": "linear",
    "head_fallback": "value",
}


def open_layerwise(folder, dtype):
    _, weight_map = read_weight_map(folder)
    return LayerwiseModel(folder, weight_map, AutoConfig.from_pretrained(folder), dtype, torch.device("cpu"))


def packed_batches():
    """Two batches, of which some rows hold several documents."""
    ids = torch.randint(1, 257, (3, 24), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(24).repeat(3, 1)
    positions[1, 9:] -= 9
    positions[2, 5:] -= 5
    positions[2, 20:] = torch.arange(4)
    return [{"input_ids": part, "position_ids": at} for part, at in zip(ids.split(2), positions.split(2), strict=True)]


@torch.no_grad()
def assert_same_logits(folder, dtype):
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    parts, batches = open_layerwise(folder, dtype), packed_batches()
    hidden = parts.embed(batch["input_ids"] for batch in batches)
    for number in range(len(parts)):
        layer = parts.layer(number)
        hidden = [run_layer(layer, h, batch["position_ids"]) for h, batch in zip(hidden, batches, strict=True)]
    head = parts.head()
    for states, batch in zip(hidden, batches, strict=True):
        expected = logits_of(whole)(batch)
        assert torch.equal(head(states), expected) and expected.dtype == dtype
        one_document = batch | {"position_ids": torch.arange(24).expand_as(batch["input_ids"])}
        assert not torch.equal(logits_of(whole)(one_document), expected)


@pytest.mark.parametrize(("dtype", "tied"), [(torch.float32, False), (torch.bfloat16, True)])
def test_dense_llama(make_llama, one_thread, dtype, tied):
    folder = make_llama(dtype=dtype, max_shard_size="20KB", tie_word_embeddings=tied, num_hidden_layers=3)
    assert len(list(folder.glob("*.safetensors"))) > 1
    assert_same_logits(folder, dtype)


@pytest.mark.parametrize(("dtype", "tied"), [(torch.float32, False), (torch.bfloat16, True)])
def test_moh_model_with_uneven_budgets_and_fallbacks(tmp_path, one_thread, dtype, tied):
    torch.manual_seed(0)
    model = MoHLlamaForCausalLM(MoHLlamaConfig(**SIZES, **PLAN, tie_word_embeddings=tied))
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.fallback.bias)
    model.to(dtype).save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert_same_logits(tmp_path, dtype)
    routers = [open_layerwise(tmp_path, dtype).layer(number).layers[0].self_attn.router for number in range(3)]
    assert [(router.num_shared, router.num_active) for router in routers] == [(1, 2), (2, 4), (0, 3)]


@pytest.mark.parametrize("family", [MistralConfig, MixtralConfig, Qwen2Config, Qwen3Config])
def test_other_families_cast_when_read(make_model, one_thread, family):
    extra = {"sliding_window": None} if family is MistralConfig else {"head_dim": 16}
    assert_same_logits(make_model(family, dtype=torch.bfloat16, **extra), torch.float32)
