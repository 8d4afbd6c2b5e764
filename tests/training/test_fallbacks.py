"""Fallbacks are part of the student from the first step, are trained by either method, and are saved."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from moh_llm.metrics import logits_of
from moh_llm.modeling import MoHLlamaForCausalLM
from moh_llm.training import networks
from moh_llm.training.loop import train

METHODS = {"full": {}, "lora": {"lora.rank": 4}}


@pytest.mark.parametrize("method", METHODS)
def test_the_student_begins_as_the_converted_model(configure, model_folder: Path, method: str) -> None:
    ids = torch.randint(0, 200, (2, 16), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "position_ids": torch.arange(16).expand(2, -1)}
    converted = MoHLlamaForCausalLM.from_pretrained(model_folder).eval()
    with torch.no_grad():
        expected = logits_of(converted)(batch)
        assert torch.equal(logits_of(networks.make_student(configure(**METHODS[method])).eval())(batch), expected)
        for layer in converted.model.layers:
            layer.self_attn.fallback = None
        assert not torch.allclose(logits_of(converted)(batch), expected, atol=1e-2)  # they are felt


@pytest.mark.parametrize("method", METHODS)
def test_they_are_trained_and_saved(configure, model_folder: Path, read_tensors, method: str) -> None:
    config = configure(max_steps=2, **{"evaluation.eval_steps": 0, **METHODS[method]})
    train(config)
    before, after = read_tensors(model_folder), read_tensors(Path(config.output_dir) / "model")
    last = load_file(Path(config.output_dir) / "checkpoints" / "step-000002" / "model.safetensors")
    assert after.keys() == before.keys()
    names = [name for name in before if ".fallback." in name]
    assert len(names) == 2 * 3  # layers; the share's weight and bias, and the vector
    for name in names:
        (trained,) = (weight for full, weight in last.items() if full.endswith(name))
        assert torch.equal(after[name], trained) and not torch.equal(after[name], before[name]), name
