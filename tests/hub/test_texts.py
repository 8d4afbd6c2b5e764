"""What is a secret or a path of this machine, and what is not."""

from pathlib import Path

import pytest

from moh_llm.hub.texts import find_paths, find_secrets, redact, scrub, scrub_json

# Put together here, so that the file itself holds no secret.
LETTERS = "Ab3dEf6hIj9kLm2nOp5qRs8tUv1wXy4zAb7c"
SECRETS = {
    "a Hugging Face token": "hf_" + LETTERS[:34],
    "an AWS key": "AKIA" + "ABCDEFGH12345678",
    "a GitHub token": "ghp_" + LETTERS,
    "an API key": "sk-" + "proj-" + LETTERS,
    "a private key": "-----BEGIN RSA " + "PRIVATE KEY-----",
    "an authorization header": "Authorization: " + "Bearer abcdefgh",
    "a password in an address": "https://me:" + "hunter22@example.org/x",
    "your Hugging Face token": "a token of another form",
}


@pytest.mark.parametrize("kind", SECRETS)
def test_secrets_are_found_within_a_text(kind, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", SECRETS["your Hugging Face token"])
    text = f"first line\nsee {SECRETS[kind]} and more"
    assert find_secrets(text) == [kind] and SECRETS[kind] not in redact(text)


@pytest.mark.parametrize(
    "text",
    [
        "HF_TOKEN=hf_... moh-llm publish DIR",
        "task-conditional-language-modelling-for-risk-management",
        "4c40deff31468b07f765aa675d784fa20a2426093f1b2990a4ecf7234e96e284",
        "https://huggingface.co/org/name@main",
        "per token SmolLM2-135M needs 2 passes; a token=1",
    ],
)
def test_what_only_looks_alike_is_let_be(text):
    assert find_secrets(text) == [] and redact(text) == text


@pytest.mark.parametrize(
    ("text", "scrubbed"),
    [
        ("/Users/alice/models/llama-3.2", "llama-3.2"),
        ("moh-llm evaluate /tmp/x/moh --base=/data/base/ -o a/b", "moh-llm evaluate moh --base=base -o a/b"),
        ("the mixture `/mnt/disk/mixtures/web.yaml`, twice.", "the mixture `web.yaml`, twice."),
        ("see /scratch/a/b. Then", "see b. Then"),
        ("file:///home/alice/x/y.txt", "y.txt"),
        ("/home/alice", "home"),
        (str(Path.home()), "home"),
    ],
)
def test_paths_are_cut_to_their_last_component(text, scrubbed):
    assert scrub(text) == scrubbed


@pytest.mark.parametrize("text", ["https://x.org/a/b", "data/web.yaml", "</tmp></tool>", "1/2, ${X}/a/b", "~/.a/b"])
def test_what_is_no_path_of_this_machine(text, tmp_path):
    assert scrub(text) == text and not find_paths(text, tmp_path)


def test_paths_of_this_machine_are_those_below_its_folders(tmp_path):
    below = [tmp_path / "x", Path.cwd() / "x", "/home/alice", f"file://{tmp_path}/x", Path("/Users/alice/x")]
    assert all(find_paths(f"made in {path}, once", tmp_path / "model") for path in below)
    assert not find_paths("post to /v1/chat/completions, see /usr/share/doc", tmp_path / "model")


def test_records_are_scrubbed_through_and_through(tmp_path):
    place = tmp_path / "my models" / "moh"
    place.mkdir(parents=True)
    content = {"base": {"name": str(place)}, "n": [1, "/tmp/a/b"], "sources": {"/tmp/a/x": 0.25, "/tmp/b/x": 0.75}}
    assert scrub_json(content) == {"base": {"name": "moh"}, "n": [1, "b"], "sources": {"x": 0.25, "x (2)": 0.75}}
