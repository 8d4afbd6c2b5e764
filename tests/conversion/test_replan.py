"""A MoH model as the base: planned anew, and taken back to the plain checkpoint inside it."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from moh_llm.cli import main
from moh_llm.modeling import MoHLlamaForCausalLM


@pytest.fixture(scope="module")
def base(make_llama) -> Path:
    return make_llama(tie_word_embeddings=True)


@pytest.fixture(scope="module")
def moh(base, convert, tmp_path_factory) -> Path:
    """The base's default conversion: its file, one of routing tensors, an index."""
    folder = tmp_path_factory.mktemp("converted") / "moh"
    assert convert(base, folder) == 0
    return folder


@pytest.fixture(scope="module")
def mixed(moh, tmp_path_factory) -> Path:
    """The same model as transformers saves it: dense and routing tensors in one file."""
    folder = tmp_path_factory.mktemp("mixed") / "moh"
    shutil.copytree(moh, folder)
    for path in [*folder.glob("*.safetensors*")]:
        path.unlink()
    MoHLlamaForCausalLM.from_pretrained(moh).save_pretrained(folder)
    assert [path.name for path in folder.glob("*.safetensors*")] == ["model.safetensors"]
    return folder


def equal(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    same = [others[name].dtype == tensor.dtype and torch.equal(others[name], tensor) for name, tensor in some.items()]
    return some.keys() == others.keys() and all(same)


def test_groups_are_forgotten_where_heads_are_asked_for(base, convert, read_tensors, one_thread, tmp_path):
    flags = ["--routing-granularity", "kv_group", "--num-shared-heads", "0", "--heldout-tokens", "0"]
    assert convert(base, tmp_path / "groups", *flags) == 0
    assert convert(tmp_path / "groups", tmp_path / "again") == convert(base, tmp_path / "direct") == 0
    assert equal(read_tensors(tmp_path / "again"), read_tensors(tmp_path / "direct"))
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("direct", "again")]
    assert configs[0] == configs[1] and configs[0]["routing_granularity"] == "head"


def test_the_way_back_gives_the_bases_file(base, moh, tmp_path):
    assert main(["convert", str(moh), "--to-dense", "--output-dir", str(tmp_path / "dense")]) == 0
    assert (tmp_path / "dense" / "model.safetensors").read_bytes() == (base / "model.safetensors").read_bytes()
    names = {path.name for path in (tmp_path / "dense").iterdir()}
    assert names == {"seal.json", *(path.name for path in base.iterdir())}
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (base, tmp_path / "dense"))
    assert before == after


def test_the_way_back_from_one_mixed_file(base, mixed, read_tensors, tmp_path):
    assert main(["convert", str(mixed), "--to-dense", "--output-dir", str(tmp_path / "dense")]) == 0
    assert equal(read_tensors(tmp_path / "dense"), read_tensors(base))
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    assert type(dense).__name__ == "LlamaForCausalLM" and dense.dtype == torch.float32


def test_the_paper_authors_format(base, moh, convert, tmp_path, capsys):
    """They publish LLaMA's config with code of their own; none of it is run or taken along."""
    theirs = tmp_path / "theirs"
    shutil.copytree(base, theirs)
    (theirs / "modeling_llama.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    config = json.loads((theirs / "config.json").read_text())
    config["auto_map"] = {
        "AutoConfig": "modeling_llama.LlamaConfig",
        "AutoModel": "modeling_llama.LlamaModel",
        "AutoModelForCausalLM": "modeling_llama.LlamaForCausalLM",
    }
    (theirs / "config.json").write_text(json.dumps(config))
    assert convert(theirs, tmp_path / "moh", "--preset", "paper") == 0
    written = json.loads((tmp_path / "moh" / "config.json").read_text())
    assert (written["model_type"], written["router_type"]) == ("moh_llama", "query_norm")
    assert (written["num_shared_heads"], written["num_active_heads"]) == (2, 3)
    assert written["auto_map"]["AutoModelForCausalLM"] == "modeling_moh_llama.MoHLlamaForCausalLM"
    assert not (tmp_path / "ran").exists() and not (tmp_path / "moh" / "modeling_llama.py").exists()
    assert (tmp_path / "moh" / "model.safetensors").read_bytes() == (base / "model.safetensors").read_bytes()
    MoHLlamaForCausalLM.from_pretrained(tmp_path / "moh")
