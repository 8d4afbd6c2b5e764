"""What must not leave: files, tensors, code, secrets, paths."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from moh_llm.hub.checks import check_files
from moh_llm.modeling import MoHLlamaConfig
from moh_llm.records.model import INDEX_NAME

TOKEN = "hf_" + "Ab3dEf6hIj9kLm2nOp5q" + "Rs8tUv1wXy4zAb"


def _edit(path, **fields):
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def _found(folder):
    return [str(problem) for problem in check_files(folder)]


def test_a_model_as_it_was_saved_has_no_problem(moh_model, make_model):
    assert _found(moh_model) == []
    tied = make_model(MoHLlamaConfig, dtype=torch.bfloat16, tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(tied / "model.safetensors")
    assert _found(tied) == []


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("pytorch_model.bin", "is a pickle"),
        ("checkpoints/step-000010/model.safetensors", "is the state of a training run"),
        ("adapter_model.safetensors", "holds weights that the index does not name"),
        ("helper.py", "is code that no auto_map entry needs"),
        ("notes.md", "is not part of a model"),
        ("report/report.html", "is a folder"),
    ],
)
def test_files_that_are_no_part_of_a_model(folder, name, says):
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(b"x")
    (problem,) = _found(folder)
    assert problem.startswith(name.partition("/")[0]) and says in problem


def test_files_that_are_part_of_a_model_or_hidden(folder):
    for name in ("LICENSE", "NOTICE", "USE_POLICY.md", "merges.txt", "tokenizer.model", ".gitattributes"):
        (folder / name).write_text("x")
    for name in (".git/config", "__pycache__/x.pyc", "additional_chat_templates/rag.jinja"):
        (folder / name).parent.mkdir()
        (folder / name).write_text("x")
    assert _found(folder) == []


def test_shards_hold_what_the_index_says(folder):
    name = "model.norm.weight"
    index = json.loads((folder / INDEX_NAME).read_text())
    shard = folder / index["weight_map"].pop(name)
    (folder / INDEX_NAME).write_text(json.dumps(index))
    (problem,) = _found(folder)
    assert problem.startswith(f"{shard.name}: holds {name}, which the index does not place there; ")

    index["weight_map"][name] = shard.name
    (folder / INDEX_NAME).write_text(json.dumps(index))
    save_file({key: tensor for key, tensor in load_file(shard).items() if key != name}, shard)
    (problem,) = _found(folder)
    assert f"places {name} in {shard.name}, which does not hold it" in problem


def test_a_shard_that_is_missing(folder):
    min(folder.glob("*.safetensors")).unlink()
    assert any("which is not there" in problem for problem in _found(folder))


def test_metadata_of_weights_is_read(folder):
    shard = min(folder.glob("*.safetensors"))
    save_file(load_file(shard), shard, metadata={"format": "pt", "made_in": "/Users/alice/out"})
    (problem,) = _found(folder)
    assert "its metadata holds" in problem


@pytest.mark.parametrize("name", ["AutoConfig", "AutoModel", "AutoModelForCausalLM"])
def test_auto_map_names_all_three_classes(folder, name):
    auto_map = json.loads((folder / "config.json").read_text())["auto_map"]
    _edit(folder / "config.json", auto_map={key: value for key, value in auto_map.items() if key != name})
    assert f"auto_map has no {name}" in _found(folder)[0]


def test_code_that_does_not_parse(folder):
    (folder / "modeling_moh_llama.py").write_text("def broken(:\n")
    assert "modeling_moh_llama.py: is not Python that parses; convert or save the model again" in _found(folder)


@pytest.mark.parametrize(
    "line",
    ["import einops", "from moh_llm.files import sha256", "def f():\n    import numpy as np", "import os, yaml.x"],
)
def test_code_imports_nothing_but_torch_and_transformers(folder, line):
    with (folder / "routing_moh.py").open("a") as file:
        file.write(f"\n{line}\n")
    (problem,) = _found(folder)
    assert problem.startswith("routing_moh.py: imports ")


@pytest.mark.parametrize("name", ["config.json", "conversion.json", "README.md", "tokenizer.json", "routing_moh.py"])
def test_a_secret_anywhere_is_found_told_and_not_repeated(folder, name):
    place = folder / name
    if name == "conversion.json":
        place.write_text(json.dumps({"base": {"name": f"https://x/{TOKEN}"}}))
    elif name.endswith(".json"):
        _edit(place, planted=TOKEN)
    else:
        place.write_text(place.read_text() + f"\n# {TOKEN}\n")
    problems = check_files(folder)
    assert [problem.file for problem in problems] == [name]
    assert not problems[0].forceable
    assert "a Hugging Face token" in str(problems[0]) and TOKEN not in str(problems[0])


def test_paths_of_this_machine_are_found(folder):
    (folder / "conversion.json").write_text(json.dumps({"base": {"name": "/Users/alice/llama"}}))
    (folder / "README.md").write_text("made in /tmp/out/moh\n")
    _edit(folder / "config.json", _name_or_path=str(folder))
    found = [problem.partition(":")[0] for problem in _found(folder) if "holds a path of this machine" in problem]
    assert found == ["README.md", "config.json", "conversion.json"] and len(_found(folder)) == 3


def test_a_folder_without_a_tokenizer(folder):
    (folder / "tokenizer_config.json").unlink()
    assert _found(folder) == ["tokenizer_config.json: is missing; convert or save the model again"]
