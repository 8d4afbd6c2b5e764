"""The baselines' attention layers against loops over tokens and experts in float64, and the models around them."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig

from tests.benchmarks import naive_baselines as naive

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from baselines.attention import (
    BaselineAttention,
    BaselineForCausalLM,
    MoAAttention,
    StaticAttention,
    SwitchHeadAttention,
)

ROWS, TOKENS, THETA, SIZE = 2, 7, 10_000.0, 6


class Case(NamedTuple):
    make: Callable[[LlamaConfig], BaselineAttention]
    layer: Callable[..., tuple[torch.Tensor, list]]
    loss: Callable[[list], torch.Tensor] | None


CASES = {
    "moa": Case(
        partial(MoAAttention, experts=5, active=2),
        partial(naive.moa, size=SIZE, active=2, theta=THETA),
        naive.moa_loss,
    ),
    "switchhead": Case(
        partial(SwitchHeadAttention, experts=3, active=2),
        partial(naive.switchhead, size=SIZE, heads=6, active=2, theta=THETA),
        None,
    ),
    "static": Case(partial(StaticAttention, heads=3), partial(naive.static, size=SIZE, heads=3, theta=THETA), None),
    "static, averaged": Case(
        partial(StaticAttention, heads=3, averaged=True),
        partial(naive.static, size=SIZE, heads=3, theta=THETA, weight=1 / 3),
        None,
    ),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def make_config() -> LlamaConfig:
    config = LlamaConfig(
        vocab_size=40, hidden_size=12, intermediate_size=16, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, head_dim=SIZE, initializer_range=0.3, max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    return config


def make_layer(case: Case) -> BaselineAttention:
    torch.manual_seed(0)
    layer = case.make(make_config()).double()
    for weight in layer.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    return layer


def angles() -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of positions 0 to T - 1, `[1, T, D]`."""
    rates = THETA ** (-torch.arange(SIZE // 2, dtype=torch.float64) * 2 / SIZE)
    turns = torch.arange(TOKENS, dtype=torch.float64)[:, None] * torch.cat([rates, rates])
    return turns.cos()[None], turns.sin()[None]


def naive_pass(case: Case, x: torch.Tensor, weights: naive.Weights) -> tuple[torch.Tensor, torch.Tensor]:
    rows = [case.layer(row, weights) for row in x]
    routing = [token for _, of_row in rows for token in of_row]
    return torch.stack([output for output, _ in rows]), case.loss(routing) if case.loss else torch.zeros(())


@each_case
def test_output_loss_and_gradients_are_the_loops(case):
    layer = make_layer(case)
    x = torch.randn(ROWS, TOKENS, 12, dtype=torch.float64, requires_grad=True)
    probe = torch.randn(ROWS, TOKENS, 12, dtype=torch.float64)
    weights = {name.removesuffix(".weight"): weight for name, weight in layer.named_parameters()}
    output, _ = layer(x, angles())
    expected, loss = naive_pass(case, x, weights)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.as_tensor(layer.auxiliary_loss, dtype=loss.dtype), loss, rtol=0, atol=1e-14)
    inputs = [x, *weights.values()]
    # The auxiliary loss is small: weighed so that its gradient is seen beside the output's.
    ours = torch.autograd.grad((output * probe).sum() + 1e3 * layer.auxiliary_loss, inputs)
    theirs = torch.autograd.grad((expected * probe).sum() + 1e3 * loss, inputs)
    for name, own, other in zip(["x", *weights], ours, theirs, strict=True):
        assert other.abs().max() > 1e-3, name
        torch.testing.assert_close(own, other, rtol=0, atol=1e-10, msg=name)


@each_case
def test_multiply_adds_are_those_of_the_loops(case):
    layer = make_layer(case)
    weights = {name.removesuffix(".weight"): weight.detach() for name, weight in layer.named_parameters()}
    with FlopCounterMode(display=False) as counter:
        case.layer(torch.randn(TOKENS, 12, dtype=torch.float64), weights)
    assert counter.get_total_flops() == 2 * TOKENS * layer.multiply_adds((TOKENS + 1) / 2)


@each_case
def test_packed_documents_do_not_see_each_other(case):
    torch.manual_seed(0)
    model = BaselineForCausalLM(make_config(), case.make).eval()
    ids = torch.randint(40, (2, 12))
    ids[1, 6:] = ids[0, 6:]
    positions = torch.arange(6).repeat(2).expand(2, -1)
    first, second = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    assert (first[:6] - second[:6]).abs().max() > 0.1
    torch.testing.assert_close(first[6:], second[6:])
    with pytest.raises(ValueError, match="use_cache=False"):
        model(input_ids=ids)


def test_auxiliary_losses_are_added_to_the_loss():
    torch.manual_seed(0)
    model = BaselineForCausalLM(make_config(), CASES["moa"].make)
    ids = torch.randint(40, (2, 12))
    outputs = model(input_ids=ids, labels=ids, use_cache=False)
    own = torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    auxiliary = sum(layer.self_attn.auxiliary_loss for layer in model.model.layers)
    assert auxiliary > 0.01
    torch.testing.assert_close(outputs.loss, own + auxiliary)
    deviation = model.model.layers[1].self_attn.q_proj.weight.std().item()
    assert deviation == pytest.approx(0.3, rel=0.1)  # initialised as all weights are
