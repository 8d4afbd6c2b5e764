"""Models are looked at before anything slow begins."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from records import warnings
from safetensors.torch import load_file, save_file

from moh_llm.errors import UserError
from moh_llm.evaluation.config import EvaluationConfig
from moh_llm.evaluation.evaluate import evaluate
from moh_llm.evaluation.models import check_model, label_models, other_base
from moh_llm.evaluation.record import build_record
from moh_llm.evaluation.runner import ModelScores
from moh_llm.evaluation.suite import load_suite
from moh_llm.records.identity import Identity, read_records


@pytest.fixture
def model(tiny_llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_llama, tmp_path / "model"))


def _cut(weights: Path) -> None:
    weights.write_bytes(weights.read_bytes()[:5000])


@pytest.mark.parametrize(
    ("files", "damage", "message"),
    [
        ("config.json", Path.unlink, "holds no config.json; name a model's folder"),
        ("tokenizer*", Path.unlink, "has no tokenizer"),
        ("model.safetensors", _cut, r"model\.safetensors is damaged or truncated"),
    ],
)
def test_a_folder_that_is_not_whole(model: Path, files: str, damage: Callable[[Path], None], message: str) -> None:
    check_model(str(model))
    for file in model.glob(files):
        damage(file)
    with pytest.raises(UserError, match=message):
        check_model(str(model))


def _change(
    model: Path, tensors: Callable[[dict[str, torch.Tensor]], object] = lambda held: None, **fields: object
) -> None:
    held = load_file(model / "model.safetensors")
    tensors(held)
    save_file(held, model / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | fields))


def test_weights_that_transformers_would_make_up(model: Path) -> None:
    _change(model, attention_bias=True)
    with pytest.raises(UserError, match=r"the weights lack model\.layers\.0\.self_attn\.k_proj\.bias"):
        check_model(str(model))
    _change(model, lambda held: held.pop("model.norm.weight"), attention_bias=False)
    with pytest.raises(UserError, match=r"the weights lack model\.norm\.weight"):
        check_model(str(model))


def test_an_adapter_is_not_scored_as_the_model(model: Path) -> None:
    (model / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"holds an adapter"):
        check_model(str(model))


def test_tensors_and_settings_that_transformers_ignores_are_no_reason_to_refuse(model: Path) -> None:
    extra = {"model.layers.0.self_attn.k_scale": torch.ones(())}
    _change(model, lambda held: held.update(extra), return_dict=False, _attn_implementation="flash_attention_2")
    check_model(str(model))


def test_labels_are_the_shortest_that_differ(tmp_path: Path) -> None:
    for name in ("a/model", "b/model", "c/plain", "c/base"):
        (tmp_path / name).mkdir(parents=True)
    folder = str(tmp_path)
    assert label_models([f"{folder}/c/plain"], None) == {"model": f"{folder}/c/plain"}
    models = [f"{folder}/a/model", f"{folder}/b/model/", f"{folder}/c/plain", f"{folder}/c/base", "owner/llama"]
    labels = label_models(models, "owner/base")
    assert list(labels) == ["base", "a-model", "b-model", "plain", "c-base", "llama"]
    assert list(labels.values()) == ["owner/base", *models]
    with pytest.raises(UserError, match="is given twice"):
        label_models([folder, f"{folder}/"], None)


def test_options_of_models_of_images_are_refused(tiny_llama: Path, tmp_path: Path) -> None:
    config = EvaluationConfig(str(tiny_llama), suite="smoke", output_dir=tmp_path / "report", samples=4)
    with pytest.raises(UserError, match=r"^samples have no meaning for language models; leave them out"):
        evaluate(config)
    assert not (tmp_path / "report").exists()


def test_another_base_than_the_conversion_names_is_told(tiny_llama: Path, tiny_moh: Path, make_llama, tmp_path) -> None:
    other, moved = make_llama(max_position_embeddings=2048), Path(shutil.copytree(tiny_llama, tmp_path / "moved"))
    assert other_base(read_records(tiny_moh), str(tiny_llama), None) is None
    assert other_base(read_records(tiny_moh), str(moved), None) is None
    assert other_base(read_records(tiny_moh), str(other), None) == tiny_llama.name
    assert other_base(read_records(tiny_moh), str(tiny_moh), None) == tiny_llama.name  # heads are off there
    assert other_base(read_records(tiny_moh), "org/base", "c" * 40) == tiny_llama.name
    assert other_base(read_records(tiny_llama), str(other), None) is None  # nothing is on record

    def told(base: Path) -> bool:
        models = {"base": str(base), "model": str(tiny_moh)}
        results = {
            label: ModelScores(model, Identity(label, label, None), records=read_records(Path(model)))
            for label, model in models.items()
        }
        report = build_record(load_suite("smoke"), results, EvaluationConfig(["model"]))
        line = f"NOT ITS BASE: model was converted from {tiny_llama.name}, and is compared with {base}."
        return line in warnings(report)

    assert told(other) and not told(moved)
