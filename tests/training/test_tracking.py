"""Curves in TensorBoard, and what is refused."""

import json
from pathlib import Path

import pytest

from moh_llm.errors import UserError
from moh_llm.training import loop, tracking
from moh_llm.training.tracking import check_trackers


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Every scalar that TensorBoard would show, by name and step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard" / tracking.PROJECT))
    events.Reload()
    return {name: {e.step: e.value for e in events.Scalars(name)} for name in events.Tags()["scalars"]}


def test_tensorboard_shows_the_log(configure) -> None:
    config = configure()
    loop.train(config)
    found = scalars(Path(config.output))
    log = [json.loads(line) for line in Path(config.output, "log.jsonl").read_text().splitlines()]
    for name in ("loss", "kl", "learning_rate", "gradient_norm"):
        assert found[name] == pytest.approx({line["step"]: line[name] for line in log if name in line})
    held_out = {line["step"]: line["validation"]["kl"] for line in log if "validation" in line}
    assert found["validation/kl"] == pytest.approx(held_out) and set(held_out) == {0, 3, 6}
    assert found["routing/entropy/01"][6] == pytest.approx(log[-1]["routing"]["entropy"][1])


def test_a_resumed_run_goes_on_in_the_same_curves(configure, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure()
    with monkeypatch.context() as patch:
        save = loop.save_checkpoint

        def stop(checkpoints, step, *rest):
            if step == 4:
                raise KeyboardInterrupt
            return save(checkpoints, step, *rest)

        patch.setattr(loop, "save_checkpoint", stop)
        with pytest.raises(KeyboardInterrupt):
            loop.train(config)
    loop.train(config)
    log = [json.loads(line) for line in Path(config.output, "log.jsonl").read_text().splitlines()]
    assert scalars(Path(config.output))["loss"] == pytest.approx({line["step"]: line["loss"] for line in log[1:]})


def test_no_tracker_writes_no_folder(configure) -> None:
    config = configure(max_steps=2, trackers=[])
    loop.train(config)
    assert not Path(config.output, "tensorboard").exists()


def test_overwriting_removes_old_curves(configure) -> None:
    loop.train(configure(max_steps=3))
    loop.train(configure(max_steps=2), overwrite=True)
    assert set(scalars(Path(configure().output))["loss"]) == {1, 2}


def test_unknown_and_missing_trackers_are_refused_before_anything_is_written(configure, monkeypatch) -> None:
    config = configure(trackers=["tensorbord"])
    with pytest.raises(UserError, match=r"trackers: 'tensorbord' is unknown; known are .*tensorboard.*wandb"):
        loop.train(config)
    assert not Path(config.output).exists()
    monkeypatch.setattr(tracking, "get_available_trackers", lambda: [])
    with pytest.raises(UserError, match="trackers: wandb needs the package wandb: pip install wandb"):
        check_trackers(("wandb",))
