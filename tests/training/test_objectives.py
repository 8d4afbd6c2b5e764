import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moh_llm.data.stream import BlockStream
from moh_llm.data.tokens import tokens_for
from moh_llm.modeling import MoHLlamaConfig, MoHLlamaForCausalLM
from moh_llm.training import networks
from moh_llm.training.beginning import Reference
from moh_llm.training.loop import train
from moh_llm.training.objectives import balance_loss_sum, layer_distance_sum
from moh_llm.training.parallel import make_accelerator
from moh_llm.training.passes import accumulate_gradients
from moh_llm.training.step import TrainingStep


@pytest.mark.parametrize("group_size", [1, 2], ids=["heads", "groups"])
def test_balance_loss_is_the_models_own_block_by_block(model_folder, paper_folder, group_size) -> None:
    if group_size == 1:
        model = MoHLlamaForCausalLM.from_pretrained(model_folder)
    else:
        config = MoHLlamaConfig.from_pretrained(paper_folder, num_shared_heads=0, routing_granularity="kv_group")
        model = MoHLlamaForCausalLM(config)
    heads = model.config.num_attention_heads
    model.set_active_heads([heads - layer % 2 * group_size for layer in range(model.config.num_hidden_layers)])
    ids = torch.randint(0, 200, (3, 16), generator=torch.Generator().manual_seed(0))
    together = model(ids, use_cache=False, output_router_logits=True)
    apart = [model(row[None], use_cache=False, output_router_logits=True).aux_loss for row in ids]
    torch.testing.assert_close(balance_loss_sum(together.router_logits, model.routers), sum(apart))


def test_layer_distance_is_that_of_a_loop() -> None:
    draw = torch.Generator().manual_seed(0)
    own, base = (torch.randn(3, 2, 5, 4, generator=draw) for _ in range(2))  # 3 layers, 2 blocks of 5
    counted = torch.rand(2, 5, generator=draw) < 0.6
    wanted = 0.0
    for layer in range(3):
        for block in range(2):
            for position in range(5):
                if counted[block, position]:
                    x, y = own[layer, block, position].double(), base[layer, block, position].double()
                    wanted += float((x - y) @ (x - y) / (y @ y)) / 3
    assert 0 < counted.sum() < 10
    assert float(layer_distance_sum(list(own), list(base), counted)) == pytest.approx(wanted, rel=1e-5)


def test_layer_matching_pulls_the_layers_to_the_bases(configure) -> None:
    ends = []
    for coefficient in (1e-6, 100.0):  # next to nothing, but in the log; and most of the loss
        config = configure(output=f"{configure().output}-{coefficient}", max_steps=60, **{"evaluation.every": 0})
        config = replace(config, objective=replace(config.objective, layer_coefficient=coefficient))
        train(config)
        log = [json.loads(line) for line in Path(config.output, "log.jsonl").read_text().splitlines()]
        assert log[0]["layer_distance"] > 0.3
        ends.append(sum(line["layer_distance"] for line in log[-6:]) / 6)
    assert ends[1] < 0.9 * ends[0]


def student_and_batch(config, blocks: int):
    sources = tokens_for(config.data.mixture, networks.load_tokenizer(config.model), print).sources
    return networks.make_student(config).train(), BlockStream(sources, config.data.block_length, 0).batch(0, blocks)


def gradients_of(config, model, batch, beta: float):
    """The step's losses and the gradient's norm; gradients are not clipped."""
    accelerator = make_accelerator(config)
    teacher = networks.make_teacher(config, Reference("start", own=True), model, accelerator.device)
    step = TrainingStep(model, teacher, config.objective).train()
    return accumulate_gradients(accelerator, accelerator.prepare(step), batch, config, beta)


@pytest.mark.parametrize(("kind", "layers"), [("distillation", 0.0), ("distillation", 1.0), ("cross_entropy", 0.0)])
def test_accumulation_1x8_equals_8x1(configure, kind: str, layers: float) -> None:
    results = []
    for rows in (1, 2, 8):
        config = configure(
            **{
                "data.batch_size": 8,
                "data.micro_batch_size": rows,
                "objective.kind": kind,
                "objective.layer_coefficient": layers,
                "optimizer.max_gradient_norm": None,
            }
        )
        model, batch = student_and_batch(config, 8)
        valid = (batch["labels"][:, 1:] != -100).sum(1)
        assert len(set(valid.tolist())) > 1, "blocks must differ in predicted tokens for this test to mean anything"
        # A large beta, so that the load-balance loss's gradient counts too.
        losses, _ = gradients_of(config, model, batch, beta=1.0)
        results.append((losses, {name: weight.grad for name, weight in model.named_parameters()}))
    losses, gradients = results[0]
    assert losses.task > 1e-2 and losses.balance > 1e-2 and (losses.layers > 1e-2) == (layers > 0)
    for other, other_gradients in results[1:]:
        for name in ("task", "cross_entropy", "balance", "layers"):
            assert getattr(other, name) == pytest.approx(getattr(losses, name), abs=1e-6)
        for name, gradient in gradients.items():
            torch.testing.assert_close(other_gradients[name], gradient, atol=1e-6, rtol=1e-5)


def test_the_balance_loss_is_added_with_its_coefficient(configure) -> None:
    config = configure(**{"optimizer.max_gradient_norm": None, "data.micro_batch_size": 4})
    found = []
    for beta in (0.0, 0.5):
        model, batch = student_and_batch(config, 4)
        gradients_of(config, model, batch, beta=beta)
        found.append({name: weight.grad for name, weight in model.named_parameters()})
    model.zero_grad()
    inputs = {name: batch[name] for name in ("input_ids", "position_ids")}
    (0.5 * model(**inputs, output_router_logits=True).aux_loss).backward()  # the model's own, a mean over sequences
    name = "model.layers.0.self_attn.router.routed.weight"
    wanted = dict(model.named_parameters())[name].grad
    assert wanted.abs().max() > 1e-3
    torch.testing.assert_close(found[1][name] - found[0][name], wanted, atol=1e-6, rtol=1e-4)


def test_gradient_checkpointing_leaves_the_gradient_as_it_was(configure) -> None:
    gradients = []
    for recompute in (False, True):
        config = configure(gradient_checkpointing=recompute)
        model, batch = student_and_batch(config, 4)
        gradients_of(config, model, batch, beta=1.0)
        gradients.append({name: weight.grad for name, weight in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name
    assert gradients[0]["model.layers.0.self_attn.router.routed.weight"].abs().sum() > 0
