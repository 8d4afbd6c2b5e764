"""Secrets in what is published: keys and tokens of many services, passwords, and the texts that only look like them."""

import json

import pytest

from moh_llm.hub.checks import check_secrets
from moh_llm.hub.secrets import find_in_file, find_secrets, redact

# Put together here, so that the file itself holds no secret.
LETTERS = "Ab3dEf6hIj9kLm2nOp5qRs8tUv1wXy4zAb7c"
HEX = "0123456789abcdef" * 2 + "01234567"


SECRETS = {
    "a Hugging Face token": "hf_" + LETTERS[:34],
    "an AWS key": "AKIA" + "ABCDEFGH12345678",
    "a GitHub token": "ghp_" + LETTERS,
    "a Google key": "AIza" + LETTERS[:35],
    "a Slack token": "xoxb-" + "123456789012-123456789012-" + LETTERS[:24],
    "a Weights & Biases key": "WANDB_API_KEY=" + HEX,
    "an API key": "sk-" + "proj-" + LETTERS,
    "a private key": "-----BEGIN RSA " + "PRIVATE KEY-----",
    "an authorization header": "Authorization: " + "Bearer abcdefgh",
    "a password in an address": "https://me:" + "hunter22@example.org/x",
    "your Hugging Face token": "a token of another form",
    "a service's token": "gsk_" + LETTERS * 2,
    "a token in an address": "https://" + "abc12345token@github.com/x/y.git",
    "a signature in an address": "https://b.s3.amazonaws.com/k?X-Amz-Credential=x&X-Amz-Signature=" + HEX,
    "an address of a webhook": "https://discord.com/api/webhooks/" + "123456789012345678/" + LETTERS * 2,
    "a secret (GitLab Token)": "glpat-" + LETTERS[:20],
    "a password or key that is assigned to a name": "password=" + "hunter2",
}


@pytest.mark.parametrize("kind", SECRETS)
def test_each_kind_is_found_within_a_text_and_hidden(kind, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", SECRETS["your Hugging Face token"])
    text = f"first line\nsee {SECRETS[kind]} and more"
    assert find_secrets(text) == [kind] and SECRETS[kind] not in redact(text)


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"command": json.dumps({"api_key": "abcd" + "1234"})}),
        "client_secret := '" + "GOAT-9-lives'",
        "<!-- access_token = " + LETTERS + " -->",
        "wandb login " + HEX,
        "DB_PASS=" + "hunter2",
        "token: " + "abcdef1234567890",
        "export TOKEN=" + "abcdef1234567890",
        "--password " + "hunter2",
        "machine x login me password " + "hunter2",
        "machine x\n  login me\n  password " + "hunter2\n",
        "password=" + "my_pass_word",
        json.dumps({"password": "correct" + "_horse"}),
        "redis://" + ":hunter2@db:6379",
    ],
)
def test_passwords_and_keys_by_their_names(text):
    assert find_secrets(text)


@pytest.mark.parametrize(
    "text",
    [
        "HF_TOKEN=hf_... moh-llm publish DIR",
        "4c40deff31468b07f765aa675d784fa20a2426093f1b2990a4ecf7234e96e284",
        'OpenAI(base_url="http://localhost:8000/v1", api_key="EMPTY")',
        "api_key=os.environ['KEY']",
        "export HF_TOKEN=$TOKEN SECRET=${{ secrets.NAME }}",
        '"pad_token": "<pad>", "query_key_norm": true, "secret_heads": 3, "num_key_value_heads": 2',
        "the secret: nobody knows; a password is a word",
        "https://github.com/wandb/wandb/commit/" + HEX,
        "connect(user=name, password=user_pass, secret=client_value)",
        "forward_pass = 12345",
        '"bos_token": "<|begin_of_text|>", "eos_token": "<|reserved_special_token_128009|>", "image_token_id": 151655',
        "token = tokenizer.decode(ids[1234])",
        "moh-llm --token $HF_TOKEN --password PASSWORD --token-dim 128",
        "git@github.com:x/y.git https://user@example.org/x https://[::1]:80/a@b",
    ],
)
def test_texts_that_only_look_like_secrets_stay(text):
    assert find_secrets(text) == [] and redact(text) == text


def test_a_secret_over_several_lines_is_found(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("authorization:\n  Bearer " + "abcdefgh\n")
    assert find_in_file(path) == [(None, "an authorization header")]
    path.write_text("none any more, and a longer text than before\n")
    assert find_in_file(path) == []


def test_a_vocabulary_holds_words_that_name_passwords(tmp_path):
    words = ["password", 'password="', "secret=hunter2", "api_key", "=", '"']
    place = tmp_path / "tokenizer.json"
    content = {"vocab": dict.fromkeys(words, 0), "merges": [[word, word] for word in words], "sha256": HEX + HEX[:24]}
    place.write_text(json.dumps(content))
    assert check_secrets(tmp_path, [place.name]) == []
    place.write_text(place.read_text() + SECRETS["a Google key"])
    assert [problem.file for problem in check_secrets(tmp_path, [place.name])] == [place.name]
