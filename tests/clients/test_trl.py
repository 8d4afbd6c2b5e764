"""TRL's trainers on converted models: they run, train the weights, and save what loads again."""

from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

trl = pytest.importorskip("trl")
pytestmark = pytest.mark.slow

TEXT = "The river was high that spring, and the boats lay tied to the poplars below the mill. "
PAIRS = [{"prompt": TEXT[:20], "chosen": TEXT[20 : 40 + i], "rejected": TEXT[40 - i : 60]} for i in range(8)]
ARGUMENTS = {
    **{"max_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "logging_steps": 1, "seed": 0},
    **{"use_cpu": True, "bf16": False, "report_to": [], "save_strategy": "no", "disable_tqdm": True},
}


@pytest.fixture(scope="module")
def folders(made_once, make_llama, convert) -> dict[str, Path]:
    """The default conversions, of short and of long context."""
    local = ["--fallback", "local", "--local-window", "6", "--local-sinks", "2", "--local-start", "12"]
    flags = {"value": ["--active-ratio", "0.7"], "local": [*local, "--active-ratio", "0.6", "--context", "64"]}

    def make(name: str) -> Path:
        base = make_llama(num_hidden_layers=2)
        return made_once(f"trl-{name}", lambda folder: convert(base, folder / "moh", *flags[name], "--verify", "none"))

    return {name: make(name) / "moh" for name in flags}


def load(folder: Path, remote: bool) -> tuple:
    import moh_llm  # noqa: F401  # registers the classes

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=remote)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=remote), tokenizer


def trainer_of(kind: str, model: torch.nn.Module, tokenizer, output: Path):
    texts = Dataset.from_list([{"text": TEXT * 2}] * 8)
    if kind in ("sft", "packed", "lora"):
        packing = {"packing": True, "max_length": 64} if kind == "packed" else {"max_length": 64}
        adapter = LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM") if kind == "lora" else None
        arguments = trl.SFTConfig(output_dir=output, **packing, **ARGUMENTS)
        return trl.SFTTrainer(model, arguments, train_dataset=texts, processing_class=tokenizer, peft_config=adapter)
    if kind == "dpo":
        arguments = trl.DPOConfig(output_dir=output, max_length=64, **ARGUMENTS)
        return trl.DPOTrainer(model, args=arguments, train_dataset=Dataset.from_list(PAIRS), processing_class=tokenizer)
    arguments = trl.GRPOConfig(output_dir=output, num_generations=2, max_completion_length=8, **ARGUMENTS)
    prompts = Dataset.from_list([{"prompt": pair["prompt"]} for pair in PAIRS])

    def rewards(completions: list[str], **_) -> list[float]:
        return [float(len(set(text))) for text in completions]

    return trl.GRPOTrainer(model, rewards, arguments, train_dataset=prompts, processing_class=tokenizer)


@pytest.mark.parametrize("name", ["value", "local"])
@pytest.mark.parametrize(
    ("kind", "remote"),
    [("sft", False), ("sft", True), ("packed", False), ("lora", False), ("dpo", False), ("grpo", False)],
)
def test_it_trains_and_saves(folders, tmp_path, name, kind, remote):
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
