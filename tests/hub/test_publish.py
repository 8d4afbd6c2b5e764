"""`moh-llm publish`: what is checked, proved, written and sent, and what stops it."""

import hashlib
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
from moh_llm.hub import publish as publishing
from moh_llm.hub.config import PublishConfig
from moh_llm.hub.lineage import Lineage
from moh_llm.hub.proof import Proof
from moh_llm.hub.publish import publish

SECRET = "ghp_" + "Ab3dEf6hIj9kLm2nOp5q" + "Rs8tUv1wXy4zAb7c"
BASE = {"revision": None, "dense_sha256": "0"}
LLAMA_32 = "LLAMA 3.2 COMMUNITY LICENSE AGREEMENT\nLlama 3.2 Version Release Date: September 25, 2024\n"


def _publish(folder: Path, *flags: str, repo_id: str = "org/moh") -> int:
    return main(["publish", str(folder), "--repo-id", repo_id, *flags])


def _state(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _beside(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.parent.iterdir())


def test_a_dry_run_proves_shows_and_sends_nothing(folder, forked_proof, monkeypatch, capsys):
    def refuse(*args: object) -> None:
        raise AssertionError("a request was made")

    for place, name in ((socket.socket, "connect"), (socket, "create_connection"), (socket, "getaddrinfo")):
        monkeypatch.setattr(place, name, refuse)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    (folder / "conversion.json").write_text(json.dumps({"base": BASE | {"name": "/Users/alice/models/llama"}}))
    before = _state(folder)
    assert _publish(folder, "--dry-run") == 0
    shown = capsys.readouterr().out
    assert re.search(r"model-00001-of-00002\.safetensors +[\d,]+ bytes", shown)
    assert "checks: passed" in shown and "bit for bit (float32" in shown
    card = folder.parent / "moh.card.md"
    assert str(card) in shown and card.read_text().startswith("---\n") and "apache-2.0" in card.read_text()
    assert _state(folder) == before and _beside(folder) == ["moh", "moh.card.md"]


def test_what_is_published_is_the_folder_without_local_paths_and_with_its_card(folder, fake_hub, proven, capsys):
    record = {"base": BASE | {"name": "/Users/alice/models/llama"}, "note": "from /Users/alice/models/llama, once"}
    (folder / "conversion.json").write_text(json.dumps(record))
    (folder / "LICENSE").write_text("Apache License, Version 2.0\n")
    before = _state(folder)
    assert _publish(folder, "--private") == 0
    sent = fake_hub.branches["org/moh"]["main"]
    assert set(sent) == {*before, ".gitattributes", "seal.json"}
    sealed = json.loads(sent["seal.json"])["files"]  # of what is sent
    assert {name: mark["sha256"] for name, mark in sealed.items()} == {
        name: hashlib.sha256(sent[name]).hexdigest() for name in set(sent) - {".gitattributes", "seal.json"}
    }
    assert {name for name in before if sent[name] != before[name]} == {"conversion.json", "README.md"}
    assert json.loads(sent["conversion.json"]) == {"base": BASE | {"name": "llama"}, "note": "from llama, once"}
    assert b"org/moh" in sent["README.md"] and fake_hub.private["org/moh"]
    assert f"published: {fake_hub.url}/org/moh" in capsys.readouterr().out
    assert _state(folder) == before and _beside(folder) == ["moh"]


def test_a_failed_proof_stops_it(folder, fake_hub, monkeypatch, capsys):
    monkeypatch.setattr(publishing, "prove", lambda published, local: Proof("logits.0 differs by 0.25"))
    assert _publish(folder) == 2
    assert "the proof failed: logits.0 differs by 0.25" in capsys.readouterr().err
    assert not fake_hub.requests


def test_a_weight_that_changes_on_the_way_stops_it(folder, forked_proof, fake_hub, monkeypatch, capsys):
    check_files = publishing.check_files

    def spoil(copy: Path) -> list:
        shard = min(copy.glob("*.safetensors"))
        tensors = load_file(shard)
        shard.unlink()  # it is a link to the model's own
        save_file({name: tensor + 0.1 for name, tensor in tensors.items()}, shard, metadata={"format": "pt"})
        return check_files(copy)

    monkeypatch.setattr(publishing, "check_files", spoil)
    before = _state(folder)
    assert _publish(folder) == 2
    assert "the proof failed: logits.0 differs from the local model's" in capsys.readouterr().err
    assert not fake_hub.requests and _state(folder) == before


def test_a_failed_check_stops_it_before_the_proof(folder, fake_hub, monkeypatch, capsys):
    torch.save({}, folder / "optimizer.pt")
    (folder / "chat_template.jinja").write_text(f"{SECRET}\n")
    monkeypatch.setattr(publishing, "prove", lambda published, local: pytest.fail("was loaded"))
    assert _publish(folder) == 2
    printed = capsys.readouterr()
    assert "optimizer.pt: is not part of a model; move it out of the folder (and 1 more" in printed.err
    assert "chat_template.jinja: line 1 holds what looks like a secret" in printed.out
    assert SECRET not in printed.out + printed.err and not fake_hub.requests


def test_other_records_are_published_without_local_paths(folder, fake_hub, proven, monkeypatch, tmp_path):
    monkeypatch.setattr(publishing, "build_card", lambda *_: "---\nlicense: mit\n---\n")
    evaluation, run = tmp_path / "evaluation", tmp_path / "my runs" / "one"
    evaluation.mkdir()
    (evaluation / "report.json").write_text(json.dumps({"models": {"moh": {"model": str(folder)}}}))
    run.mkdir(parents=True)
    sources = {"/data/a/x": 0.25, "/data/b/x": 0.75}
    (run / "run.json").write_text(json.dumps({"config": {"output_dir": f"{tmp_path}/one"}, "sources": sources}))
    behind = SimpleNamespace(folder=run, recipe={"model": str(tmp_path)})
    monkeypatch.setattr(publishing, "read_lineage", lambda folder: Lineage(folder, None, behind))
    publish(PublishConfig(folder, "org/moh", evaluation=evaluation), say=lambda line: None)
    sent = fake_hub.branches["org/moh"]["main"]
    assert json.loads(sent["evaluation.json"]) == {"models": {"moh": {"model": "moh"}}}
    assert json.loads(sent["run.json"]) == {"config": {"output_dir": "one"}, "sources": {"x": 0.25, "x (2)": 0.75}}


def test_a_llama_is_published_with_its_licence_and_notice(folder, fake_hub, proven):
    (folder / "README.md").unlink()
    (folder / "LICENSE.txt").write_text(LLAMA_32)
    assert _publish(folder, repo_id="org/Llama-3.2-MoH") == 0
    sent = fake_hub.branches["org/Llama-3.2-MoH"]["main"]
    assert b"Llama 3.2 is licensed under the Llama 3.2 Community License" in sent["NOTICE"]
    assert sent["LICENSE.txt"].decode() == LLAMA_32 and not (folder / "NOTICE").exists()
    (folder / "NOTICE").write_bytes(b"Ours.\n\n" + sent["NOTICE"])
    assert _publish(folder, repo_id="org/Llama-3.2-MoH") == 0
    assert sent["NOTICE"] == (folder / "NOTICE").read_bytes()


def test_folders_that_cannot_be_published(folder, fake_hub, capsys, tmp_path):
    def refused(folder: Path, *flags: str) -> str:
        assert _publish(folder, *flags) == 2
        return capsys.readouterr().err

    assert "holds no config.json" in refused(tmp_path / "nothing")
    shutil.copytree(folder, tmp_path / "run" / "model")
    assert f"name a model's folder, such as {tmp_path / 'run' / 'model'}" in refused(tmp_path / "run")
    assert "holds no report.json" in refused(folder, "--evaluation", str(tmp_path / "nothing"))
    assert not fake_hub.requests


@pytest.mark.parametrize("name", ["LICENSE.txt", "tokenizer.json", "README.md"])
def test_a_link_to_a_file_elsewhere_is_not_followed(name, folder, tmp_path, capsys, fake_hub):
    (tmp_path / "private").write_text("not to be sent\n")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(tmp_path / "private")
    assert _publish(folder) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"{name} is a link to {tmp_path / 'private'}, outside its folder" in error
    assert not fake_hub.branches


def test_links_inside_the_folder_are_sent_as_files(folder, fake_hub, proven):
    (folder / "LICENSE").write_text("Apache License, Version 2.0\n")
    (folder / "NOTICE").symlink_to("LICENSE")
    assert _publish(folder) == 0
    sent = fake_hub.branches["org/moh"]["main"]
    assert sent["NOTICE"] == sent["LICENSE"]
