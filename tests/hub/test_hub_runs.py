"""Training that publishes: checked before it begins, the model sent at its end."""

import json
import os
import shlex
from pathlib import Path

import pytest

from moh_llm.cli import main
from moh_llm.errors import UserError

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
    assert main(["doctor", str(recipe)]) == 0
    assert "a token, a licence and a name" in capsys.readouterr().out and not fake_hub.requests


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
    assert shlex.split(retry) == ["moh-llm", "publish", str(model), "--repo-id", "org/moh"]
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
    lineage = next(row for row in sent["README.md"].decode().splitlines() if row.startswith("| 2 | "))
    assert lineage.split(" | ")[3] == "4" and b"The last run trained" in sent["README.md"]  # its steps
    assert json.loads(sent["run.json"])["config"]["output_dir"] == "run"
    assert main(shlex.split(retry)[1:]) == 0  # the other way, which finds all of it there


def test_without_a_hub_group_nothing_is_published_and_a_card_is_written(
    recipe, fake_hub, capsys, tmp_path, monkeypatch
):
    def refuse(model: Path) -> None:
        raise UserError(f"cannot write {model / 'README.md'}: no space left")

    with monkeypatch.context() as patch:
        patch.setattr("moh_llm.hub.publish.write_local_card", refuse)
        assert main(["train", str(recipe), "--hub", "null"]) == 0  # a card is no reason to fail
    assert "README.md was not written: " in capsys.readouterr().out
    assert main(["train", str(recipe), "--hub", "null"]) == 0
    assert "license: apache-2.0" in (tmp_path / "run" / "model" / "README.md").read_text()
    assert not fake_hub.requests
