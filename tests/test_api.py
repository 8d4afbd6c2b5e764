"""The Python API does what the commands do."""

import json
from pathlib import Path

import pytest

import moh_llm
from moh_llm.training.config import LoraConfig, TrainConfig

RECIPE = """
model: {model}
output_dir: {output}
max_steps: 1
mixed_precision: "no"
data: {{mixture: {mixture}, batch_size: 2, micro_batch_size: 2, sequence_length: 32}}
schedule: {{warmup_steps: 0}}
evaluation: {{eval_steps: 0, max_tokens: 128}}
"""


@pytest.fixture(scope="module")
def base(make_llama) -> Path:
    return make_llama(max_position_embeddings=64)


@pytest.fixture(scope="module")
def moh(base, river, tmp_path_factory) -> Path:
    """Converted by the API with text, counts and rule of the defaults."""
    folder = tmp_path_factory.mktemp("api") / "moh"
    record = moh_llm.convert(base, folder, calibration=river, calibration_tokens=1024, heldout_tokens=256)
    assert record.content() == json.loads((folder / "conversion.json").read_text())
    assert record.plan.preset is None and record.verification.all_heads_active.equals_base
    return folder


def test_command_and_api_convert_alike(moh, base, convert, tmp_path, read_tensors) -> None:
    assert convert(base, tmp_path / "command") == 0
    found, expected = read_tensors(tmp_path / "command"), read_tensors(moh)
    assert any("router" in name for name in expected)
    assert found.keys() == expected.keys() and all(found[name].equal(expected[name]) for name in found)


def test_train(moh, river, tmp_path) -> None:
    (tmp_path / "mixture.yaml").write_text(f"name: river\nsources: {{river: {{weight: 1, files: {river}}}}}\n")
    recipe, output = tmp_path / "recipe.yaml", tmp_path / "run"
    recipe.write_text(RECIPE.format(model=moh, output=tmp_path / "other", mixture=tmp_path / "mixture.yaml"))
    record = moh_llm.train(recipe, output_dir=output, **{"optimizer.learning_rate": 1e-4})
    assert (record.status, record.config["optimizer"]["learning_rate"]) == ("finished", 1e-4)
    assert record.content() == json.loads((output / "run.json").read_text())
    assert (output / "model" / "README.md").is_file() and not (tmp_path / "other").exists()


def test_options_replace_those_of_a_config_too(monkeypatch) -> None:
    monkeypatch.setattr("moh_llm.training.loop.train", lambda config, *_, **__: config)
    config = TrainConfig(model="moh", output_dir="run", max_steps=2, lora=LoraConfig(rank=4), report_to=("wandb",))
    assert moh_llm.train(config) == config
    changed = moh_llm.train(config, max_steps=5, **{"lora.alpha": 8.0, "data": {"batch_size": 2}})
    assert (changed.max_steps, changed.lora, changed.data.batch_size) == (5, LoraConfig(rank=4, alpha=8.0), 2)
    assert changed.report_to == ("wandb",) and config.max_steps == 2


def test_evaluate(moh, base, tmp_path, unrendered) -> None:
    pytest.importorskip("lm_eval")
    options = {"base": base, "suite": "smoke", "limit": 2, "device": "cpu", "analysis": False}
    evaluation = moh_llm.evaluate(moh, output_dir=tmp_path / "report", **options)
    assert evaluation.failed_benchmarks == [] and evaluation.partial is None
    assert (tmp_path / "report" / "report.html").is_file()
