"""A model's folder: weights are checked before they are loaded, and what identifies a model."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from moh_llm.conversion.base import locate
from moh_llm.data.tokenizer import open_tokenizer, rows_beside
from moh_llm.errors import UserError
from moh_llm.evaluation.models import check_model
from moh_llm.modeling import MoHLlamaConfig
from moh_llm.records.identity import hash_plan, hash_weights, identify
from moh_llm.records.model import may_be_hub_id, read_weight_map


@pytest.fixture
def model(make_llama, tmp_path) -> Path:
    return Path(shutil.copytree(make_llama(max_shard_size="20KB"), tmp_path / "model"))


@pytest.mark.parametrize("keep", [0, 4, 5000])
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


def test_pickled_weights_are_refused(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"weights only as pytorch_model.bin; save them as safetensors first"):
        read_weight_map(tmp_path)


def test_hub_ids(tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path)
    assert all(map(may_be_hub_id, ("gpt2", "meta-llama/Llama-3.2-1B")))
    assert not any(map(may_be_hub_id, ("./gone", "/gone", "~/gone", "a/b/c", "out/gone", "gone/", "BASE", "FOLDER")))
    for ask in (locate, check_model, open_tokenizer, rows_beside):  # without a request to the Hub
        with pytest.raises(UserError, match="folder BASE does not exist; name a model's folder or a Hub id"):
            ask("BASE")


def test_hashes_follow_tensors_and_identities_their_settings(make_llama, tmp_path):
    whole, parts = make_llama(), make_llama(max_shard_size="20KB")
    assert hash_weights(whole) == hash_weights(parts) and identify(str(whole)) == identify(str(parts))
    other = Path(shutil.copytree(whole, tmp_path / "other"))
    (other / "README.md").write_text("a model")
    assert identify(str(other)) == identify(str(whole))
    (other / "tokenizer_config.json").write_text("{}")
    assert identify(str(other)).sha256 != identify(str(whole)).sha256
    assert identify(str(other)).weights == identify(str(whole)).weights
    tensors = load_file(other / "model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    assert identify(str(other)).weights != identify(str(whole)).weights
    assert hash_weights(other).routing == hash_weights(whole).routing


@pytest.mark.parametrize(
    "other", [{"num_active_heads": [3, 4]}, {"router_type": "linear"}, {"local_window": 12}, {"rms_norm_eps": 1e-3}]
)
def test_the_plan_tells_models_of_the_same_weights_apart(tmp_path, other):
    fields = {"num_attention_heads": 4, "num_hidden_layers": 2, "num_shared_heads": 1, "num_active_heads": 3}
    fields |= {"router_type": "threshold", "head_fallback": "local", "local_window": 8}
    for name, more in (("one", {}), ("same", {"num_active_heads": [3, 3]}), ("other", other)):
        MoHLlamaConfig(**(fields | more)).save_pretrained(tmp_path / name)
    assert hash_plan(tmp_path / "one") == hash_plan(tmp_path / "same") != hash_plan(tmp_path / "other")
