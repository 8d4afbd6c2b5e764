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
        error = capsys.readouterr().err
        assert len(error.splitlines()) == 1
        return error

    def fault(*arguments: str) -> str:
        assert main(["doctor", str(recipe), *arguments]) == 1
        (line,) = [line for line in capsys.readouterr().out.splitlines() if "fault" in line[:9]]
        return line

    assert "org/m oh cannot be a repository" in refused("--hub.repo_id", "org/m oh")
    assert "model=nowhere is not a folder" in refused("--model", "nowhere")
    (folder / "README.md").unlink()
    for told in (refused("--model", str(folder)), fault("--model", str(folder))):
        assert "leave out hub, and publish the tuned model by moh-llm publish --licence ID, such as apache-2.0" in told
    (folder / "LICENSE").write_text("LLAMA 3.2 COMMUNITY LICENSE AGREEMENT\nLlama 3.2 Version Release Date\n")
    assert "--hub.repo_id org/moh: the Llama 3.2 Community License" in refused("--model", str(folder))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in refused()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    assert "there is no token" in refused() and "there is no token" in fault()
    assert not (tmp_path / "run").exists() and not fake_hub.requests


def test_the_doctor_accepts_a_job_that_can_publish(recipe, fake_hub, capsys):
    assert main(["doctor", str(recipe), *MILESTONES, "2"]) == 0
    printed = capsys.readouterr().out
    assert "hub        a token, a licence and a name that it allows for org/moh" in printed
    assert "2 checkpoints" in printed and "3 models, together" in printed and not fake_hub.requests


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
    before = (model / "model.safetensors").stat().st_mtime_ns
    assert main(command) == 0
    output = capsys.readouterr().out
    assert "nothing to do" in output and f"published: {fake_hub.url}/org/moh" in output
    assert list(fake_hub.branches["org/moh"]) == ["main"]
    sent = fake_hub.branches["org/moh"]["main"]
    assert set(sent) == {*(path.name for path in model.iterdir()), "run.json", ".gitattributes"}
    assert sent["model.safetensors"] == (model / "model.safetensors").read_bytes() and "README.md" in sent
    assert b"| steps | 4 of 4" in sent["README.md"] and json.loads(sent["run.json"])["config"]["output_dir"] == "run"
    assert (model / "model.safetensors").stat().st_mtime_ns == before
    assert main(shlex.split(retry)[1:]) == 0  # the other way, which finds all of it there


def test_without_a_hub_group_nothing_is_published_and_a_card_is_written(
    recipe, fake_hub, capsys, tmp_path, monkeypatch
):
    assert main(["train", str(recipe), "--hub", "null"]) == 0
    card = tmp_path / "run" / "model" / "README.md"
    assert "# run" in card.read_text() and "license: apache-2.0" in card.read_text()

    def refuse(model: Path) -> None:
        raise UserError(f"cannot write {model / 'README.md'}: no space left")

    card.unlink()
    monkeypatch.setattr("moh_llm.hub.card.write_local_card", refuse)
    assert main(["train", str(recipe), "--hub", "null"]) == 0  # a card is no reason to fail
    assert "README.md was not written: " in capsys.readouterr().out and not fake_hub.requests


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
def test_a_milestone_is_published_by_its_own_process(recipe, fake_hub, reached, proven, capsys, tmp_path):
    command = ["train", str(recipe), *MILESTONES, "2", "--max_steps", "3"]
    milestone, token = tmp_path / "run" / "milestones" / "step-000002", os.environ["HF_TOKEN"]
    fake_hub.refuse = 403
    assert main(command) == 2
    log, printed = (milestone / "publish.log").read_text(), capsys.readouterr()
    assert token not in log + printed.out + printed.err
    last = log.splitlines()[-1]
    assert last.startswith("error: the token may not write to org/moh") and "[hidden]" in last
    assert "step-000002 is not published: the token may not write to org/moh" in printed.out
    fake_hub.refuse = None
    assert main(command) == 0
    log, printed = (milestone / "publish.log").read_text(), capsys.readouterr()
    assert "bit for bit" in log and token not in log + printed.out + printed.err
    branches = fake_hub.branches["org/moh"]
    assert sorted(branches) == ["main", "step-000002"]
    sent = branches["step-000002"]
    assert sent["model.safetensors"] == (milestone / "model" / "model.safetensors").read_bytes()
    assert sent["model.safetensors"] != branches["main"]["model.safetensors"]
    assert b"| steps | 2 of 3" in sent["README.md"] and b"| steps | 3 of 3" in branches["main"]["README.md"]
    assert b"The run has not finished" in sent["README.md"] and json.loads(sent["run.json"])["steps"] == 2
    assert f"step-000002 is published: {fake_hub.url}/org/moh/tree/step-000002" in printed.out
    # The same command again finds it published.
    requests = fake_hub.asked("step-000002")
    assert main(command) == 0
    assert fake_hub.asked("step-000002") == requests and "step-000002" not in capsys.readouterr().out


@pytest.mark.slow
def test_milestones_that_fail_stop_nothing_else_and_are_tried_again(
    recipe, fake_hub, proven, processes, capsys, tmp_path
):
    processes.failing = {"step-000002"}
    command = ["train", str(recipe), *MILESTONES, "2"]
    assert main(command) == 2
    printed, run = capsys.readouterr(), tmp_path / "run"
    assert processes.started == ["step-000002", "step-000004"]
    error = printed.err.splitlines()[-1]
    assert f"its model is {run / 'model'} and is published, but step-000002 is not published" in error
    retry = f"moh-llm publish {run / 'milestones' / 'step-000002' / 'model'} --repo-id org/moh --revision step-000002"
    assert f"step-000002 is not published: the Hub has no space; try again with `{retry}" in printed.out
    assert "step-000004 is published: http://hub/org/moh/tree/step-000004" in printed.out
    assert "model.safetensors" in fake_hub.branches["org/moh"]["main"]

    processes.failing, processes.started = set(), []
    assert main(command) == 0
    assert processes.started == ["step-000002"]
    # Another repository has none of them.
    processes.started = []
    assert main([*command, "--hub.repo_id", "org/other"]) == 0
    assert processes.started == ["step-000002", "step-000004"]


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
    assert said[-1] == "publishing step-000001 was interrupted; the same command publishes it again"
    queued.wait()  # nothing is begun any more
    assert processes.started == [one.name]
    # The next session; the last of them finds the milestones published.
    queued, processes.endless = _pushes(said), False
    for milestone in (one, two):
        queued.add(milestone)
    assert queued.wait() == [] and processes.started == [one.name, one.name, two.name]
    queued = _pushes(said)
    queued.add(one)
    assert queued.wait() == [] and len(processes.started) == 3


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
import os, subprocess, sys
import huggingface_hub.constants
from moh_llm.cli import main
from moh_llm.hub import publish, pushes

# Read from the environment, and imported, before this process was forked.
huggingface_hub.constants.ENDPOINT = os.environ["HF_ENDPOINT"]
huggingface_hub.constants.HF_HUB_OFFLINE, huggingface_hub.constants.HF_HUB_DISABLE_XET = False, True
record = {"texts": 3, "tokens": 9, "dtype": "float32", "seconds": 1.0, "generated": [""]}
publish.prove = lambda published, local: publish.Proof(None, record | {"versions": {"transformers": "5"}})


def start(options, log):
    line = f"published: http://hub/{options.repo_id}/tree/{options.revision}"
    with log.open("w") as output:
        return subprocess.Popen(["echo", line], stdout=output)


pushes.start_publishing = start
sys.exit(main(["train", *sys.argv[1:]]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch is built without torch.distributed")
def test_of_two_processes_the_first_publishes(recipe, fake_hub, reached, tmp_path):
    def launch(output: Path, *flags: str) -> "subprocess.CompletedProcess[str]":
        environment = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        words = ["-c", TRAIN, recipe, "--output_dir", output, *flags]
        return forks.run(*words, folder=ROOT, environment=environment, processes=2, timeout=300)

    done = launch(tmp_path / "run", *MILESTONES, "2", "--max_steps", "4")
    assert done.returncode == 0, done.stderr[-3000:]
    sent = (tmp_path / "run" / "model" / "model.safetensors").read_bytes()
    assert fake_hub.branches["org/moh"]["main"]["model.safetensors"] == sent
    assert done.stdout.count("published: ") == 3 and len(fake_hub.asked("/commit/")) == 1
    assert [done.stdout.count(f"publishing step-00000{step} in") for step in (2, 4)] == [1, 1]
    # Before it begins: the launch ends, whatever the other process is doing.
    refused = launch(tmp_path / "none", "--hub.repo_id", "org/m oh")
    assert refused.returncode != 0 and "org/m oh cannot be a repository" in refused.stderr
    # Again, of the finished run.
    fake_hub.branches.clear()
    again = launch(tmp_path / "run", *MILESTONES, "2", "--max_steps", "4")
    assert again.returncode == 0 and "nothing to do" in again.stdout
    assert "model.safetensors" in fake_hub.branches["org/moh"]["main"]
