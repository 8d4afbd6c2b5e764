"""Nothing assumes a CPU or CUDA: models and losses run on torch's "meta" device, which refuses tensors of another one.

"mps" tensors without numbers (torch's own fake ones) stand for a device without float64.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import masking_utils

from moh_llm.analysis.heads import LayerPass, watch
from moh_llm.devices import choose_device, float64_device, synchronize, wide
from moh_llm.metrics import compare_predictions
from moh_llm.modeling import MoHLlamaConfig, MoHLlamaForCausalLM
from moh_llm.training.losses import balance_loss_sum, comparison_values, expert_loss_sum, token_losses
from moh_llm.training.scoring import RoutingCounts

META = torch.device("meta")
WAYS = [("query_norm", "none"), ("linear", "value"), ("two_stage", "none"), ("threshold", "local")]
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


@pytest.fixture(autouse=True)
def accelerator(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A machine whose accelerator is the meta device."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: META)
    # transformers asks whether a batch is packed, for which it would need numbers: it is.
    monkeypatch.setattr(masking_utils, "is_tracing", lambda *_: True)
    device = choose_device()
    assert device == META
    synchronize(device)
    return device


def make_model(router: str, fallback: str, **fields: object) -> MoHLlamaForCausalLM:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_active_heads": 2}
    heads["num_shared_heads"] = int(router == "two_stage")
    window = {"local_window": 8} if fallback == "local" else {}
    routing = {"router_type": router, "head_fallback": fallback}
    return MoHLlamaForCausalLM(MoHLlamaConfig(**sizes, **heads, **window, **routing, **fields))


def packed() -> dict[str, torch.Tensor]:
    """Two rows of two documents."""
    positions = torch.arange(16, device=META).repeat(2, 2)
    return {"input_ids": torch.zeros(2, 32, dtype=torch.int64, device=META), "position_ids": positions}


@pytest.mark.parametrize("experts", [{}, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize(("router", "fallback"), WAYS)
def test_a_step_of_training(router: str, fallback: str, experts: dict[str, int]) -> None:
    # The products of experts take bfloat16 alone on the meta device.
    model = make_model(router, fallback, **experts).to(META, torch.bfloat16 if experts else torch.float32).train()
    recorded = {"output_router_logits": True, "output_expert_logits": bool(experts)}
    output = model.model(**packed(), use_cache=False, **recorded)
    loss = output.last_hidden_state.float().sum() + balance_loss_sum(output.router_logits, model.routers)
    if experts:
        loss = loss + expert_loss_sum(output.expert_logits, 2, model.config)
    loss.backward()
    assert loss.device == META
    assert {weight.grad.device for weight in model.parameters() if weight.grad is not None} == {META}


@pytest.mark.parametrize(("router", "fallback"), WAYS)
def test_inference_and_its_analysis(router: str, fallback: str) -> None:
    model = make_model(router, fallback).to(META).eval()
    with torch.no_grad():
        first = model(input_ids=packed()["input_ids"], use_cache=True)
        step = model(input_ids=packed()["input_ids"][:, :1], past_key_values=first.past_key_values, use_cache=True)
    assert first.logits.device == step.logits.device == META
    seen: list[LayerPass] = []
    assert watch(model, [packed()], seen.append) == 64
    assert {tensor.device for one in seen for tensor in (one.on, wide(one.heads))} == {META}


def test_token_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)  # meta has none
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
    hidden, head = (torch.randn(shape, device=META, requires_grad=True) for shape in ((40, 32), (64, 32)))
    other, targets = torch.randn(40, 32, device=META), torch.zeros(40, dtype=torch.int64, device=META)
    for teacher in (None, (other, head.detach())):
        task, cross_entropy = token_losses(hidden, head, targets, teacher)
        task.backward()
        assert cross_entropy.device == hidden.grad.device == head.grad.device == META
        assert comparison_values(hidden, head, targets, teacher).device == META


class WithoutFloat64(TorchDispatchMode):
    """Operations as they are, but that float64 on "mps" is refused, as it is there."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "mps" and tensor.dtype == torch.float64:
                raise TypeError(f"{func}: MPS has no float64")
        return made


def test_without_float64_sums_are_taken_on_the_cpu() -> None:
    assert float64_device(torch.device("cuda:1")) == torch.device("cuda:1")
    with FakeTensorMode(), WithoutFloat64():
        states = torch.randn(6, 8, device="mps")
        found = [wide(states), compare_predictions(states, states, torch.zeros(6, dtype=torch.int64, device="mps"))]
        counts = RoutingCounts()
        counts.add([states > 0], wide(states).sum())
        found += counts._selected
    assert {(tensor.device.type, tensor.dtype) for tensor in found} == {("cpu", torch.float64)}
