"""The Python API and the scripts in the root do what the commands do."""

import json
import runpy
import sys
from pathlib import Path

import pytest

import moh_llm

ROOT = Path(__file__).resolve().parents[1]
RECIPE = """
model: {model}
output_dir: {output}
max_steps: 1
mixed_precision: "no"
data: {{mixture: {mixture}, batch_size: 2, micro_batch_size: 2, sequence_length: 32}}
schedule: {{warmup_steps: 0}}
evaluation: {{eval_steps: 0, max_tokens: 128}}
"""


def run_script(name: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit status of a script of the root, run in this process."""
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *words])
    monkeypatch.setattr(sys, "path", [*sys.path])  # which evaluate.py changes
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / f"{name}.py"), run_name="__main__")
    return int(ended.value.code or 0)


@pytest.fixture(scope="module")
def base(make_llama) -> Path:
    return make_llama(max_position_embeddings=64)


@pytest.fixture(scope="module")
def moh(base, river, tmp_path_factory) -> Path:
    """Converted by the API with text, counts and rule of the defaults."""
    folder = tmp_path_factory.mktemp("api") / "moh"
    record = moh_llm.convert(base, folder, calibration=river, calibration_tokens=1024, heldout_tokens=256)
    assert record.content() == json.loads((folder / "conversion.json").read_text())
    assert record.plan.router_type == "linear" and record.verification.all_heads_active.equals_base
    return folder


def test_command_script_and_api_convert_alike(moh, base, convert, river, tmp_path, read_tensors, monkeypatch) -> None:
    assert convert(base, tmp_path / "command") == 0
    words = [str(base), "--output", str(tmp_path / "script"), "--calibration", str(river)]
    words += ["--calibration-tokens", "1024", "--heldout-tokens", "256"]
    assert run_script("convert", words, monkeypatch) == 0
    expected = read_tensors(moh)
    assert any("router" in name for name in expected)
    for folder in (tmp_path / "command", tmp_path / "script"):
        found = read_tensors(folder)
        assert found.keys() == expected.keys() and all(found[name].equal(expected[name]) for name in found)
        assert (folder / "README.md").is_file()


@pytest.mark.parametrize("through", ["api", "script"])
def test_train(moh, river, tmp_path, through, monkeypatch) -> None:
    (tmp_path / "mixture.yaml").write_text(f"name: river\nsources: {{river: {{weight: 1, files: {river}}}}}\n")
    recipe, output = tmp_path / "recipe.yaml", tmp_path / "run"
    recipe.write_text(RECIPE.format(model=moh, output=tmp_path / "other", mixture=tmp_path / "mixture.yaml"))
    if through == "api":
        record = moh_llm.train(recipe, output_dir=output, **{"optimizer.learning_rate": 1e-4})
        assert (record.status, record.config["optimizer"]["learning_rate"]) == ("finished", 1e-4)
        assert record.content() == json.loads((output / "run.json").read_text())
    else:
        assert run_script("train", [str(recipe), "--output_dir", str(output)], monkeypatch) == 0
    assert (output / "model" / "README.md").is_file() and not (tmp_path / "other").exists()


def test_evaluate(moh, base, tmp_path, capsys, unrendered, monkeypatch) -> None:
    pytest.importorskip("lm_eval")
    options = {"base": base, "suite": "smoke", "limit": 2, "device": "cpu", "analysis": False}
    evaluation = moh_llm.evaluate(moh, output=tmp_path / "api", **options)
    assert evaluation.failed_benchmarks == [] and evaluation.partial is None
    flags = ["--base", str(base), "--suite", "smoke", "--limit", "2", "--device", "cpu", "--no-analysis"]
    assert run_script("evaluate", [str(moh), *flags, "--output", str(tmp_path / "script")], monkeypatch) == 0
    assert "report.html" in capsys.readouterr().out
    found = [json.loads((tmp_path / name / "report.json").read_text()) for name in ("api", "script")]
    assert found[0]["average"] == found[1]["average"]
