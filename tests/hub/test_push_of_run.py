"""Training that publishes its model: checked before it begins, sent at its end, and tried again."""

import json
import os
import shlex
import subprocess
from pathlib import Path

import forks
import pytest
import torch

from moh_llm.cli import main
from moh_llm.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
MILESTONES = ["--hub.milestones", "true", "--checkpoint.milestone_every"]


def _status(run: Path) -> str:
    return json.loads((run / "run.json").read_text())["status"]


# ---- before it begins


def test_what_would_keep_the_model_from_being_published_is_told_first(
    recipe, folder, fake_hub, monkeypatch, capsys, tmp_path
):
    def refused(*arguments: str) -> str:
        assert main(["train", str(recipe), *arguments]) == 2
        told = capsys.readouterr().err
        assert len(told.splitlines()) == 1
        return told

    def fault(*arguments: str) -> str:
        assert main(["doctor", str(recipe), *arguments]) == 1
        (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("fault")]
        return line

    assert "org/m oh cannot be a repository" in refused("--hub.repo_id", "org/m oh")
    assert "--hub.licence mitt is no licence id of the Hub; did you mean 'mit'?" in refused("--hub.licence", "mitt")
    assert "hub" in fault("--hub.licence", "mitt")
    assert "model=nowhere is not a folder" in refused("--model", "nowhere")
    (folder / "README.md").unlink()
    assert "licence is not known" in refused("--model", str(folder))
    assert "pass --hub.licence ID" in refused("--model", str(folder))
    (folder / "LICENSE").write_text("LLAMA 3.2 COMMUNITY LICENSE AGREEMENT\nLlama 3.2 Version Release Date\n")
    assert "--hub.repo_id org/moh: the Llama 3.2 Community License" in refused("--model", str(folder))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in refused()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    assert "there is no token" in refused() and "there is no token" in fault()
    assert not (tmp_path / "run").exists() and not fake_hub.requests


def test_the_doctor_finds_a_job_that_can_publish_fit(recipe, fake_hub, capsys):
    assert main(["doctor", str(recipe), *MILESTONES, "2"]) == 0
    told = capsys.readouterr().out
    assert "ok       hub        a token, a licence and a name that it allows for org/moh" in told
    assert "2 checkpoints" in told and "3 models, together" in told and not fake_hub.requests


# ---- at the end


def test_a_push_that_fails_is_no_failed_training_and_the_same_command_tries_again(
    recipe, fake_hub, proven, capsys, tmp_path
):
    fake_hub.refuse = 403
    command = ["train", str(recipe), "--hub.licence", "apache-2.0", "--hub.private", "true"]
    assert main(command) == 2
    told, model = capsys.readouterr(), tmp_path / "run" / "model"
    line = told.err.splitlines()[-1]
    assert line.startswith(f"error: training is finished, its model is {model}; publishing it failed: the token may")
    retry = line.partition("`")[2].partition("`")[0]
    run = ["--run", str(tmp_path / "run"), "--licence", "apache-2.0", "--private"]
    assert shlex.split(retry) == ["moh-llm", "publish", str(model), "--repo-id", "org/moh", *run]
    assert _status(tmp_path / "run") == "finished" and os.environ["HF_TOKEN"] not in told.out + told.err
    assert (model / "README.md").read_text().startswith("---\n")

    fake_hub.refuse = None
    (model / "README.md").unlink()
    before = (model / "model.safetensors").stat().st_mtime_ns
    assert main(command) == 0
    told = capsys.readouterr().out
    assert "nothing to do" in told and f"published: {fake_hub.url}/org/moh" in told
    assert list(fake_hub.branches["org/moh"]) == ["main"] and fake_hub.private["org/moh"]
    sent = fake_hub.branches["org/moh"]["main"]
    assert set(sent) == {*(path.name for path in model.iterdir()), "run.json", ".gitattributes"}
    assert sent["model.safetensors"] == (model / "model.safetensors").read_bytes() and "README.md" in sent
    assert b"| steps | 4 of 4" in sent["README.md"] and json.loads(sent["run.json"])["config"]["output_dir"] == "run"
    assert (model / "model.safetensors").stat().st_mtime_ns == before
    assert main(shlex.split(retry)[1:]) == 0  # the other way, which finds all of it there


def test_without_a_hub_group_nothing_is_published_and_a_card_is_written(recipe, fake_hub, tmp_path):
    assert main(["train", str(recipe), "--hub", "null"]) == 0
    assert not fake_hub.requests
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    assert "# run" in card and "license: apache-2.0" in card


def test_a_card_that_cannot_be_written_does_not_fail_the_training(recipe, folder, capsys, tmp_path, monkeypatch):
    def refuse(model: Path) -> None:
        raise UserError(f"cannot write {model / 'README.md'}: no space left")

    monkeypatch.setattr("moh_llm.hub.card.write_local_card", refuse)
    assert main(["train", str(recipe), "--hub", "null", "--model", str(folder)]) == 0
    assert "README.md was not written: " in capsys.readouterr().out
    assert _status(tmp_path / "run") == "finished"


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
    told = f"published: http://hub/{options.repo_id}/tree/{options.revision}"
    with log.open("w") as output:
        return subprocess.Popen(["echo", told], stdout=output)


pushes._start = start
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
    refused = launch(tmp_path / "none", "--hub.licence", "mitt")
    assert refused.returncode != 0 and "--hub.licence mitt is no licence id" in refused.stderr
    # Again, of the finished run.
    fake_hub.branches.clear()
    again = launch(tmp_path / "run", *MILESTONES, "2", "--max_steps", "4")
    assert again.returncode == 0 and "nothing to do" in again.stdout
    assert "model.safetensors" in fake_hub.branches["org/moh"]["main"]
