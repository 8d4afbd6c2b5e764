"""What is taken for a secret or for a path of this machine, and what is not."""

from pathlib import Path

import pytest

from moh_llm.hub.texts import find_paths, find_secrets, find_secrets_in_json, redact, scrub, scrub_json

# Put together here, so that the file itself holds no secret.
LETTERS = "Ab3dEf6hIj9kLm2nOp5qRs8tUv1wXy4zAb7c"
SECRETS = {
    "a Hugging Face token": "hf_" + LETTERS[:34],
    "an AWS key": "AKIA" + "ABCDEFGH12345678",
    "a GitHub token": "ghp_" + LETTERS,
    "an API key": "sk-" + "proj-" + LETTERS,
    "a Slack token": "xoxb-" + "123456789012-" + LETTERS[:12],
    "a private key": "-----BEGIN RSA " + "PRIVATE KEY-----",
    "an authorization header": "Authorization: " + "Bearer abcdefgh",
    "a password in an address": "https://me:" + "hunter22@example.org/x",
    "a field for a secret, filled in": 'api_key = "' + 'hunter22"',
}


@pytest.mark.parametrize("kind", SECRETS)
def test_secrets_are_found_within_a_text(kind):
    text = f"first line\nsee {SECRETS[kind]} and more"
    assert kind in find_secrets(text)
    assert kind == "a field for a secret, filled in" or SECRETS[kind] not in redact(text)


@pytest.mark.parametrize(
    "text",
    [
        'tokenizer.pad_token = "<|endoftext|>"',
        "HF_TOKEN=hf_... moh-llm publish DIR",
        'login(token="hf_...")',
        "export HF_TOKEN=$MY_TOKEN",
        "task-conditional-language-modelling-for-risk-management",
        "4c40deff31468b07f765aa675d784fa20a2426093f1b2990a4ecf7234e96e284",
        "https://huggingface.co/org/name@main",
        "per token SmolLM2-135M needs 2 passes; a token=1",
        "the secret: shared heads",
    ],
)
def test_what_only_looks_alike_is_let_be(text):
    assert find_secrets(text) == []


def test_fields_of_json_by_their_names():
    found = find_secrets_in_json(
        {"a": [{"hub_token": "abcd"}], "password": "short", "pad_token": "<pad>", "token": None, "api_key": "YOUR_KEY"}
    )
    kind = "a field for a secret, filled in"
    assert list(found) == [("a[0].hub_token", kind), ("password", kind)]


def test_command_lines_in_json():
    command = "HF_TOKEN=" + LETTERS[:12] + " moh-llm evaluate x --api-key " + LETTERS[:10]
    assert len(list(find_secrets_in_json({"command": command}))) == 1
    assert not list(find_secrets_in_json({"command": "moh-llm evaluate out/moh --base base"}))


@pytest.mark.parametrize("homes", ["home", "Users"])
def test_somebodys_home_folder_is_cut(homes):
    assert scrub(f"/{homes}/alice") == "home"
    assert scrub(f"/{homes}/alice/models/llama-3.2") == "llama-3.2"
    assert scrub(f"see file:///{homes}/alice/x/y.txt") == "see y.txt"
    assert find_paths(f"/{homes}/alice/models")


@pytest.mark.parametrize(
    ("text", "scrubbed"),
    [
        ("/Users/alice/models/llama-3.2", "llama-3.2"),
        (
            "moh-llm evaluate /tmp/x/moh --base=/data/base/ --out runs/a",
            "moh-llm evaluate moh --base=base --out runs/a",
        ),
        ("the mixture `/mnt/disk/mixtures/web.yaml`, twice.", "the mixture `web.yaml`, twice."),
        ("see /scratch/a/b. Then", "see b. Then"),
        ("file:///Users/alice/x/y.txt", "y.txt"),
        ("/Users/alice", "home"),
        ("C:\\Users\\alice\\models\\moh", "moh"),
    ],
)
def test_paths_are_cut_to_their_last_component(text, scrubbed):
    assert scrub(text) == scrubbed
    assert find_paths(text) and not find_paths(scrub(text))


def test_the_home_folder_itself_and_paths_with_spaces(tmp_path, monkeypatch):
    assert scrub(str(Path.home())) == "home"
    place = tmp_path / "my models" / "moh"
    place.mkdir(parents=True)
    assert scrub(str(place)) == "moh"


@pytest.mark.parametrize(
    "text",
    [
        "https://huggingface.co/data/models/x",
        "data_mixtures/web.yaml",
        "out/var/x",
        "</tmp></tool>",
        "#!/usr/bin/env python",
        "and/or, 1/2, /v1/chat/completions",
        "~/.cache/huggingface",
    ],
)
def test_what_is_no_path_of_this_machine(text):
    assert find_paths(text) == [] and scrub(text) == text


def test_scrubbing_json_tells_what_it_changed_and_keeps_templates():
    content = {"base": {"name": "/tmp/models/llama"}, "command": "run /tmp/models/llama", "n": [1, "/tmp/a/b"]}
    copy, changed = scrub_json(content, whole=False)
    assert copy == {"base": {"name": "llama"}, "command": "run llama", "n": [1, "b"]}
    assert changed == {"base.name": "/tmp/models/llama", "command": "run /tmp/models/llama", "n[1]": "/tmp/a/b"}
    copy, changed = scrub_json(content, whole=True)
    assert copy["command"] == "run /tmp/models/llama" and set(changed) == {"base.name", "n[1]"}
    assert content["base"] == {"name": "/tmp/models/llama"}


def test_scrubbing_json_keeps_apart_what_has_one_name_in_two_folders():
    content = {"sources": {"/tmp/a/x.txt": 0.25, "/tmp/b/x.txt": 0.5, "x.txt": 0.25}}
    copy, changed = scrub_json(content, whole=False)
    assert copy == {"sources": {"x.txt (2)": 0.25, "x.txt (3)": 0.5, "x.txt": 0.25}}
    assert set(changed.values()) == {"/tmp/a/x.txt", "/tmp/b/x.txt"}
