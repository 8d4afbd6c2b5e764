"""Losses, gradients and scores of a step, against plain formulas."""

import json

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoTokenizer

from moh_llm.data.shards import tokens_for
from moh_llm.data.stream import SequenceStream
from moh_llm.modeling import MoHLlamaConfig, MoHLlamaForCausalLM
from moh_llm.training import losses as module
from moh_llm.training import networks
from moh_llm.training.losses import balance_loss_sum, token_losses
from moh_llm.training.parallel import make_accelerator
from moh_llm.training.reference import Reference
from moh_llm.training.step import TrainingStep, accumulate_gradients

NORMALIZED = {"num_shared_heads": [0, 1], "router_type": "two_stage", "router_score": "normalized"}


@pytest.mark.parametrize("plan", [{"num_shared_heads": 0, "routing_granularity": "kv_group"}, NORMALIZED])
def test_balance_loss_is_the_models_own_block_by_block(paper_folder, plan) -> None:
    model = MoHLlamaForCausalLM(MoHLlamaConfig.from_pretrained(paper_folder, **plan))
    heads = model.config.num_attention_heads
    model.set_active_heads([heads - layer % 2 * 2 for layer in range(model.config.num_hidden_layers)])
    ids = torch.randint(0, 200, (3, 16), generator=torch.Generator().manual_seed(0))
    together = model(ids, use_cache=False, output_router_logits=True)
    apart = [model(row[None], use_cache=False, output_router_logits=True).aux_loss for row in ids]
    torch.testing.assert_close(balance_loss_sum(together.router_logits, model.routers), sum(apart))


def student_and_batch(config, blocks: int):
    sources = tokens_for(config.data.mixture, networks.load_tokenizer(config.model)).sources
    return networks.make_student(config).train(), SequenceStream(sources, config.data.sequence_length, 0).batch(
        0, blocks
    )


def gradients_of(config, model, batch, beta: float):
    """The step's losses and the gradient's norm; gradients are not clipped."""
    accelerator = make_accelerator(config)
    teacher = networks.make_teacher(config, Reference("start", own=True), accelerator.device)
    step = TrainingStep(model, teacher, config.objective).train()
    return accumulate_gradients(accelerator, accelerator.prepare(step), batch, config, beta)


@pytest.mark.parametrize("kind", ["distillation", "cross_entropy"])
def test_accumulation_1x8_equals_8x1(configure, kind: str) -> None:
    results = []
    for rows in (1, 2, 8):
        config = configure(
            **{
                "data.batch_size": 8,
                "data.micro_batch_size": rows,
                "objective.kind": kind,
                "optimizer.max_grad_norm": None,
            }
        )
        model, batch = student_and_batch(config, 8)
        valid = (batch["labels"][:, 1:] != -100).sum(1)
        assert len(set(valid.tolist())) > 1, "sequences must differ in predicted tokens for this test to mean anything"
        # A large beta, so that the load-balance loss's gradient counts too.
        losses, _ = gradients_of(config, model, batch, beta=1.0)
        results.append((losses, {name: weight.grad for name, weight in model.named_parameters()}))
    losses, gradients = results[0]
    assert losses.task > 1e-2 and losses.balance > 1e-2
    for other, other_gradients in results[1:]:
        for name in ("task", "cross_entropy", "balance"):
            assert getattr(other, name) == pytest.approx(getattr(losses, name), abs=1e-6)
        for name, gradient in gradients.items():
            torch.testing.assert_close(other_gradients[name], gradient, atol=1e-6, rtol=1e-5)


def test_losses_are_of_completions_alone(configure, tmp_path) -> None:
    lines = [{"prompt": "ab cd " * (i % 5), "completion": f"{i * i}"} for i in range(200)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    source = {"weight": 1, "files": "pairs.jsonl", "type": "prompt_completion"}
    (tmp_path / "pairs.yaml").write_text(json.dumps({"sources": {"pairs": source}}))
    config = configure(**{"data.mixture": str(tmp_path / "pairs.yaml")})
    model, batch = student_and_batch(config, 4)
    losses, _ = gradients_of(config, model, batch, beta=1.0)

    tokenizer = AutoTokenizer.from_pretrained(config.model)
    counted, begins = set(tokenizer("0123456789<end>")["input_ids"]), batch["position_ids"] == 0
    values = []
    with torch.no_grad():
        inputs = {name: batch[name] for name in ("input_ids", "position_ids")}
        own = model(**inputs, use_cache=False).logits.log_softmax(-1)
        with model.all_heads_active():
            base = model(**inputs, use_cache=False).logits.log_softmax(-1)
    for row in range(4):
        for at in range(own.shape[1] - 1):
            token = int(batch["input_ids"][row, at + 1])
            if token in counted and not begins[row, at + 1]:
                kl = (base[row, at].exp() * (base[row, at] - own[row, at])).sum()
                values.append((float(kl), -float(own[row, at, token])))
    mean = torch.tensor(values).mean(0).tolist()
    assert 0 < len(values) < 0.7 * own[:, :, 0].numel()
    assert losses.task == pytest.approx(mean[0], rel=1e-4)
    assert losses.cross_entropy == pytest.approx(mean[1], rel=1e-4)


def test_the_balance_loss_is_added_with_its_coefficient(configure) -> None:
    config = configure(**{"optimizer.max_grad_norm": None, "data.micro_batch_size": 4})
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


def test_gradient_checkpointing_leaves_losses_and_gradients_as_they_were(configure) -> None:
    gradients, losses = [], []
    for given in ({}, {"gradient_checkpointing": True}):
        config = configure(**given)
        model, batch = student_and_batch(config, 4)
        recomputed = [layer.gradient_checkpointing for layer in model.model.layers]
        assert recomputed == [bool(given)] * 2
        losses.append(gradients_of(config, model, batch, beta=1.0))
        gradients.append({name: weight.grad for name, weight in model.named_parameters()})
    assert losses[0] == losses[1]
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name
    assert gradients[0]["model.layers.0.self_attn.router.routed.weight"].abs().sum() > 0


POSITIONS, SIZE, WORDS = 37, 16, 50


def made(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    """Hidden states and heads of student and teacher, and targets."""
    draw = torch.Generator().manual_seed(0)
    hidden, other = (torch.randn(POSITIONS, SIZE, generator=draw, dtype=torch.float64).to(dtype) for _ in range(2))
    head, other_head = (torch.randn(WORDS, SIZE, generator=draw, dtype=torch.float64).to(dtype) for _ in range(2))
    return hidden.requires_grad_(), head.requires_grad_(), torch.arange(POSITIONS) % WORDS, other, other_head


def plain(hidden, head, targets, other=None, other_head=None) -> tuple[torch.Tensor, torch.Tensor]:
    logits = hidden @ head.T
    cross_entropy = F.cross_entropy(logits, targets, reduction="sum")
    if other is None:
        return cross_entropy, cross_entropy
    soft = [x.log_softmax(-1) for x in (logits, other @ other_head.T)]
    return F.kl_div(*soft, log_target=True, reduction="sum"), cross_entropy


@pytest.mark.parametrize("chunk", [8, 512])
@pytest.mark.parametrize("with_teacher", [False, True])
def test_losses_and_gradients_are_the_plain_ones(monkeypatch, chunk, with_teacher):
    monkeypatch.setattr(module, "chunk_positions", lambda vocabulary: chunk)
    hidden, head, targets, *teacher = made()
    given = teacher if with_teacher else ()
    mine, wanted = token_losses(hidden, head, targets, given), plain(hidden, head, targets, *given)
    for a, b in zip(mine, wanted, strict=True):
        torch.testing.assert_close(a, b)
    # A factor, as the loss has one.
    gradients = [torch.autograd.grad(0.3 * task, (hidden, head)) for task in (mine[0], wanted[0])]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


def test_autocast_takes_products_in_bfloat16_and_sums_in_float32():
    hidden, head, targets, *teacher = made(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        mine = token_losses(hidden, head, targets, teacher)
        gradient = torch.autograd.grad(mine[0], head)[0]
    exact = plain(hidden, head, targets, *teacher)
    assert mine[0].dtype == torch.float32 and gradient.dtype == torch.float32
    torch.testing.assert_close(mine[0], exact[0], rtol=2e-2, atol=0)
    torch.testing.assert_close(gradient, torch.autograd.grad(exact[0], head)[0], rtol=0.1, atol=0.3)


def test_no_positions_are_no_loss():
    hidden, head, targets, *teacher = made()
    task, cross_entropy = token_losses(hidden[:0], head, targets[:0], (teacher[0][:0], teacher[1]))
    task.backward()
    assert task == cross_entropy == 0 and head.grad.abs().sum() == 0
