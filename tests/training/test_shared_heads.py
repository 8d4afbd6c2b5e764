"""Shared heads that are learned: the search finds heads that matter, and leaves an ordinary model."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from trained import read_checkpoint, unfinish

from moh_llm.analysis.heads import heads_on
from moh_llm.errors import UserError
from moh_llm.metrics import logits_of
from moh_llm.modeling import MoHLlamaConfig, MoHLlamaForCausalLM
from moh_llm.training.loop import train
from moh_llm.training.shared_heads import fix_shared_heads, learn_shared_heads, soft_top_k

USELESS = [[0, 1], [1]]  # heads of each layer whose output is not read; training begins with the first two shared
PLAN = ["--num-shared-heads", "0", "--num-active-heads", "3", "budgets=even", "--heldout-tokens", "0"]


@pytest.fixture(scope="session")
def planted_folder(made_once: Callable[..., Path], base_folder: Path, convert: Callable[..., int]) -> Path:
    """A conversion without shared heads of a base whose output projections do not read the heads of `USELESS`."""

    def make(folder: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        base = AutoModelForCausalLM.from_pretrained(base_folder)
        with torch.no_grad():
            for layer, heads in zip(base.model.layers, USELESS, strict=True):
                for head in heads:
                    size = layer.self_attn.head_dim
                    layer.self_attn.o_proj.weight[:, head * size : (head + 1) * size] = 0
        base.save_pretrained(folder / "base")
        AutoTokenizer.from_pretrained(base_folder).save_pretrained(folder / "base")
        assert convert(folder / "base", folder / "moh", *PLAN, "--fallback", "none") == 0

    return made_once("planted", make)


@pytest.fixture
def configure_planted(configure, planted_folder: Path):
    """Recipes over that model; its two shared heads are learned over 24 of 26 steps.

    `base` is named, since the conversion was made in a folder of another name.
    """
    keys = {"max_steps": 26, "shared_heads.number": 2, "shared_heads.steps": 24, "evaluation.eval_steps": 0}
    keys |= {"model": str(planted_folder / "moh"), "base": str(planted_folder / "base")}
    keys |= {"optimizer.router_learning_rate": 1e-3, "checkpoint.save_steps": 24}
    return lambda **more: configure(**keys | more)


@pytest.mark.slow
@pytest.mark.parametrize("method", [{}, {"lora.rank": 4}], ids=["full", "lora"])
def test_useless_heads_are_not_shared(configure_planted, read_tensors, method: dict) -> None:
    config = configure_planted(**method)
    train(config)
    saved = Path(config.output_dir) / "model"
    found = MoHLlamaConfig.from_pretrained(saved)
    for useless, shared in zip(USELESS, found.shared_heads, strict=True):
        assert not {*useless} & {*shared}
    assert (found.num_shared_heads, found.num_active_heads) == (2, 3)
    tensors = read_tensors(saved)
    assert not any("shared_logits" in name for name in tensors)
    assert tensors["model.layers.0.self_attn.router.routed.weight"].shape == (2, 32)


def test_after_its_steps_nothing_is_learned_also_when_it_is_resumed(configure_planted, read_tensors) -> None:
    config = configure_planted(**{"checkpoint.save_steps": 12, "checkpoint.save_total_limit": 9})
    train(config)
    checkpoints = Path(config.output_dir) / "checkpoints"
    before, after = (read_checkpoint(checkpoints / f"step-0000{step}") for step in (24, 26))
    names = [name for name in before if name.endswith("shared_logits") and not name.startswith("exp_avg")]
    assert len(names) == 2
    for name in names:
        assert torch.equal(before[name], after[name]) and before[name].abs().max() > 0.1
        router = name.replace("shared_logits", "routed.weight")
        assert not torch.equal(before[router], after[router])
    folder = Path(config.output_dir)
    tensors = read_tensors(folder / "model")
    unfinish(folder, 12)
    train(config)
    again = read_tensors(folder / "model")
    assert again.keys() == tensors.keys() and all(torch.equal(again[name], tensors[name]) for name in tensors)


PLANS = {
    "linear": {"router_type": "linear", "head_fallback": "value"},
    "query_norm weighted": {"router_type": "query_norm", "router_score": "weighted"},
    "never on": {
        "router_type": "linear",
        "head_fallback": "local",
        "local_window": 3,
        "local_sinks": 1,
        "never_on_heads": [[1], [4]],
    },
    "groups": {"router_type": "linear", "routing_granularity": "kv_group", "head_fallback": "value"},
}


def make(**plan) -> MoHLlamaForCausalLM:
    """A random model of 8 heads (4 KV heads) without shared ones, of which 4 are active."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_shared_heads": 0, "num_active_heads": 4}
    model = MoHLlamaForCausalLM(MoHLlamaConfig(**sizes, **heads | plan, initializer_range=0.3)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".fallback." in name:
                weight.normal_()
    return model


@pytest.mark.parametrize("name", PLANS)
def test_the_fixed_model_computes_what_the_learning_one_does(name: str) -> None:
    model = make(**PLANS[name])
    ids = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "position_ids": torch.arange(12).expand(2, -1)}
    before = logits_of(model)(batch)
    learn_shared_heads(model, 2)
    with torch.no_grad():
        for layer, router in enumerate(model.routers):
            router.shared_logits.copy_(torch.arange(len(router.shared_logits)).roll(1 + layer))
    learned, on = logits_of(model)(batch), heads_on(model, ids)
    with torch.enable_grad():
        in_training = model(**batch, use_cache=False).logits
    fix_shared_heads(model)
    shared = model.config.shared_heads
    assert all(len(ids) == 2 for ids in shared) and shared[0] != shared[1]
    assert type(model.routers[0]).__name__ == "MoHRouter"
    for layer, ids_on in enumerate(shared):
        assert on[:, layer, :, ids_on].all() and (on.sum(-1)[:, :, 4:] == 4).all()
    fixed = logits_of(model)(batch)
    assert torch.equal(heads_on(model, ids), on)
    for logits in (learned, in_training):
        torch.testing.assert_close(logits, fixed, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(fixed, before, atol=1e-2)
    assert "shared_logits" not in "".join(model.state_dict())


def test_soft_top_k_sums_to_k_and_sharpens() -> None:
    logits = torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    for k in (1, 2, 5):
        for temperature in (1.0, 0.1):
            assert soft_top_k(logits, k, temperature).sum().item() == pytest.approx(k)
        assert torch.autograd.gradcheck(lambda logits, k=k: soft_top_k(logits, k, 0.7), logits)
    sharp = soft_top_k(logits, 2, 1e-3)
    assert torch.allclose(sharp, torch.zeros(6, dtype=torch.float64).scatter(0, logits.topk(2).indices, 1.0))


REFUSED = {
    "shared": ({"num_shared_heads": 1}, 1, "the model has shared heads already"),
    "threshold": ({"router_type": "threshold"}, 1, "the model's router is 'threshold'"),
    "few": ({"num_active_heads": [4, 2]}, 3, "layer 1 has 2 active heads of 8, of which 2 can be shared"),
    "groups": ({"routing_granularity": "kv_group"}, 3, "must be whole key-value groups of 2 heads"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_learned_is_refused(name: str) -> None:
    plan, number, message = REFUSED[name]
    with pytest.raises(UserError, match=f"shared_heads.number={number}.*{message}"):
        learn_shared_heads(make(**{"router_type": "linear"} | plan), number)


def test_the_recipe_is_checked(configure, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"shared_heads.steps=7 must not exceed max_steps=6"):
        configure(**{"shared_heads.steps": 7})
    config = configure(**{"shared_heads.steps": 3})
    with pytest.raises(UserError, match=r"has shared heads already, .* convert its base with --num-shared-heads 0"):
        train(config)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(UserError, match=r"shared_heads and FSDP: .* take ddp or one process"):
        train(config)
