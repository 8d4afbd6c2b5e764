"""Training of a converted Mixtral: the loss of its experts beside that of its heads, what is saved, what is refused."""

from pathlib import Path

import pytest
import torch
from trained import read_log
from transformers import MixtralConfig, MixtralForCausalLM, Trainer, TrainingArguments

from moh_llm.data.shards import tokens_for
from moh_llm.data.stream import SequenceStream
from moh_llm.errors import UserError
from moh_llm.modeling import MoHLlamaForCausalLM
from moh_llm.training import networks
from moh_llm.training.balance import HeadBalanceMixin
from moh_llm.training.loop import train
from moh_llm.training.parallel import make_accelerator
from moh_llm.training.preflight import check_model
from moh_llm.training.step import TrainingStep, accumulate_gradients

COEFFICIENT = 0.3
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def mixtral_folder(made_once, make_model) -> Path:
    """A random Mixtral of 4 experts, not to be changed."""
    fields = {"num_local_experts": 4, "max_position_embeddings": 64, "router_aux_loss_coef": COEFFICIENT}
    return made_once("mixtral", lambda folder: make_model(MixtralConfig, **fields).rename(folder))


@pytest.fixture
def configure_experts(configure, mixtral_folder: Path, made_once, convert):
    """`configure` with a conversion of that Mixtral whose routers learn."""
    flags = ["--num-active-heads", "2", "--fallback", "value"]
    folder = made_once("moh-mixtral", lambda folder: convert(mixtral_folder, folder, *flags))
    return lambda **keys: configure(model=str(folder), **keys)


def losses_and_gradients(config) -> tuple[dict[str, float], dict[str, torch.Tensor], torch.Tensor]:
    """Of a step with all heads on, and its tokens `[8, L]`."""
    sources = tokens_for(config.data.mixture, networks.load_tokenizer(config.model)).sources
    batch = SequenceStream(sources, config.data.sequence_length, 0).batch(0, 8)
    model = networks.make_student(config).train()
    model.set_active_heads(model.config.num_attention_heads)
    accelerator = make_accelerator(config)
    step = accelerator.prepare(TrainingStep(model, None, config.objective))
    losses, _ = accumulate_gradients(accelerator, step, batch, config, 0.0)
    return losses._asdict(), {name: weight.grad for name, weight in model.named_parameters()}, batch


@pytest.mark.parametrize("recomputed", [False, True])
def test_the_loss_of_experts_is_mixtrals_of_each_sequence(configure_experts, mixtral_folder, recomputed):
    keys = {"data.batch_size": 8, "objective.kind": "cross_entropy", "optimizer.max_grad_norm": None}
    keys["gradient_checkpointing"] = recomputed
    (apart, gradients, batch), (together, others, _) = (
        losses_and_gradients(configure_experts(**keys, **{"data.micro_batch_size": rows})) for rows in (1, 8)
    )
    assert together == pytest.approx(apart, rel=1e-5)
    base = MixtralForCausalLM.from_pretrained(mixtral_folder)
    terms = []
    for ids, positions in zip(batch["input_ids"], batch["position_ids"], strict=True):
        inputs = {"input_ids": ids[None], "position_ids": positions[None]}
        terms.append(base(**inputs, use_cache=False, output_router_logits=True).aux_loss)
    loss = COEFFICIENT * torch.stack(terms).mean()
    assert apart["experts"] == pytest.approx(loss.item(), rel=1e-5) and loss > 0.3
    inputs = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"]}
    hidden = base.model(**inputs, use_cache=False).last_hidden_state[:, :-1]
    labels = batch["labels"][:, 1:]
    (loss + torch.nn.functional.cross_entropy(base.lm_head(hidden).flatten(0, 1), labels.flatten())).backward()
    # Those of earlier layers have a part that comes from the heads' routers.
    last = {name: weight for name, weight in base.named_parameters() if name.startswith("model.layers.1.mlp.")}
    assert len(last) == 3
    for name, weight in last.items():
        torch.testing.assert_close(gradients[name], weight.grad, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(others[name], weight.grad, atol=1e-5, rtol=1e-4)


def test_a_run_has_both_losses_and_saves_mixtrals_names(configure_experts, read_tensors):
    config = configure_experts(max_steps=4)
    train(config)
    log = read_log(Path(config.output_dir))
    steps = [line for line in log if line["step"]]
    assert len(steps) == 4
    for line in steps:
        assert line["expert_balance_loss"] > COEFFICIENT and line["balance_loss"] > 0
        parts = line["kl"] + 0.01 * line["balance_loss"] + line["expert_balance_loss"]
        assert line["loss"] == pytest.approx(parts)
    before, after = read_tensors(Path(config.model)), read_tensors(Path(config.output_dir) / "model")
    assert {name: tensor.shape for name, tensor in before.items()} == {name: t.shape for name, t in after.items()}
    moved = [name for name, tensor in before.items() if not torch.equal(tensor, after[name])]
    assert "model.layers.1.block_sparse_moe.experts.3.w2.weight" in moved
    saved = MoHLlamaForCausalLM.from_pretrained(Path(config.output_dir) / "model")
    assert saved.config.expert_balance_coef == COEFFICIENT


def test_adapters_are_on_attention(configure_experts):
    with pytest.raises(UserError, match="the model has no 'gate_proj'; it has k_proj, o_proj, q_proj, v_proj"):
        networks.make_student(configure_experts(**{"lora.rank": 4}))
    student = networks.make_student(configure_experts(**{"lora.rank": 4, "lora.target_modules": ["q_proj"]}))
    assert not any("experts" in name for name in networks.trained_weights(student))


def test_experts_cannot_be_divided(configure_experts):
    config = configure_experts()
    check_model(config, divided=False)
    with pytest.raises(UserError, match="feed-forward experts, which zero3 and fsdp2 cannot divide; take ddp"):
        check_model(config, divided=True)


def test_the_mixin_gives_other_trainers_the_loss_of_the_model(configure_experts, tmp_path):
    model = MoHLlamaForCausalLM.from_pretrained(configure_experts().model).train()
    trainer = type("Balanced", (HeadBalanceMixin, Trainer), {})(
        model, TrainingArguments(tmp_path, report_to=[], use_cpu=True)
    )
    ids = torch.randint(1, 257, (3, 20), generator=torch.Generator().manual_seed(0))
    for model.config.router_score in ("quantized", "normalized"):
        found = trainer.compute_loss(model, {"input_ids": ids, "labels": ids})
        torch.testing.assert_close(found, model(ids, labels=ids, output_router_logits=True).loss)
        assert found > model(ids, labels=ids).loss + COEFFICIENT


def test_frozen_routers_add_nothing_to_a_loss(make_llama, convert, tmp_path):
    assert convert(make_llama(), tmp_path / "moh", "--fallback", "value", "--keys", "0.7", "--heldout-tokens", "0") == 0
    model = MoHLlamaForCausalLM.from_pretrained(tmp_path / "moh").train()
    assert model.config.router_type == "linear"
    trainer = type("Balanced", (HeadBalanceMixin, Trainer), {})(
        model, TrainingArguments(tmp_path / "run", report_to=[], use_cpu=True)
    )
    ids = torch.randint(1, 257, (3, 20), generator=torch.Generator().manual_seed(0))
    plain = model(ids, labels=ids).loss
    assert trainer.compute_loss(model, {"input_ids": ids, "labels": ids}) > plain + 1e-4
    for router in model.routers:
        router.requires_grad_(False)
    torch.testing.assert_close(trainer.compute_loss(model, {"input_ids": ids, "labels": ids}), plain)
