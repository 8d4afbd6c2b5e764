"""`moh-llm publish`: what is checked, proven, written and sent, and what stops it."""

import json
import re
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from moh_llm.cli import main
from moh_llm.hub.lineage import Lineage
from moh_llm.hub.proof import Proof
from moh_llm.hub.publish import PublishOptions, publish

SECRET = "ghp_" + "Ab3dEf6hIj9kLm2nOp5q" + "Rs8tUv1wXy4zAb7c"


def _state(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _beside(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.parent.iterdir())


@pytest.fixture
def no_network(monkeypatch) -> None:
    """Any connection is an error."""

    def refuse(*args: object) -> None:
        raise AssertionError("a request was made")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def test_a_dry_run_proves_shows_and_sends_nothing(folder, forked_proof, no_network, monkeypatch, capsys):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    (folder / "conversion.json").write_text(json.dumps({"base": {"name": "/Users/alice/models/llama"}}))
    before = _state(folder)
    assert main(["publish", str(folder), "--repo-id", "org/moh", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"model-00001-of-00002\.safetensors .* [0-9a-f]{12}", shown)
    assert "checks: passed" in shown and "bit for bit (float32" in shown
    assert "local paths cut to their last component: conversion.json" in shown
    card = folder.parent / "moh.card.md"
    assert str(card) in shown and card.read_text().startswith("---\n") and "apache-2.0" in card.read_text()
    assert _state(folder) == before and _beside(folder) == ["moh", "moh.card.md"]


def test_what_is_published_is_the_folder_without_local_paths_and_with_its_card(folder, fake_hub, proven, capsys):
    record = {"base": {"name": "/Users/alice/models/llama"}, "note": "from /Users/alice/models/llama, once"}
    (folder / "conversion.json").write_text(json.dumps(record))
    (folder / "LICENSE").write_text("Apache License, Version 2.0\n")
    before = _state(folder)
    assert main(["publish", str(folder), "--repo-id", "org/moh", "--private"]) == 0
    sent = fake_hub.branches["org/moh"]["main"]
    assert set(sent) == {*before, ".gitattributes"}
    changed = {name for name in before if sent[name] != before[name]}
    assert changed == {"conversion.json", "README.md"}
    assert json.loads(sent["conversion.json"]) == {"base": {"name": "llama"}, "note": "from llama, once"}
    assert b"org/moh" in sent["README.md"] and fake_hub.private["org/moh"]
    assert f"published: {fake_hub.url}/org/moh" in capsys.readouterr().out
    assert _state(folder) == before and _beside(folder) == ["moh"]


def test_a_secret_stops_it_even_with_force_also_in_a_card_that_is_replaced(folder, fake_hub, proven, capsys):
    (folder / "README.md").write_text(f"---\nlicense: mit\n---\n{SECRET}\n")
    for force in ([], ["--force"]):
        assert main(["publish", str(folder), "--repo-id", "org/moh", *force]) == 2
        told = capsys.readouterr()
        assert "README.md: " in told.err and "a GitHub token" in told.err and len(told.err.splitlines()) == 1
        assert SECRET not in told.out + told.err
    assert not fake_hub.requests


def test_a_failed_proof_stops_it_and_force_is_told_in_the_card(folder, fake_hub, monkeypatch, capsys):
    monkeypatch.setattr("moh_llm.hub.publish.prove", lambda published, local: Proof("logits.0 differs by 0.25"))
    command = ["publish", str(folder), "--repo-id", "org/moh"]
    assert main(command) == 2
    assert "the proof failed: logits.0 differs by 0.25" in capsys.readouterr().err
    assert not fake_hub.requests
    assert main([*command, "--force"]) == 0
    card = fake_hub.branches["org/moh"]["main"]["README.md"].decode()
    assert "logits.0 differs by 0.25" in card.replace("\\", "")


def test_a_weight_that_changes_on_the_way_stops_it(folder, forked_proof, fake_hub, monkeypatch, capsys):
    from moh_llm.hub.upload import Stage

    write_card = Stage.write_card

    def spoil(stage: Stage, text: str) -> None:
        write_card(stage, text)
        shard = min(stage.folder.glob("*.safetensors"))
        tensors = load_file(shard)
        shard.unlink()  # it is a link to the model's own
        save_file({name: tensor + 0.1 for name, tensor in tensors.items()}, shard, metadata={"format": "pt"})

    monkeypatch.setattr(Stage, "write_card", spoil)
    before = _state(folder)
    assert main(["publish", str(folder), "--repo-id", "org/moh"]) == 2
    assert "the proof failed: logits.0 differs from the local model's" in capsys.readouterr().err
    assert not fake_hub.requests and _state(folder) == before


def test_a_failed_check_stops_it_before_the_proof(folder, fake_hub, monkeypatch, capsys):
    monkeypatch.setattr("moh_llm.hub.publish.prove", lambda published, local: pytest.fail("was proven"))
    torch.save({}, folder / "optimizer.pt")
    assert main(["publish", str(folder), "--repo-id", "org/moh"]) == 2
    told = capsys.readouterr()
    assert "optimizer.pt: is the state of a training run; move it out of the folder" in told.err
    assert "proof: not run" in told.out and not fake_hub.requests


def test_force_leaves_behind_what_is_no_part_of_the_model(folder, fake_hub, proven):
    torch.save({}, folder / "optimizer.pt")
    (folder / "chat_template.jinja").write_text("made in /Users/alice/out\n")
    assert main(["publish", str(folder), "--repo-id", "org/moh", "--force"]) == 0
    sent = fake_hub.branches["org/moh"]["main"]
    assert "optimizer.pt" not in sent and b"optimizer" not in sent["README.md"]
    assert b"chat_template.jinja" in sent["README.md"].replace(b"\\", b"")


def test_records_of_run_and_evaluation_go_along_without_local_paths(folder, proven, monkeypatch, tmp_path):
    monkeypatch.setattr("moh_llm.hub.publish.build_card", lambda *_, **options: "---\nlicense: mit\n---\n")
    evaluation, run = tmp_path / "evaluation", tmp_path / "run"
    evaluation.mkdir()
    (evaluation / "report.json").write_text(json.dumps({"models": {"moh": {"model": str(folder)}}}))
    run.mkdir()
    (run / "run.json").write_text(json.dumps({"config": {"output_dir": str(run), "seed": 0}}))
    behind = SimpleNamespace(folder=run, recipe={"model": str(tmp_path)})
    monkeypatch.setattr("moh_llm.hub.publish.read_lineage", lambda folder, run: Lineage(folder, None, behind))
    done = publish(PublishOptions(folder, "org/moh", dry_run=True, evaluation=evaluation), say=lambda line: None)
    assert {"evaluation.json", "run.json"} < {file.name for file in done.files}
    assert sorted(done.scrubbed) == ["evaluation.json", "run.json"]


def test_a_llama_takes_its_licence_and_notice_along(folder, fake_hub, proven):
    (folder / "README.md").unlink()
    text = "LLAMA 3.2 COMMUNITY LICENSE AGREEMENT\nLlama 3.2 Version Release Date: September 25, 2024\n"
    (folder / "LICENSE.txt").write_text(text)
    assert main(["publish", str(folder), "--repo-id", "org/Llama-3.2-MoH"]) == 0
    sent = fake_hub.branches["org/Llama-3.2-MoH"]["main"]
    assert b"Llama 3.2 is licensed under the Llama 3.2 Community License" in sent["NOTICE"]
    assert sent["LICENSE.txt"].decode() == text and not (folder / "NOTICE").exists()
    (folder / "NOTICE").write_bytes(b"Ours.\n\n" + sent["NOTICE"])
    assert main(["publish", str(folder), "--repo-id", "org/Llama-3.2-MoH"]) == 0
    assert sent["NOTICE"] == (folder / "NOTICE").read_bytes()


def test_what_cannot_be_published_is_told_at_once(folder, fake_hub, monkeypatch, capsys, tmp_path):
    def refused(*arguments: str) -> str:
        assert main(["publish", *arguments]) == 2
        return capsys.readouterr().err

    assert "cannot be a repository" in refused(str(folder), "--repo-id", "moh")
    assert "holds no config.json" in refused(str(tmp_path / "nothing"), "--repo-id", "org/moh")
    shutil.copytree(folder, tmp_path / "run" / "model")
    assert f"publish {tmp_path / 'run' / 'model'}" in refused(str(tmp_path / "run"), "--repo-id", "org/moh")
    assert "holds no report.json" in refused(
        str(folder), "--repo-id", "org/moh", "--evaluation", str(tmp_path / "nothing")
    )
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    assert "there is no token" in refused(str(folder), "--repo-id", "org/moh")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    assert "model_type=llama, not moh_llama" in refused(str(folder), "--repo-id", "org/moh")
    assert not fake_hub.requests


def test_convert_can_publish_what_it_made(make_llama, convert, forked_proof, fake_hub, tmp_path, capsys):
    base = make_llama(num_attention_heads=8)
    (base / "LICENSE").write_text("Apache License\nVersion 2.0, January 2004\n")
    assert convert(base, tmp_path / "moh", "--push-to-hub", "moh") == 2
    assert "cannot be a repository" in capsys.readouterr().err and not (tmp_path / "moh").exists()
    assert convert(base, tmp_path / "moh", "--push-to-hub", "org/moh") == 0
    sent = fake_hub.branches["org/moh"]["main"]
    assert json.loads(sent["conversion.json"])["base"]["name"] == base.name
    assert set(sent) == {*_state(tmp_path / "moh"), "README.md", ".gitattributes"}
