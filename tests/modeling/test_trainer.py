"""transformers' Trainer on a conversion: a step does not depend on how its rows are split into passes."""

from pathlib import Path

import pytest
import torch
from transformers import Trainer, TrainingArguments

from moh_llm.modeling import MoHLlamaForCausalLM


@pytest.fixture(scope="module")
def converted(make_llama, convert, tmp_path_factory) -> Path:
    """A conversion with a linear router, value fallbacks, budgets that differ between layers."""
    folder = tmp_path_factory.mktemp("conversion") / "moh"
    flags = ["--fallback", "value", "--keys", "0.7", "--heldout-tokens", "0"]
    assert convert(make_llama(num_hidden_layers=3), folder, *flags) == 0
    return folder


def rows_of(lengths: list[int], unlabelled: list[int]) -> list[dict[str, torch.Tensor]]:
    """Rows of random ids; each one's first tokens, so many, are not predicted."""
    source = torch.Generator().manual_seed(0)
    rows = [{"input_ids": torch.randint(1, 200, (length,), generator=source)} for length in lengths]
    for row, hidden in zip(rows, unlabelled, strict=True):
        row["labels"] = row["input_ids"].clone()
        row["labels"][:hidden] = -100
    return rows


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Padded on the right to the longest of these rows."""

    def padded(name: str, value: int) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence([row[name] for row in rows], True, value)

    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    ids = padded("input_ids", 0)
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    return {"input_ids": ids, "labels": padded("labels", -100), "attention_mask": mask}


def one_step(folder: Path, output: Path, rows: list, batch: int) -> tuple[dict, dict[str, torch.Tensor]]:
    """What a Trainer reports of one step over all rows, in passes of `batch`, and the weights after it."""
    model = MoHLlamaForCausalLM.from_pretrained(folder)
    assert model.config.router_type == "linear" and model.config.head_fallback == "value"
    assert len(set(model.config.active_heads_per_layer)) > 1
    model.config.output_router_logits, model.config.head_balance_coef = True, 4.0  # large enough to be seen
    arguments = TrainingArguments(
        output_dir=output,
        gradient_accumulation_steps=len(rows) // batch,
        **{"per_device_train_batch_size": batch, "per_device_eval_batch_size": batch, "max_steps": 1},
        **{"learning_rate": 0.1, "optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 0, "use_cpu": True},
        **{"logging_steps": 1, "save_strategy": "no", "report_to": [], "disable_tqdm": True},
    )
    trainer = Trainer(model, arguments, collate, train_dataset=rows)
    trainer.train()
    assert trainer.state.global_step == 1
    return trainer.state.log_history[0], {name: weight.detach() for name, weight in model.named_parameters()}


def test_accumulation_does_not_change_a_step(converted, tmp_path):
    rows = rows_of([20, 3, 11, 7, 20, 2, 15, 9], [0, 1, 9, 0, 15, 0, 3, 9])
    log, weights = one_step(converted, tmp_path, rows, len(rows))
    with torch.no_grad():  # the step's loss by hand, from each row alone
        model = MoHLlamaForCausalLM.from_pretrained(converted)
        total = predicted = 0
        for row in rows:
            output = model(row["input_ids"][None], labels=row["labels"][None], output_router_logits=True)
            count = (row["labels"][1:] != -100).sum()
            if count:
                cross_entropy = output.loss - model.config.head_balance_coef * output.aux_loss
                total, predicted = total + count * (cross_entropy + 4.0 * output.aux_loss), predicted + count
    assert log["loss"] == pytest.approx((total / predicted).item(), rel=1e-4)
    for batch in (4, 1):
        split_log, split_weights = one_step(converted, tmp_path, rows, batch)
        assert split_log["loss"] == pytest.approx(log["loss"], rel=1e-5)
        assert split_log["grad_norm"] == pytest.approx(log["grad_norm"], rel=1e-4)
        for name, weight in weights.items():
            torch.testing.assert_close(split_weights[name], weight, atol=1e-5, rtol=1e-4, msg=name)


def test_router_logits_keep_their_gradient_under_checkpointing(converted):
    model = MoHLlamaForCausalLM.from_pretrained(converted).train()
    ids = torch.randint(1, 200, (2, 20), generator=torch.Generator().manual_seed(0))
    for kwargs in (None, {"use_reentrant": False}):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
        assert model(ids, labels=ids, output_router_logits=True).aux_loss.requires_grad
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    assert model(ids, labels=ids).loss.requires_grad
    with pytest.raises(ValueError, match="use_reentrant=False"):
        model(ids, labels=ids, output_router_logits=True)
