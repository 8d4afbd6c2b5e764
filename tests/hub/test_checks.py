"""What must not be published: files, tensors, code, secrets, local paths."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moh_llm.hub.checks import check_files
from moh_llm.hub.secrets import find_paths, scrub, scrub_json
from moh_llm.modeling import MoHLlamaConfig
from moh_llm.records.model import INDEX_NAME

# Put together here, so that the file itself holds no secret.
TOKEN = "hf_" + "Ab3dEf6hIj9kLm2nOp5qRs8tUv1wXy4zAb"


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
    names = ("adapter_model.safetensors", "checkpoints/step-000010/model.safetensors", "notes.md", "pytorch_model.bin")
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
    for name in ("LICENSE", "tokenizer.model", ".git/config", "additional_chat_templates/rag.jinja"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("x")
    assert _found(folder) == []


def test_files_that_are_missing(folder):
    (folder / "tokenizer_config.json").unlink()
    min(folder.glob("*.safetensors")).unlink()
    missing, shard = sorted(_found(folder), reverse=True)
    assert missing.startswith("tokenizer_config.json: is missing") and "which is not there" in shard


def test_shards_hold_what_the_index_says_and_no_paths(folder):
    name = "model.norm.weight"
    index = json.loads((folder / INDEX_NAME).read_text())
    shard = folder / index["weight_map"].pop(name)
    (folder / INDEX_NAME).write_text(json.dumps(index))
    (problem,) = _found(folder)
    assert problem.startswith(f"{shard.name}: holds {name}, which the index does not place there; ")
    index["weight_map"][name] = shard.name
    (folder / INDEX_NAME).write_text(json.dumps(index))
    tensors = load_file(shard)
    save_file(tensors, shard, metadata={"format": "pt", "made_in": "/Users/alice/out"})
    (problem,) = _found(folder)
    assert "its metadata holds a secret or a local path" in problem
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, shard)
    (problem,) = _found(folder)
    assert f"places {name} in {shard.name}, which does not hold it" in problem


@pytest.mark.parametrize("name", ["config.json", "README.md", "tokenizer.json", "routing_moh.py"])
def test_a_secret_in_any_text_is_found_and_not_repeated(folder, name):
    if name.endswith(".json"):
        _edit(folder / name, planted=TOKEN)
    else:
        with (folder / name).open("a") as file:
            file.write(f"\n# {TOKEN}\n")
    (problem,) = [problem for problem in check_files(folder) if not problem.forceable]
    assert problem.file == name
    assert "looks like a Hugging Face token" in str(problem) and TOKEN not in str(problem)


def test_paths_of_this_machine_are_found(folder):
    (folder / "README.md").write_text("made in /tmp/out/moh\n")
    _edit(folder / "config.json", _name_or_path=str(folder))
    readme, config = _found(folder)
    assert readme.startswith("README.md: line 1 holds a path of this machine")
    assert config.startswith("config.json: ") and "holds a path of this machine" in config


# ---- texts


@pytest.mark.parametrize(
    ("text", "scrubbed"),
    [
        ("moh-llm evaluate /tmp/x/moh --base=/data/base/ -o a/b", "moh-llm evaluate moh --base=base -o a/b"),
        ("file:///home/alice/x/y.txt", "y.txt"),
        (str(Path.home()), "home"),
    ],
)
def test_paths_are_cut_to_their_last_component(text, scrubbed):
    assert scrub(text) == scrubbed


@pytest.mark.parametrize("text", ["https://x.org/a/b", "</tmp></tool>", "post to /v1/chat", "1/2, ${X}/a/b, ~/.a/b"])
def test_texts_that_hold_no_path_of_this_machine(text, tmp_path):
    assert not find_paths(text, tmp_path / "model")


def test_paths_of_this_machine_are_those_in_its_folders(tmp_path):
    below = [tmp_path / "x", Path.cwd() / "x", "/home/alice", f"file://{tmp_path}/x"]
    assert all(find_paths(f"made in {path}, once", tmp_path / "model") for path in below)


def test_records_are_scrubbed_at_every_depth(tmp_path):
    place = tmp_path / "my models" / "moh"
    place.mkdir(parents=True)
    content = {"base": {"name": str(place)}, "n": [1, "/tmp/a/b"], "sources": {"/tmp/a/x": 0.25, "/tmp/b/x": 0.75}}
    assert scrub_json(content) == {"base": {"name": "moh"}, "n": [1, "b"], "sources": {"x": 0.25, "x (2)": 0.75}}
