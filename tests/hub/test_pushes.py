"""Training that publishes: checked before it begins, milestones in the background, the model at its end."""

import json
import os
import queue
import shlex
import subprocess
import sys
from pathlib import Path

import forks
import pytest
import torch

from moh_llm.cli import main
from moh_llm.errors import UserError
from moh_llm.hub import pushes
from moh_llm.hub.config import PublishConfig
from moh_llm.training.config import HubConfig

ROOT = Path(__file__).resolve().parents[2]
MILESTONES = ["--hub.milestones", "true", "--checkpoint.milestone_every"]


# ---- before it begins


def test_what_would_prevent_publishing_is_reported_first(recipe, folder, fake_hub, monkeypatch, capsys, tmp_path):
    def refused(*arguments: str) -> str:
        assert main(["train", str(recipe), *arguments]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    assert "org/m oh cannot be a repository" in refused("--hub.repo_id", "org/m oh")
    (folder / "README.md").unlink()
    assert "moh-llm publish --licence ID" in refused("--model", str(folder))
    (folder / "LICENSE").write_text("LLAMA 3.2 COMMUNITY LICENSE AGREEMENT\nLlama 3.2 Version Release Date\n")
    assert "--hub.repo_id org/moh: the Llama 3.2 Community License" in refused("--model", str(folder))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in refused()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    assert "there is no token" in refused()
    assert main(["doctor", str(recipe)]) == 1
    assert "there is no token" in capsys.readouterr().out
    assert not (tmp_path / "run").exists() and not fake_hub.requests


def test_the_doctor_accepts_a_job_that_can_publish(recipe, fake_hub, capsys):
    assert main(["doctor", str(recipe), *MILESTONES, "2"]) == 0
    assert "3 models, together" in capsys.readouterr().out and not fake_hub.requests


# ---- at its end


@pytest.mark.slow
def test_a_push_that_fails_is_no_failed_training_and_the_same_command_tries_again(
    recipe, fake_hub, proven, capsys, tmp_path
):
    fake_hub.refuse = 403
    command = ["train", str(recipe)]
    assert main(command) == 2
    printed, model = capsys.readouterr(), tmp_path / "run" / "model"
    line = printed.err.splitlines()[-1]
    assert line.startswith(f"error: training is finished, its model is {model}; publishing it failed: the token may")
    retry = line.partition("`")[2].partition("`")[0]
    run = ["--run", str(tmp_path / "run")]
    assert shlex.split(retry) == ["moh-llm", "publish", str(model), "--repo-id", "org/moh", *run]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "finished"
    assert os.environ["HF_TOKEN"] not in printed.out + printed.err
    assert (model / "README.md").read_text().startswith("---\n")

    fake_hub.refuse = None
    (model / "README.md").unlink()
    assert main(command) == 0
    output = capsys.readouterr().out
    assert "nothing to do" in output and f"published: {fake_hub.url}/org/moh" in output
    sent = fake_hub.branches["org/moh"]["main"]
    assert set(sent) == {*(path.name for path in model.iterdir()), "run.json", ".gitattributes"}
    assert sent["model.safetensors"] == (model / "model.safetensors").read_bytes() and "README.md" in sent
    assert b"| steps | 4 of 4" in sent["README.md"] and json.loads(sent["run.json"])["config"]["output_dir"] == "run"
    assert main(shlex.split(retry)[1:]) == 0  # the other way, which finds all of it there


def test_without_a_hub_group_nothing_is_published_and_a_card_is_written(
    recipe, fake_hub, capsys, tmp_path, monkeypatch
):
    def refuse(model: Path) -> None:
        raise UserError(f"cannot write {model / 'README.md'}: no space left")

    with monkeypatch.context() as patch:
        patch.setattr("moh_llm.hub.card.write_local_card", refuse)
        assert main(["train", str(recipe), "--hub", "null"]) == 0  # a card is no reason to fail
    assert "README.md was not written: " in capsys.readouterr().out
    assert main(["train", str(recipe), "--hub", "null"]) == 0
    assert "license: apache-2.0" in (tmp_path / "run" / "model" / "README.md").read_text()
    assert not fake_hub.requests


# ---- milestones


class Processes:
    """In place of `moh-llm publish`: processes that end at once, or not before they are stopped."""

    def __init__(self) -> None:
        self.started: list[str | None] = []
        self.failing: set[str | None] = set()
        self.endless = False
        self.running: queue.Queue[subprocess.Popen[bytes]] = queue.Queue()

    def start(self, options: PublishConfig, log: Path) -> "subprocess.Popen[bytes]":
        """In place of `pushes.start_publishing`."""
        self.started.append(options.revision)
        code = f"print('published: http://hub/{options.repo_id}/tree/{options.revision}')"
        if options.revision in self.failing:
            code = "import sys; print('x'); sys.exit('error: the Hub has no space')"
        if self.endless:
            code = "import time; time.sleep(600)"
        with log.open("wb") as output:
            process = subprocess.Popen([sys.executable, "-uc", code], stdout=output, stderr=output)
        self.running.put(process)
        return process


@pytest.fixture
def processes(monkeypatch) -> Processes:
    """Milestones are published by `Processes`."""
    found = Processes()
    monkeypatch.setattr(pushes, "start_publishing", found.start)
    return found


@pytest.fixture
def milestones(tmp_path) -> list[Path]:
    """The folders of two milestones."""
    folders = [tmp_path / "step-000001", tmp_path / "step-000002"]
    for folder in folders:
        folder.mkdir()
    return folders


def _pushes(said: list[str]) -> pushes.MilestonePushes:
    return pushes.MilestonePushes(HubConfig("org/moh", milestones=True), said.append)


@pytest.mark.slow
def test_a_milestone_is_published_by_its_own_process(recipe, fake_hub, proven, monkeypatch, capsys, tmp_path):
    """It is proved there, and the Hub, which cannot be reached from there, is asked."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert main(["train", str(recipe), *MILESTONES, "2", "--max_steps", "3"]) == 2
    log = (tmp_path / "run" / "milestones" / "step-000002" / "publish.log").read_text()
    printed = capsys.readouterr()
    assert os.environ["HF_TOKEN"] not in log + printed.out + printed.err
    assert "bit for bit" in log and log.splitlines()[-1].startswith("error: the connection to the Hub broke")
    assert "step-000002 is not published: the connection to the Hub broke" in printed.out
    assert b"| steps | 3 of 3" in fake_hub.branches["org/moh"]["main"]["README.md"]


@pytest.mark.slow
def test_a_milestone_that_fails_stops_nothing_else_and_is_tried_again(
    recipe, fake_hub, proven, processes, capsys, tmp_path
):
    processes.failing = {"step-000002"}
    command = ["train", str(recipe), *MILESTONES, "2"]
    assert main(command) == 2
    printed, run = capsys.readouterr(), tmp_path / "run"
    assert f"its model is {run / 'model'} and is published, but step-000002 is not" in printed.err.splitlines()[-1]
    retry = f"moh-llm publish {run / 'milestones' / 'step-000002' / 'model'} --repo-id org/moh --revision step-000002"
    assert f"step-000002 is not published: the Hub has no space; try again with `{retry}" in printed.out
    assert "step-000004 is published: http://hub/org/moh/tree/step-000004" in printed.out
    assert "model.safetensors" in fake_hub.branches["org/moh"]["main"]
    processes.failing = set()
    assert main(command) == 0
    assert main([*command, "--hub.repo_id", "org/other"]) == 0  # which has none of them
    assert [name[-1] for name in processes.started] == ["2", "4", "2", "2", "4"]


def test_milestones_are_published_one_after_the_other(processes, milestones):
    said: list[str] = []
    one, two = milestones
    queued, processes.endless = _pushes(said), True
    for milestone in (one, two, two):
        queued.add(milestone)  # which does not wait
    running = processes.running.get(timeout=60)
    assert processes.started == [one.name]
    queued.close()
    assert running.poll() is not None
    assert said[-1].startswith("publishing step-000001 was interrupted")
    queued.wait()
    assert processes.started == [one.name]  # nothing is begun any more


def test_a_process_that_does_not_start_or_is_killed_is_a_failed_push(processes, milestones, monkeypatch):
    said: list[str] = []
    queued, processes.endless = _pushes(said), True
    queued.add(milestones[0])
    running = processes.running.get(timeout=60)

    def start(options: PublishConfig, log: Path) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(pushes, "start_publishing", start)
    running.kill()
    queued.add(milestones[1])
    assert queued.wait() == ["step-000001", "step-000002"]
    assert "step-000001 is not published: it ended with status -9 after ''; try again with `moh-llm" in said[-2]
    assert "is not published: its process could not be started, Cannot allocate memory; try again with" in said[-1]


@pytest.mark.slow
def test_training_that_fails_leaves_no_process_behind(recipe, fake_hub, processes, monkeypatch, capsys):
    processes.endless = True
    running: list[subprocess.Popen[bytes]] = []

    def fail(*args: object, **kwargs: object) -> None:
        running.append(processes.running.get(timeout=60))
        raise RuntimeError("a bug")

    monkeypatch.setattr("moh_llm.training.loop.score_saved", fail)
    with pytest.raises(RuntimeError):
        main(["train", str(recipe), *MILESTONES, "2"])
    assert "publishing step-000002 was interrupted" in capsys.readouterr().out
    assert running[0].poll() is not None


# ---- on two processes

TRAIN = """
import subprocess, sys
import huggingface_hub.constants
from moh_llm.cli import main
from moh_llm.hub import publish, pushes

huggingface_hub.constants.HF_HUB_OFFLINE = False  # imported before this process was forked
record = {"texts": 3, "tokens": 9, "dtype": "float32", "seconds": 1.0, "generated": [""]}
publish.prove = lambda published, local: publish.Proof(None, record | {"versions": {"transformers": "5"}})
publish.push = lambda folder, repo_id, *rest: (f"http://hub/{repo_id}", "1" * 40)


def start(options, log):
    line = f"published: http://hub/{options.repo_id}/tree/{options.revision}"
    with log.open("w") as output:
        return subprocess.Popen(["echo", line], stdout=output)


pushes.start_publishing = start
sys.exit(main(["train", *sys.argv[1:]]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch is built without torch.distributed")
def test_of_two_processes_the_first_publishes(recipe, fake_hub):
    environment = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    words = ["-c", TRAIN, recipe, *MILESTONES, "2"]
    done = forks.run(*words, folder=ROOT, environment=environment, processes=2, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("published: ") == 3
    assert [done.stdout.count(f"publishing step-00000{step} in") for step in (2, 4)] == [1, 1]
