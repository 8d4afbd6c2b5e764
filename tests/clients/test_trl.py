"""TRL's trainers on converted models: they run, train the weights, and save what loads again."""

from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

import moh_llm
import moh_llm.errors

trl = pytest.importorskip("trl")
pytestmark = [pytest.mark.clients, pytest.mark.slow]

TEXT = "The river was high that spring, and the boats lay tied to the poplars below the mill. "
PAIRS = [{"prompt": TEXT[:20], "chosen": TEXT[20 : 40 + i], "rejected": TEXT[40 - i : 60]} for i in range(8)]
KINDS = {"sft": "SFT", "packed": "SFT, packed", "lora": "SFT with LoRA", "dpo": "DPO", "grpo": "GRPO"}
ARGUMENTS = {
    **{"max_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "logging_steps": 1, "seed": 0},
    **{"use_cpu": True, "bf16": False, "report_to": [], "save_strategy": "no", "disable_tqdm": True},
}


@pytest.fixture(scope="module")
def folders(made_once, make_llama, convert) -> dict[str, Path]:
    """Conversions with value fallbacks, whose linear router is trained, and with local ones."""
    local = ["--fallback", "local", "--local-window", "6", "local_sinks=2", "--local-start", "12"]
    flags = {
        "value": ["--fallback", "value", "--num-active-heads", "3"],
        "local": [*local, "--keys", "0.76", "--context", "64"],
    }

    def make(name: str) -> Path:
        base = make_llama(num_hidden_layers=2)
        given = [*flags[name], "--heldout-tokens", "0"]
        return made_once(f"trl-{name}", lambda folder: convert(base, folder / "moh", *given))

    return {name: make(name) / "moh" for name in flags}


def load(folder: Path, remote: bool) -> tuple:
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=remote)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=remote), tokenizer


def trainer_of(kind: str, model: torch.nn.Module, tokenizer, output: Path, *bases: type):
    def make(trainer: type, *arguments, **keywords):
        return type("Trainer", (*bases, trainer), {})(*arguments, **keywords)

    texts = Dataset.from_list([{"text": TEXT * 2}] * 8)
    if kind in ("sft", "packed", "lora"):
        packing = {"packing": True, "max_length": 64} if kind == "packed" else {"max_length": 64}
        adapter = LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM") if kind == "lora" else None
        arguments = trl.SFTConfig(output_dir=output, **packing, **ARGUMENTS)
        return make(
            trl.SFTTrainer, model, arguments, train_dataset=texts, processing_class=tokenizer, peft_config=adapter
        )
    if kind == "dpo":
        arguments = trl.DPOConfig(output_dir=output, max_length=64, **ARGUMENTS)
        return make(
            trl.DPOTrainer, model, args=arguments, train_dataset=Dataset.from_list(PAIRS), processing_class=tokenizer
        )
    arguments = trl.GRPOConfig(output_dir=output, num_generations=2, max_completion_length=8, **ARGUMENTS)
    prompts = Dataset.from_list([{"prompt": pair["prompt"]} for pair in PAIRS])

    def rewards(completions: list[str], **_) -> list[float]:
        return [float(len(set(text))) for text in completions]

    return make(trl.GRPOTrainer, model, rewards, arguments, train_dataset=prompts, processing_class=tokenizer)


@pytest.mark.parametrize("name", ["value", "local"])
@pytest.mark.parametrize(
    ("kind", "remote"),
    [("sft", False), ("sft", True), ("packed", False), ("lora", False), ("dpo", False), ("grpo", False)],
)
def test_it_trains_and_saves(folders, tmp_path, name, kind, remote, record):
    model, tokenizer = load(folders[name], remote)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    trainer = trainer_of(kind, model, tokenizer, tmp_path / "run")
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert trainer.state.global_step == len(losses) == 2 and all(map(torch.isfinite, map(torch.tensor, losses)))
    trained = trainer.model.merge_and_unload() if kind == "lora" else trainer.model
    changed = [key for key, tensor in trained.state_dict().items() if not tensor.equal(before[key])]
    assert any(key.endswith("q_proj.weight") for key in changed)
    trained.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", trust_remote_code=remote)
    assert again.config.head_balance_coef == model.config.head_balance_coef == 0.01
    assert all(tensor.equal(trained.state_dict()[key]) for key, tensor in again.state_dict().items())
    how = f"{name} fallback" + (", remote code" if remote else "")
    record(f"TRL {trl.__version__}", f"{KINDS[kind]}, {how}", "trains; what it saves loads again")


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_load_balance_loss_is_in_the_step(folders, tmp_path, accumulation):
    """Of plain SGD, the step with the loss less the step without it is the gradient of the loss alone."""
    texts = [TEXT[i:] * 2 for i in range(2 * accumulation)]
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": accumulation}
    plain = {
        "optim": "sgd",
        "learning_rate": 1.0,
        "max_grad_norm": 0.0,
        "lr_scheduler_type": "constant",
        "max_steps": 1,
    }
    weights, losses = [], []
    for name, bases in {"without": (), "with": (moh_llm.HeadBalanceMixin,)}.items():
        model, tokenizer = load(folders["value"], remote=True)
        model.config.head_balance_coef = 0.5
        arguments = trl.SFTConfig(output_dir=tmp_path / name, max_length=64, **ARGUMENTS | sizes | plain)
        trainer = type("Trainer", (*bases, trl.SFTTrainer), {})(
            model,
            arguments,
            train_dataset=Dataset.from_list([{"text": text} for text in texts]),
            processing_class=tokenizer,
        )
        trainer.train()
        weights.append({key: tensor.detach() for key, tensor in model.named_parameters()})
        losses.append(trainer.state.log_history[0]["loss"])
    start, _ = load(folders["value"], remote=True)
    expected = 0.0
    for first in range(0, len(texts), 2):
        rows = [tokenizer(text, truncation=True, max_length=64)["input_ids"] for text in texts[first : first + 2]]
        outputs = start(torch.tensor(rows), output_router_logits=True)
        (0.5 * outputs.aux_loss / accumulation).backward()
        expected += 0.5 * outputs.aux_loss.item() / accumulation
    assert losses[1] - losses[0] == pytest.approx(expected, abs=1e-3)
    without, with_it = weights
    routers = [key for key in without if ".router." in key]
    assert routers
    for key, weight in start.named_parameters():
        if weight.grad is not None:
            torch.testing.assert_close(without[key] - with_it[key], weight.grad, atol=1e-5, rtol=1e-3)
            assert key not in routers or weight.grad.abs().max() > 1e-4


@pytest.mark.parametrize("kind", ["lora", "dpo", "grpo"])
def test_every_trainer_takes_the_load_balance_loss(folders, tmp_path, kind):
    routers = []
    for bases in ((), (moh_llm.HeadBalanceMixin,)):
        model, tokenizer = load(folders["value"], remote=False)
        model.config.head_balance_coef = 10.0
        trainer = trainer_of(kind, model, tokenizer, tmp_path / str(len(bases)), *bases)
        if kind == "lora":  # which freezes them
            for key, parameter in trainer.model.named_parameters():
                parameter.requires_grad_(parameter.requires_grad or ".router." in key)
        trainer.train()
        routers.append(
            torch.cat([p.detach().flatten() for key, p in trainer.model.named_parameters() if ".router." in key])
        )
    assert not torch.allclose(*routers, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_every_trainer_holds_the_budget_of_keys(folders, tmp_path, kind):
    model, tokenizer = load(folders["local"], remote=kind == "sft")
    before = {key: weight.clone() for key, weight in model.named_parameters() if ".router." in key}
    trainer = trainer_of(kind, model, tokenizer, tmp_path, moh_llm.HeadBalanceMixin)
    trainer.train()
    lines = trainer.state.log_history[:2]
    if kind == "lora":  # routers are frozen
        assert not any("keys_read" in line for line in lines)
        return
    assert all(0 < line["keys_read"] < 1 and 0 < line["keys_asked"] < 1 for line in lines)
    assert lines[0]["keys_multiplier"] == 0 and trainer.state.stateful_callbacks["KeyBudget"][1] != 0
    assert any(not weight.equal(model.get_parameter(key)) for key, weight in before.items())


def test_a_loss_that_would_count_twice_is_refused(folders, tmp_path):
    model, tokenizer = load(folders["value"], remote=False)
    trainer = trainer_of("dpo", model, tokenizer, tmp_path, moh_llm.HeadBalanceMixin)
    model.config.output_router_logits = True
    with pytest.raises(moh_llm.errors.UserError, match="set it to False"):
        trainer.train()
