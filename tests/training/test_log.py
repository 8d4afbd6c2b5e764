"""Lines of the log, the progress line, and curves in TensorBoard."""

import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from trained import read_log, unfinish

from moh_llm.errors import UserError
from moh_llm.records.run import LogLine, Routing, Scores
from moh_llm.training import log as log_module
from moh_llm.training import loop
from moh_llm.training.config import TRACKERS
from moh_llm.training.log import ProgressLine, step_line
from moh_llm.training.losses import StepLosses


def a_line(configure, kl: float = 0.5) -> LogLine:
    config, losses = configure(), StepLosses(task=kl, cross_entropy=3.0, balance=0.8, experts=0.5, heads_read=1.75)
    began = time.perf_counter() - 2.0
    rates = {"learning_rate": 1e-4, "router_learning_rate": 1e-3}
    return step_line(4, losses, 0.1, rates, 0.7, config, began)


def test_a_line_holds_every_part_of_the_loss(configure) -> None:
    line = a_line(configure)
    assert line.loss == pytest.approx(0.5 + 0.1 * 0.8 + 0.5)
    assert (line.kl, line.expert_balance_loss, line.tokens) == (0.5, 0.5, 4 * 128)
    assert line.heads_read == 1.75
    assert line.timing.tokens_per_second == pytest.approx(64, rel=0.05)
    assert a_line(configure, kl=float("nan")).kl is None


def test_progress_shows_what_the_line_holds(configure, capsys) -> None:
    with ProgressLine(3, 10, 128, "tokens") as progress:
        progress.step(a_line(configure))
        routing = Routing(load=[[0.5], [], [1.0]], dead_heads=[1, 0, 2])
        progress.step(LogLine(step=5, validation=Scores(tokens=9, documents=2, perplexity=2.0), routing=routing))
        dropped = a_line(configure)
        dropped.dropped = "the loss is not finite"
        progress.step(dropped)
    said = capsys.readouterr().out
    for part in ("loss 1.0800", "heads on 1.75", "step 4/10, 512 tokens  ", "s left", "3 dead heads"):
        assert part in said, part
    assert "step 4 was dropped: the loss is not finite" in said
    assert "perplexity 2.00" in said


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Every scalar that TensorBoard would show, by name and step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard" / log_module.PROJECT))
    events.Reload()
    return {name: {e.step: e.value for e in events.Scalars(name)} for name in events.Tags()["scalars"]}


def test_tensorboard_shows_the_log(finished_run) -> None:
    found, log = scalars(finished_run), read_log(finished_run)
    for name in ("loss", "kl", "learning_rate", "gradient_norm"):
        assert found[name] == pytest.approx({line["step"]: line[name] for line in log if name in line})
    held_out = {line["step"]: line["validation"]["kl"] for line in log if "validation" in line}
    assert found["validation/kl"] == pytest.approx(held_out) and set(held_out) == {0, 3, 6}
    assert found["routing/heads_read"][6] == pytest.approx(log[-1]["routing"]["heads_read"])


@pytest.mark.slow
def test_a_resumed_run_goes_on_in_the_same_curves_and_overwriting_removes_them(configure, run) -> None:
    unfinish(run, 4)
    loop.train(configure())
    assert scalars(run)["loss"] == pytest.approx({line["step"]: line["loss"] for line in read_log(run)[1:]})
    loop.train(configure(max_steps=2), overwrite=True)
    assert set(scalars(run)["loss"]) == {1, 2}
    loop.train(configure(max_steps=2, report_to=[]), overwrite=True)
    assert not (run / "tensorboard").exists()


def test_unknown_and_missing_trackers_are_refused_before_anything_is_written(configure, monkeypatch) -> None:
    assert tuple(sorted(LOGGER_TYPE_TO_CLASS)) == TRACKERS
    with pytest.raises(UserError, match=r"report_to: 'tensorbord' is unknown; known are .*tensorboard.*wandb"):
        configure(report_to=["tensorbord"])
    config = configure(report_to=["wandb"])
    monkeypatch.setattr(log_module, "get_available_trackers", lambda: [])
    with pytest.raises(UserError, match="report_to: wandb needs the package wandb: pip install wandb"):
        loop.train(config)
    assert not Path(config.output_dir).exists()


def test_curves_of_another_run_of_the_same_folder_name_are_left_alone(configure, tmp_path, monkeypatch) -> None:
    opened = []
    monkeypatch.setattr(log_module, "check_trackers", lambda names: None)
    monkeypatch.setattr(loop, "check_trackers", lambda names: None)
    monkeypatch.setattr(Accelerator, "init_trackers", lambda self, project, recipe, settings: opened.append(settings))
    one = configure(report_to=["wandb", "trackio"], output_dir=str(tmp_path / "a" / "run #1"), max_steps=2)
    loop.train(one)
    unfinish(tmp_path / "a" / "run #1", 1)
    loop.train(one)  # resumed
    loop.train(one, overwrite=True)
    loop.train(replace(one, output_dir=str(tmp_path / "b" / "run #1")))
    ids = [settings["wandb"]["id"] for settings in opened]
    assert ids == [settings["trackio"]["name"] for settings in opened] and ids[0] == ids[1] and len({*ids}) == 3
    assert all(re.fullmatch(r"run--1-[0-9a-f]{8}", name) for name in ids)
