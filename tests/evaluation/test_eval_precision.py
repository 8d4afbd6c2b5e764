"""All models of a report are computed in one dtype, stated in it, and the same in reports that are compared."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moh_llm.evaluation.models import stored_dtype

Record = dict[str, Any]
MODELS = {"base": ("dense", 1.0), "model": ("moh", 0.9)}


@pytest.fixture
def in_dtype(tiny_llama: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the tiny LLaMA whose matrices, and vectors if another is named, are stored in a dtype."""

    def make(matrices: torch.dtype, vectors: torch.dtype | None = None, said: str | None = "float32") -> Path:
        folder = Path(shutil.copytree(tiny_llama, tmp_path / f"{matrices} {vectors} {said}"))
        weights = load_file(folder / "model.safetensors")
        stored = {name: t.to(matrices if t.dim() > 1 else vectors or matrices) for name, t in weights.items()}
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"dtype": said}))
        return folder

    return make


def test_the_stored_dtype_is_that_of_the_matrices(in_dtype: Callable[..., Path]) -> None:
    """Not what the config says, and not that of norms or rotary frequencies."""
    assert stored_dtype(str(in_dtype(torch.bfloat16))) == "bfloat16"
    assert stored_dtype(str(in_dtype(torch.bfloat16, vectors=torch.float32))) == "bfloat16"
    assert stored_dtype(str(in_dtype(torch.float16, vectors=torch.float16))) == "float16"
    one_wide = in_dtype(torch.bfloat16, said="bfloat16")
    weights = load_file(one_wide / "model.safetensors")
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"].float()
    save_file(weights, one_wide / "model.safetensors", metadata={"format": "pt"})
    assert stored_dtype(str(one_wide)) == "float32"


@pytest.mark.slow
def test_models_are_computed_in_the_devices_dtype(
    tiny_llama: Path,
    convert: Callable[..., int],
    tmp_path: Path,
    run_evaluate: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("lm_eval")
    from moh_llm.evaluation import runner

    loaded: list[str] = []
    whole = runner.run_benchmark
    monkeypatch.setattr(
        runner, "run_benchmark", lambda lm, *rest: (loaded.append(str(lm.model.dtype)), whole(lm, *rest))[1]
    )
    assert convert(tiny_llama, tmp_path / "moh", "--heldout-tokens", "0", "--dtype", "bfloat16") == 0
    capsys.readouterr()
    words = [tmp_path / "moh", "--base", tiny_llama, "--suite", "smoke", "--limit", "1", "--device", "cpu"]
    words += ["--no-analysis"]
    monkeypatch.setenv("MOH_LLM_COMPUTE_DTYPE", "bfloat16")
    assert run_evaluate(*words, "--output", tmp_path / "report") == 0
    assert loaded == ["torch.bfloat16"] * 6
    assert "compute dtype: bfloat16 for every model" in capsys.readouterr().err
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert report["dtype"] == "bfloat16"
    stored = [(about["dtype"], about["stored_dtype"]) for about in report["models"].values()]
    assert stored == [("bfloat16", "float32"), ("bfloat16", "bfloat16")]
    page = (tmp_path / "report" / "report.md").read_text()
    assert "| computed in | bfloat16 | bfloat16 |" in page and "| stored in | float32 | bfloat16 |" in page
