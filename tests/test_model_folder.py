"""Weights are looked at before they are loaded."""

import json
import shutil
from pathlib import Path

import pytest

from moh_llm.errors import UserError
from moh_llm.records.model import may_be_hub_id, read_weight_map


@pytest.fixture
def model(make_llama, tmp_path) -> Path:
    return Path(shutil.copytree(make_llama(max_shard_size="20KB"), tmp_path / "model"))


def test_a_whole_model(make_llama):
    single, sharded = make_llama(), make_llama(max_shard_size="20KB")
    files, weight_map = read_weight_map(single)
    shards, shard_map = read_weight_map(sharded)
    assert [path.name for path in files] == ["model.safetensors"]
    assert len(shards) > 1
    assert weight_map.keys() == shard_map.keys()


@pytest.mark.parametrize("keep", [0, 4, 100, 5000])
def test_truncated(model, keep):
    shard = next(model.glob("model-00001*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:keep])
    with pytest.raises(UserError, match=f"{shard.name} is damaged or truncated .*; download it again"):
        read_weight_map(model)


def test_missing_shard(model):
    shard = next(model.glob("model-00001*.safetensors"))
    shard.unlink()
    with pytest.raises(UserError, match=f"names {shard.name}, which is not there"):
        read_weight_map(model)


def test_index_of_another_model(model):
    index = model / "model.safetensors.index.json"
    record = json.loads(index.read_text())
    record["weight_map"]["model.extra.weight"] = record["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"places model\.extra\.weight in .*, which does not hold it"):
        read_weight_map(model)


@pytest.mark.parametrize("content", ["{}", '{"weight_map": 3}', "[]"])
def test_index_without_a_map(model, content):
    (model / "model.safetensors.index.json").write_text(content)
    with pytest.raises(UserError, match="has no weight_map"):
        read_weight_map(model)


def test_index_cannot_lead_out_of_the_folder(model, make_llama):
    shutil.copy(make_llama() / "model.safetensors", model.parent / "outside.safetensors")
    index = {"weight_map": {"lm_head.weight": "../outside.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"names outside.safetensors, which is not there"):
        read_weight_map(model)


def test_pickled_weights_are_refused(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"weights only as pytorch_model.bin; save them as safetensors first"):
        read_weight_map(tmp_path)


def test_no_weights(tmp_path):
    with pytest.raises(UserError, match="has no weights"):
        read_weight_map(tmp_path)


def test_hub_ids(tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path)
    assert all(map(may_be_hub_id, ("gpt2", "meta-llama/Llama-3.2-1B")))
    assert not any(map(may_be_hub_id, ("./gone", "/gone", "~/gone", "a/b/c", "out/gone", "gone/")))
