"""Secrets in what is published: keys and tokens of many services, passwords, and the texts that only look like them."""

import base64
import json
import random
import string
from pathlib import Path

import pytest

from moh_llm.hub.checks import check_secrets
from moh_llm.hub.secrets import find_in_file, find_secrets, redact

# Put together here, so that the file itself holds no secret.
LETTERS = "Ab3dEf6hIj9kLm2nOp5qRs8tUv1wXy4zAb7c"
HEX = "0123456789abcdef" * 2 + "01234567"


def token_of(*parts: dict) -> str:
    encoded = [base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts]
    return ".".join([*encoded, LETTERS[:32]])


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
    "a secret (GitLab Token)": "glpat-" + LETTERS[:20],
    "a secret (JSON Web Token)": token_of({"alg": "HS256"}, {"sub": "1"}),
    "a secret (Stripe Access Key)": "sk_live_" + LETTERS[:24],
    "a secret (SendGrid API Key)": "SG." + LETTERS[:22] + "." + LETTERS + "1234567",
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
        "password: " + '"correct horse"',
        "DB_PASSWORD=" + "correcthorse",
        "moh-llm evaluate m --data-dir 's3://b?secret=" + "abcd1234'",
        json.dumps({"password": "hunter" + "2"}),
        json.dumps({"command": json.dumps({"api_key": "abcd" + "1234"})}),
        "client_secret := '" + "GOAT-9-lives'",
        "passwd: " + "s3cret-9",
        "<!-- access_token = " + LETTERS + " -->",
        "wandb login " + HEX,
        "machine api.wandb.ai\n  login user\n  password " + HEX,
        "xapp-" + "1-A0123456789-1234567890123-abc",
        "GOCSPX-" + LETTERS[:28],
        "DB_PASS=" + "hunter2",
        "token: " + "abcdef1234567890",
        json.dumps({"token": "abcdef" + "1234567890"}),
        "export TOKEN=" + "abcdef1234567890",
        "HF_TOKEN: " + "abcdefg123",
        "bearer_token=" + "abc123def",
        "Authorization: " + "token abcdefghijkl1234",
        "X-Api-Key: " + "abcdef123456",
        "api-key: " + "abcdef123456",
        "--password " + "hunter2",
        "machine x login me password " + "hunter2",
        "machine x\n  login me\n  password " + "hunter2\n",
        "password=" + "MyPassword123",
        "password=" + "my_pass_word",
        "password=" + "$ecret1",
        json.dumps({"password": "correct" + "_horse"}),
        "gsk_" + LETTERS * 2,
        "nvapi-" + LETTERS * 2,
        "r8_" + LETTERS,
        "xai-" + LETTERS * 2,
        "pplx-" + LETTERS * 2,
        "npm_" + LETTERS,
        "dop_v1_" + HEX * 2,
        "dapi" + HEX[:32],
        "ATATT3" + LETTERS,
        "shpat_" + HEX[:32],
        "hvs." + LETTERS,
        "lin_api_" + LETTERS,
        "PuTTY-User-Key-File" + "-2: ssh-rsa",
        "AGE-SECRET-KEY-1" + "Q" * 58,
        "https://discord.com/api/webhooks/" + "123456789012345678/" + LETTERS * 2,
        "https://x.webhook.office.com/webhookb2/" + "1-2@3-4/IncomingWebhook/" + HEX[:32] + "/5-6",
        "redis://" + ":hunter2@db:6379",
        "https://" + "abc12345token@github.com/x/y.git",
        "https://x.blob.core.windows.net/c/b?sv=2022-11-02&sig=" + LETTERS + "%3D&se=2030",
        "https://b.s3.amazonaws.com/k?X-Amz-Credential=x&X-Amz-Signature=" + HEX,
    ],
)
def test_passwords_and_keys_by_their_names(text):
    assert find_secrets(text)


@pytest.mark.parametrize(
    "text",
    [
        "HF_TOKEN=hf_... moh-llm publish DIR",
        "task-conditional-language-modelling-for-risk-management",
        "4c40deff31468b07f765aa675d784fa20a2426093f1b2990a4ecf7234e96e284",
        "https://huggingface.co/org/name@main",
        'OpenAI(base_url="http://localhost:8000/v1", api_key="EMPTY")',
        'client = OpenAI(api_key="your-api-key")',
        "api_key=os.environ['KEY']",
        "password = getpass()",
        "export HF_TOKEN=$TOKEN SECRET=${{ secrets.NAME }}",
        'password: "<your password>"',
        '"pad_token": "<pad>", "query_key_norm": true, "secret_heads": 3, "num_key_value_heads": 2',
        "the secret: nobody knows; a password is a word",
        "https://github.com/wandb/wandb/commit/" + HEX,
        "def f(password=None, api_key: str | None = None):",
        "connect(user=name, password=user_pass, secret=client_value)",
        "password = other_name",
        "password=$DB_PASSWORD1 api_key=${KEY2} passwd=$1",
        "forward_pass = 12345",
        '"bos_token": "<|begin_of_text|>", "eos_token": "<|reserved_special_token_128009|>", "image_token_id": 151655',
        json.dumps(
            {"pad_token": "<pad>", "added_tokens_decoder": {"32000": {"content": "<pad>"}}, "unk_token": "[UNK]"}
        ),
        "eos_token: im_end_12345\ntoken: 12\nmax_tokens: 512\nnew_token = tokens_1d",
        "token = tokenizer.decode(ids[1234])",
        "moh-llm --token $HF_TOKEN --password PASSWORD --token-dim 128",
        "git@github.com:x/y.git https://user@example.org/x https://[::1]:80/a@b",
        "the password is required; password protected; an api-key: see below",
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
    """Random words and real ones, as large tokenizers have them; hashes; and a secret that someone left there."""
    draw = random.Random(0)
    words = ["".join(draw.choices(string.printable[:94], k=draw.randint(1, 12))) for _ in range(20_000)]
    words += [*find_secrets.__doc__.split(), "password", 'password="', "secret=hunter2", "api_key", "=", '"']
    vocabulary = {word: number for number, word in enumerate(words)}
    place = tmp_path / "tokenizer.json"
    place.write_text(json.dumps({"model": {"vocab": vocabulary, "merges": [[word, word] for word in words]}}))
    (tmp_path / "config.json").write_text(json.dumps({"sha256": [HEX + HEX[:24], HEX]}))
    names = ["tokenizer.json", "config.json"]
    assert check_secrets(tmp_path, names) == []
    place.write_text(place.read_text() + SECRETS["a Google key"])
    assert [problem.file for problem in check_secrets(tmp_path, names)] == ["tokenizer.json"]


def test_the_packages_own_files_hold_none():
    package = Path(find_in_file.__code__.co_filename).parents[1]
    for path in (*(package / "modeling").glob("*.py"), *(package / "hub" / "templates").iterdir()):
        assert find_in_file(path) == [], path
