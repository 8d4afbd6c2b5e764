"""A model run layer by layer from disk is the model."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, MistralConfig, MixtralConfig, Qwen2Config, Qwen3Config

from moh_llm.conversion.layers import LayerwiseModel, run_layer
from moh_llm.metrics import logits_of
from moh_llm.records.model import read_weight_map


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


@pytest.mark.parametrize("family", [MistralConfig, MixtralConfig, Qwen2Config, Qwen3Config])
def test_other_families_cast_when_read(make_model, one_thread, family):
    extra = {"sliding_window": None} if family is MistralConfig else {"head_dim": 16}
    assert_same_logits(make_model(family, dtype=torch.bfloat16, **extra), torch.float32)
