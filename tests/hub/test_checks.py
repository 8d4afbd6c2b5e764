"""What must not be published: files that are not part of a model, tensors without an index, secrets."""

import json
import random
import string

import pytest
import torch
from safetensors.torch import load_file, save_file

from moh_llm.hub.checks import check_files, find_secrets, redact
from moh_llm.modeling import MoHLlamaConfig
from moh_llm.records.model import INDEX_NAME


def _edit(path, **fields):
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def _found(folder):
    return [str(problem) for problem in check_files(folder)]


def test_a_model_as_it_was_saved_has_no_problem(moh_model, make_model):
    assert _found(moh_model) == []
    tied = make_model(MoHLlamaConfig, dtype=torch.bfloat16, tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(tied / "model.safetensors")
    assert _found(tied) == []


def test_files_that_are_not_part_of_a_model(folder):
    names = ["LICENSE.pkl", "adapter_model.safetensors", "checkpoints/step-000010/model.safetensors", "notes.md"]
    names += ["pytorch_model.bin"]
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")
    assert [found.partition(";")[0] for found in _found(folder)] == [
        f"{name.partition('/')[0]}: is not part of a model" for name in names
    ]


def test_an_index_that_nobody_reads(folder):
    """transformers prefers a single file to an index beside it, other libraries the index."""
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    tensors = {name: tensor for shard in shards for name, tensor in load_file(folder / shard).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert [problem.partition(":")[0] for problem in _found(folder)] == [*shards, INDEX_NAME]


def test_files_that_are_part_of_a_model_or_hidden(folder):
    for name in (
        "LICENSE",
        "LICENSE-Llama-3.1",
        "tokenizer.model",
        ".git/config",
        "additional_chat_templates/rag.jinja",
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("x")
    assert _found(folder) == []


def test_files_that_are_missing(folder):
    (folder / "tokenizer_config.json").unlink()
    min(folder.glob("*.safetensors")).unlink()
    missing, shard = sorted(_found(folder), reverse=True)
    assert missing.startswith("tokenizer_config.json: is missing") and "which is not there" in shard


def test_shards_hold_what_the_index_says(folder):
    name = "model.norm.weight"
    index = json.loads((folder / INDEX_NAME).read_text())
    shard = folder / index["weight_map"].pop(name)
    (folder / INDEX_NAME).write_text(json.dumps(index))
    (problem,) = _found(folder)
    assert problem.startswith(f"{shard.name}: holds {name}, which the index does not place there; ")
    index["weight_map"][name] = shard.name
    (folder / INDEX_NAME).write_text(json.dumps(index))
    tensors = load_file(shard)
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, shard)
    (problem,) = _found(folder)
    assert f"places {name} in {shard.name}, which does not hold it" in problem


# ---- secrets

# Put together here, so that the file itself holds no secret.
LETTERS = "Ab3dEf6hIj9kLm2nOp5qRs8tUv1wXy4zAb7c"
SECRETS = {
    "Hugging Face Token": "hf_" + LETTERS[:34],
    "GitHub Token": "ghp_" + LETTERS,
    "AWS Access Key": "AKIA" + "ABCDEFGH12345678",
    "Private Key": "-----BEGIN RSA " + "PRIVATE KEY-----",
    "Basic Auth Credentials": "https://me:" + "hunter22@example.org/x",
    "Secret Keyword": 'password: "' + 'correct horse"',
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("chat_template.jinja", kind) for kind in SECRETS),
        *((name, "Hugging Face Token") for name in ("config.json", "tokenizer.json", "README.md", "LICENSE")),
    ],
)
def test_a_secret_in_any_text_is_found_and_not_repeated(folder, name, kind):
    if name.endswith(".json"):
        _edit(folder / name, planted=SECRETS[kind])
    else:
        (folder / name).write_text(f"one line\nsee {SECRETS[kind]} and more\n")
    (problem,) = _found(folder)
    assert problem.startswith(f"{name}: ") and f"a secret ({kind})" in problem
    assert ("line 2" in problem) != name.endswith(".json") and SECRETS[kind] not in problem


def test_the_users_own_token_of_another_form_is_found_and_hidden(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "a token of another form")
    text = f"a token of another form, and {SECRETS['Hugging Face Token']}"
    assert find_secrets("see a token of another form here") == ["Hugging Face Token"]
    assert redact(text) == "[hidden], and [hidden]"


@pytest.mark.parametrize(
    "text",
    [
        "HF_TOKEN=hf_... moh-llm publish DIR",
        "4c40deff31468b07f765aa675d784fa20a2426093f1b2990a4ecf7234e96e284",
        "https://huggingface.co/org/name@main",
        "api_key=os.environ['KEY']",
        "export HF_TOKEN=$TOKEN SECRET=${{ secrets.NAME }}",
        'password: "<your password>"',
        '"pad_token": "<pad>", "query_key_norm": true, "secret_heads": 3, "num_key_value_heads": 2',
        "def f(password=None, api_key: str | None = None):",
    ],
)
def test_texts_that_only_look_like_secrets_stay(text):
    assert find_secrets(text) == []


def test_a_vocabulary_holds_words_that_name_passwords(folder):
    """Random words and real ones, as large tokenizers have them; and a secret that someone left there."""
    draw = random.Random(0)
    words = ["".join(draw.choices(string.printable[:94], k=draw.randint(1, 12))) for _ in range(20_000)]
    words += ["password", 'password="', "secret=hunter2", 'api_key":"', "=", '"']
    vocabulary = {word: number for number, word in enumerate(words)}
    place = folder / "tokenizer.json"
    place.write_text(json.dumps({"model": {"vocab": vocabulary, "merges": [[word, word] for word in words]}}))
    assert _found(folder) == []
    place.write_text(place.read_text() + SECRETS["GitHub Token"])
    assert "a secret (GitHub Token)" in _found(folder)[0]
