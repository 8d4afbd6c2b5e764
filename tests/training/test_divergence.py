"""Steps that diverge: judged one by one, and in whole runs whose losses are spoiled on purpose."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from trained import read_log

from moh_llm.errors import UserError
from moh_llm.records.run import LogLine
from moh_llm.training import loop
from moh_llm.training.config import DivergenceConfig
from moh_llm.training.losses import StepLosses
from moh_llm.training.parallel import make_accelerator
from moh_llm.training.step import MOST_IN_A_ROW, DivergenceWatch

SKIP = DivergenceConfig(action="skip")


def test_what_is_not_finite_is_dropped_or_ends_the_run() -> None:
    assert DivergenceWatch(SKIP, []).judge(1, math.nan, 1.0) == "the loss is not finite"
    assert DivergenceWatch(SKIP, []).judge(1, 1.0, math.inf) == "the gradient is not finite"
    with pytest.raises(UserError, match=r"step 7: the loss is not finite; .*set divergence.action to skip"):
        DivergenceWatch(DivergenceConfig(), []).judge(7, math.nan, 1.0)


def test_too_many_in_a_row_end_the_run() -> None:
    watch = DivergenceWatch(SKIP, [])
    for finite in (True, False):  # a good step in between starts the count anew
        for _ in range(MOST_IN_A_ROW - 1):
            assert watch.judge(1, math.nan, 1.0)
        if finite:
            assert watch.judge(2, 1.0, 1.0) is None
    with pytest.raises(UserError, match="for 5 steps in a row"):
        watch.judge(4, math.nan, 1.0)


def test_the_log_brings_the_memory_back() -> None:
    lines = [LogLine(step=0), LogLine(step=1, loss=1.0)]
    lines += [LogLine(step=step, loss=None, dropped="the loss is not finite") for step in range(2, 1 + MOST_IN_A_ROW)]
    assert DivergenceWatch(SKIP, lines).judge(6, 1.0, 1.0) is None
    with pytest.raises(UserError, match="for 5 steps in a row"):
        DivergenceWatch(SKIP, lines).judge(6, math.nan, 1.0)


@pytest.fixture
def spoiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs whose 4th step has a gradient that is not a number."""
    gradients, setter = loop.accumulate_gradients, loop.seed_step
    at = {"step": 0}

    def note(config, step, process):
        at["step"] = step
        setter(config, step, process)

    def spoil(accelerator, model, batch, config, beta):
        losses, norm = gradients(accelerator, model, batch, config, beta)
        if at["step"] != 4:
            return losses, norm
        for weight in model.parameters():
            if weight.grad is not None:
                weight.grad.fill_(torch.nan)
        return StepLosses(math.nan, losses.cross_entropy, losses.balance, losses.layers), norm

    monkeypatch.setattr(loop, "seed_step", note)
    monkeypatch.setattr(loop, "accumulate_gradients", spoil)


def weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoints" / f"step-{step:06d}" / "model.safetensors")


def same(mine: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in mine.items())


def test_a_run_stops_before_its_weights_are_touched(configure, spoiled) -> None:
    config = configure()
    with pytest.raises(UserError, match="step 4: the loss is not finite"):
        loop.train(config)
    assert [path.name for path in Path(config.output_dir, "checkpoints").iterdir()] == ["step-000002"]


@pytest.mark.slow
@pytest.mark.parametrize(("action", "same_as"), [("skip", 3), ("roll_back", 2)])
def test_a_bad_step_leaves_no_trace_in_the_weights(configure, spoiled, action: str, same_as: int) -> None:
    every = 1 if action == "skip" else 2
    config = configure(
        **{"divergence.action": action, "checkpoint.save_steps": every, "checkpoint.save_total_limit": 9}
    )
    loop.train(config)
    folder = Path(config.output_dir)
    assert same(weights(folder, 4), weights(folder, same_as))
    assert not same(weights(folder, 6), weights(folder, 4))  # it goes on
    assert all(tensor.isfinite().all() for tensor in weights(folder, 6).values())
    record = json.loads((folder / "checkpoints" / "step-000006" / "checkpoint.json").read_text())
    assert record["updates"] == (5 if action == "skip" else 4)
    line = read_log(folder)[4]
    assert line["dropped"] == "the loss is not finite" and line["loss"] is None and line["kl"] is None


def test_nothing_to_roll_back_to(configure, spoiled) -> None:
    with pytest.raises(UserError, match="step 4: the loss is not finite, and there is no checkpoint yet"):
        loop.train(configure(**{"divergence.action": "roll_back", "checkpoint.save_steps": 6}))


def test_deepspeed_cannot_skip(configure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(UserError, match=r"divergence\.action=skip: DeepSpeed updates the weights"):
        make_accelerator(configure(**{"divergence.action": "skip"}))
