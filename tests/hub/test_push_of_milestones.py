"""Milestones of a training run, which are published in the background, one after the other."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moh_llm.cli import main
from moh_llm.hub import pushes
from moh_llm.hub.publish import PublishOptions
from moh_llm.training.config import HubConfig

MILESTONES = ["--hub.milestones", "true", "--checkpoint.milestone_every"]


class Processes:
    """In place of `moh-llm publish`: processes that end at once, or not before they are stopped."""

    def __init__(self) -> None:
        self.started: list[PublishOptions] = []
        self.failing: set[str | None] = set()
        self.endless = False

    def start(self, options: PublishOptions, log: Path) -> "subprocess.Popen[bytes]":
        """What `pushes._start` does."""
        self.started.append(options)
        code = f"print('published: http://hub/{options.repo_id}/tree/{options.revision}')"
        if options.revision in self.failing:
            code = "import sys; print('x'); sys.exit('error: the Hub has no room')"
        if self.endless:
            code = "import time; time.sleep(600)"
        with log.open("wb") as output:
            return subprocess.Popen([sys.executable, "-uc", code], stdout=output, stderr=output)


@pytest.fixture
def processes(monkeypatch) -> Processes:
    """Milestones are published by `Processes`."""
    found = Processes()
    monkeypatch.setattr(pushes, "_start", found.start)
    return found


@pytest.mark.slow
def test_a_milestone_is_published_by_a_process_of_its_own(recipe, fake_hub, reached, proven, capsys, tmp_path):
    command = ["train", str(recipe), *MILESTONES, "2", "--max_steps", "3"]
    milestone, token = tmp_path / "run" / "milestones" / "step-000002", os.environ["HF_TOKEN"]
    fake_hub.refuse = 403
    assert main(command) == 2
    log, told = (milestone / "publish.log").read_text(), capsys.readouterr()
    assert token not in log + told.out + told.err
    last = log.splitlines()[-1]
    assert last.startswith("error: the token may not write to org/moh") and "[hidden]" in last
    assert "step-000002 is not published: the token may not write to org/moh" in told.out
    fake_hub.refuse = None
    assert main(command) == 0
    log, told = (milestone / "publish.log").read_text(), capsys.readouterr()
    assert "bit for bit" in log and token not in log + told.out + told.err
    branches = fake_hub.branches["org/moh"]
    assert sorted(branches) == ["main", "step-000002"]
    sent = branches["step-000002"]
    assert sent["model.safetensors"] == (milestone / "model" / "model.safetensors").read_bytes()
    assert sent["model.safetensors"] != branches["main"]["model.safetensors"]
    assert b"| steps | 2 of 3" in sent["README.md"] and b"| steps | 3 of 3" in branches["main"]["README.md"]
    assert b"The run has not finished" in sent["README.md"] and json.loads(sent["run.json"])["steps"] == 2
    assert f"step-000002 is published: {fake_hub.url}/org/moh/tree/step-000002" in told.out
    # The same command again finds it published.
    sizes = fake_hub.asked("step-000002")
    assert main(command) == 0
    assert fake_hub.asked("step-000002") == sizes and "step-000002" not in capsys.readouterr().out


def test_milestones_that_fail_do_not_keep_the_rest_back_and_are_tried_again(
    recipe, fake_hub, proven, processes, capsys, tmp_path
):
    processes.failing = {"step-000002"}
    command = ["train", str(recipe), *MILESTONES, "2"]
    assert main(command) == 2
    told, run = capsys.readouterr(), tmp_path / "run"
    assert [options.revision for options in processes.started] == ["step-000002", "step-000004"]
    assert told.err.splitlines()[-1] == (
        f"error: training is finished, its model is {run / 'model'} and is published, but step-000002 is not "
        "published, see above; give the same command again"
    )
    milestone = run / "milestones" / "step-000002"
    assert f"step-000002 is not published: the Hub has no room; try again with `moh-llm publish {milestone}" in told.out
    assert "--revision step-000002" in told.out
    assert "step-000004 is published: http://hub/org/moh/tree/step-000004" in told.out
    assert "model.safetensors" in fake_hub.branches["org/moh"]["main"]

    processes.failing, processes.started = set(), []
    assert main(command) == 0
    assert [options.revision for options in processes.started] == ["step-000002"]
    # Another repository has none of them.
    processes.started = []
    assert main([*command, "--hub.repo_id", "org/other"]) == 0
    assert [(options.repo_id, options.revision) for options in processes.started] == [
        ("org/other", "step-000002"),
        ("org/other", "step-000004"),
    ]


def test_both_failures_are_in_the_one_line(recipe, fake_hub, proven, processes, capsys):
    fake_hub.refuse, processes.failing = 403, {"step-000002", "step-000004"}
    assert main(["train", str(recipe), *MILESTONES, "2"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert (
        line.startswith("error: ")
        and "publishing it failed" in line
        and line.endswith("step-000002, step-000004 are not published, see above")
    )


def _milestone(tmp_path: Path, step: int) -> Path:
    folder = tmp_path / f"step-{step:06d}"
    folder.mkdir()
    return folder


def _begun(queue: pushes.MilestonePushes) -> "subprocess.Popen[bytes]":
    """The process of the milestone that is being published, once there is one."""
    while queue._running is None:
        time.sleep(0.01)
    return queue._running[1]


def test_milestones_are_published_one_after_the_other(processes, tmp_path):
    said: list[str] = []
    hub = HubConfig("org/moh", milestones=True)
    queue = pushes.MilestonePushes(hub, said.append)
    processes.endless = True
    one, two = _milestone(tmp_path, 1), _milestone(tmp_path, 2)
    for milestone in (one, two, two):
        queue.add(milestone)
    process = _begun(queue)
    queue.close()
    assert [options.folder for options in processes.started] == [one / "model"] and process.poll() is not None
    assert said[-1] == "publishing step-000001 was broken off; the same command begins it anew"
    # The next session.
    processes.endless, queue = False, pushes.MilestonePushes(hub, said.append)
    queue.add(one)
    queue.add(two)
    assert queue.wait() == [] and [options.folder for options in processes.started[1:]] == [
        one / "model",
        two / "model",
    ]
    queue.close()
    queue = pushes.MilestonePushes(hub, said.append)
    queue.add(one)
    assert queue.wait() == [] and len(processes.started) == 3  # it is published


def test_a_process_that_cannot_be_started_is_a_failed_push(monkeypatch, tmp_path):
    def start(options: PublishOptions, log: Path) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(pushes, "_start", start)
    said: list[str] = []
    queue = pushes.MilestonePushes(HubConfig("org/moh", milestones=True), said.append)
    queue.add(_milestone(tmp_path, 1))
    assert queue.wait() == ["step-000001"]
    assert "is not published: it could not be started, Cannot allocate memory; try again with" in said[-1]


def test_a_process_that_is_killed_is_a_failed_push(processes, tmp_path):
    processes.endless, said = True, []
    queue = pushes.MilestonePushes(HubConfig("org/moh", milestones=True), said.append)
    queue.add(_milestone(tmp_path, 1))
    _begun(queue).kill()
    assert queue.wait() == ["step-000001"]
    assert "step-000001 is not published: it ended with status -9 after ''; try again with" in said[-1]


def test_training_that_fails_leaves_no_process_behind(recipe, fake_hub, processes, monkeypatch, capsys):
    processes.endless = True

    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("moh_llm.training.loop.score_saved", fail)
    with pytest.raises(RuntimeError):
        main(["train", str(recipe), *MILESTONES, "2"])
    assert "publishing step-000002 was broken off" in capsys.readouterr().out
