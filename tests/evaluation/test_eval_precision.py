"""All models of a report are run in one dtype, which is chosen, stated, and the same in reports that are compared."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moh_llm.evaluation.models import choose_dtype, stored_dtype

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


def test_without_floating_weights_the_config_tells(in_dtype: Callable[..., Path]) -> None:
    """As on the Hub, whose weights are not read before they are loaded."""
    for said, dtype in (("bfloat16", "bfloat16"), (None, "float32"), ("int8", "float32")):
        assert stored_dtype(str(in_dtype(torch.int8, vectors=torch.float32, said=said))) == dtype


def test_auto_is_the_widest_of_all(in_dtype: Callable[..., Path]) -> None:
    half, brain, full = (str(in_dtype(dtype)) for dtype in (torch.float16, torch.bfloat16, torch.float32))
    for models, dtype in (
        ({"base": brain, "model": brain}, "bfloat16"),
        ({"base": brain, "model": full}, "float32"),
        ({"base": full, "model": brain}, "float32"),
        ({"a": brain, "b": brain, "c": full}, "float32"),
        # Neither holds the other's numbers.
        ({"base": brain, "model": half}, "float32"),
    ):
        assert choose_dtype(models, "auto").dtype == dtype
    chosen = choose_dtype({"base": brain, "model": full}, "auto")
    assert str(chosen) == (
        "dtype: float32 for every model, the widest stored dtype (stored: base bfloat16, model float32)"
    )
    asked = choose_dtype({"base": brain, "model": full}, "float16")
    assert str(asked) == "dtype: float16 for every model, as asked (stored: base bfloat16, model float32)"


def test_a_bfloat16_model_beside_a_float32_base_is_run_in_float32(
    tiny_llama: Path,
    convert: Callable[..., int],
    tmp_path: Path,
    run_evaluate: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("lm_eval")
    from moh_llm.analysis import record
    from moh_llm.evaluation import runner

    loaded: list[str] = []
    whole = runner.run_benchmark
    monkeypatch.setattr(
        runner,
        "run_benchmark",
        lambda lm, *rest: (loaded.append(str(next(lm.model.parameters()).dtype)), whole(lm, *rest))[1],
    )
    monkeypatch.setattr(
        record,
        "analyse",
        lambda model, *rest, **more: (loaded.append(f"analysis in {model.dtype}"), {"error": "left out"})[1],
    )
    assert convert(tiny_llama, tmp_path / "moh", "--verify", "none", "--dtype", "bfloat16") == 0
    capsys.readouterr()
    words = [tmp_path / "moh", "--base", tiny_llama, "--suite", "smoke", "--limit", "1", "--device", "cpu"]
    assert run_evaluate(*words, "--output", tmp_path / "report") == 0
    assert loaded == ["torch.float32"] * 6 + ["analysis in torch.float32"]
    said = "dtype: float32 for every model, the widest stored dtype (stored: base float32, model bfloat16)"
    assert capsys.readouterr().err.count(said) == 1
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert report["dtype"] == "float32" and "NOT COMPARABLE: --limit" in (tmp_path / "report" / "report.md").read_text()
    assert [(about["dtype"], about["stored_dtype"]) for about in report["models"].values()] == [
        ("float32", "float32"),
        ("float32", "bfloat16"),
    ]
    page = (tmp_path / "report" / "report.md").read_text()
    assert "| stored in | float32 | bfloat16 |" in page and "Every model was run in float32." in page
    html = (tmp_path / "report" / "report.html").read_text()
    assert (
        "<td>dtype of every model</td><td>float32</td>" in html
        and "<td>stored in</td><td>float32</td><td>bfloat16</td>" in html
    )
