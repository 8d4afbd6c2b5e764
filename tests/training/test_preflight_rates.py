"""The warning about a learning rate that moves routers too far in a step."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moh_llm.modeling import MoHLlamaConfig, MoHLlamaForCausalLM
from moh_llm.records.model import read_weight_map
from moh_llm.training.loop import train
from moh_llm.training.preflight_rates import check_router_rate, input_sums


@pytest.fixture
def loud(model_folder: Path, tmp_path: Path) -> Path:
    """The tiny model; the inputs of its last layer are fifty times as large."""
    folder = Path(shutil.copytree(model_folder, tmp_path / "loud"))
    *_, last = sorted(name for name in read_weight_map(folder)[1] if name.endswith("input_layernorm.weight"))
    file = folder / read_weight_map(folder)[1][last]
    weights = load_file(file)
    file.unlink()  # it may be a link to the base's
    save_file(weights | {last: weights[last] * 50}, file, metadata={"format": "pt"})
    return folder


def test_a_step_changes_logits_by_what_is_estimated(loud):
    model = MoHLlamaForCausalLM.from_pretrained(loud)
    sums = input_sums(loud)
    assert sums.keys() == {*range(model.config.num_hidden_layers)}
    states = torch.randn(2000, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    for number, layer in enumerate(model.model.layers):
        weight = torch.zeros(model.config.hidden_size, requires_grad=True)
        inputs = layer.input_layernorm(states).detach()
        changes = []
        for one in inputs[:50]:
            (step,) = torch.autograd.grad(one @ weight, weight)
            changes.append((1e-3 * step.sign() @ one).item())  # AdamW's first step
        assert sum(changes) / 50 == pytest.approx(1e-3 * sums[number], rel=0.1)


def test_large_inputs_are_warned_about_with_a_rate_that_is_not(loud, configure):
    config = MoHLlamaConfig.from_pretrained(loud)

    def check(rate: float | None):
        return check_router_rate(configure(model=str(loud), **{"optimizer.router_learning_rate": rate}), config)

    found = check(1e-2)
    last = config.num_hidden_layers - 1
    assert found.state == "warning" and f"in layer {last}, whose inputs are large" in found.text
    lower = float(re.search(r"set optimizer\.router_learning_rate to (\S+) at most", found.text)[1])
    assert check(lower).state == "ok" and check(2 * lower).state == "warning"
    # Without a rate of their own routers have that of the weights, 1e-3.
    assert "optimizer.learning_rate=0.001 changes" in check(None).text


def test_training_says_it_and_goes_on(loud, configure):
    said: list[str] = []
    train(configure(model=str(loud), max_steps=1, **{"evaluation.eval_steps": 0}), say=said.append)
    (warning,) = [line for line in said if line.startswith("warning: ") and "router_learning_rate" in line]
    assert "whose inputs are large; set optimizer.router_learning_rate to" in warning and "\n" not in warning


def test_only_what_was_fitted_is_judged(paper_folder, loud, configure):
    assert check_router_rate(configure(model=str(paper_folder)), MoHLlamaConfig.from_pretrained(paper_folder)) is None
    (loud / "conversion.json").unlink()
    assert check_router_rate(configure(model=str(loud)), MoHLlamaConfig.from_pretrained(loud)) is None
