"""Steps whose loss or gradient is not finite, in runs that are spoiled on purpose."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from trained import read_log, unfinish

from moh_llm.errors import UserError
from moh_llm.records.run import CheckpointRecord
from moh_llm.training import loop
from moh_llm.training.losses import StepLosses
from moh_llm.training.step import MOST_DROPPED, why_dropped


def test_what_is_not_finite_is_dropped() -> None:
    assert why_dropped(1.0, 1.0) is None
    assert why_dropped(math.nan, 1.0) == "the loss is not finite"
    assert why_dropped(1.0, math.inf) == "the gradient is not finite"


@pytest.fixture
def spoil(monkeypatch: pytest.MonkeyPatch):
    """`spoil(steps)`: the loss and the gradient of these steps are not a number."""
    gradients, setter = loop.accumulate_gradients, loop.seed_step
    at = {"step": 0, "spoiled": ()}

    def note(config, step, process):
        at["step"] = step
        setter(config, step, process)

    def compute(accelerator, model, *others):
        losses, norm = gradients(accelerator, model, *others)
        if at["step"] not in at["spoiled"]:
            return losses, norm
        for weight in model.parameters():
            if weight.grad is not None:
                weight.grad.fill_(torch.nan)
        return StepLosses(math.nan, losses.cross_entropy, losses.balance), norm

    monkeypatch.setattr(loop, "seed_step", note)
    monkeypatch.setattr(loop, "accumulate_gradients", compute)
    return lambda steps: at.update(spoiled=tuple(steps))


def weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoints" / f"step-{step:06d}" / "model.safetensors")


def same(mine: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in mine.items())


def test_a_bad_step_leaves_no_trace_in_the_weights(configure, spoil) -> None:
    spoil([4])
    config = configure(**{"checkpoint.save_steps": 1, "checkpoint.save_total_limit": 9})
    loop.train(config)
    folder = Path(config.output_dir)
    assert same(weights(folder, 4), weights(folder, 3))
    assert not same(weights(folder, 5), weights(folder, 4))  # it goes on
    assert all(tensor.isfinite().all() for tensor in weights(folder, 6).values())
    assert CheckpointRecord.read(folder / "checkpoints" / "step-000006" / "checkpoint.json").updates == 5
    line = read_log(folder)[4]
    assert line["dropped"] == "the loss is not finite" and line["loss"] is None and line["kl"] is None


def test_too_many_in_a_row_end_the_run_also_when_it_is_resumed(configure, spoil) -> None:
    config = configure(max_steps=MOST_DROPPED + 3, **{"evaluation.eval_steps": 0})
    spoil(range(2, 2 + MOST_DROPPED - 1))  # a good step after them starts the count anew
    loop.train(config)
    unfinish(Path(config.output_dir), 4)  # in the midst of them
    spoil(range(2, 2 + MOST_DROPPED))
    with pytest.raises(UserError, match=rf"step {1 + MOST_DROPPED}: .*, the {MOST_DROPPED}th time in a row; lower"):
        loop.train(config)
