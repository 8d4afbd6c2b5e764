"""Broken and hostile files of models and recipes: each is refused in one line, before any work."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from moh_llm.cli import main

DEEP = "[" * 100_000 + "]" * 100_000
LAUGHS = "a: &a [x, x]\nb: [*a, *a]\n"


@pytest.fixture
def base(tmp_path: Path, make_llama: Callable[..., Path]) -> Path:
    """A tiny LLaMA, to be broken."""
    return Path(shutil.copytree(make_llama(), tmp_path / "base"))


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command that must end with status 2 and one line; returns the line."""

    def run(*arguments: object) -> str:
        assert main([str(argument) for argument in arguments]) == 2
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, lines
        return lines[0]

    return run


def convert(base: Path, *flags: object) -> tuple[object, ...]:
    return ("convert", base, "--preset", "paper", "--heldout-tokens", "0", "--output-dir", base.parent / "moh", *flags)


def edit(path: Path, **fields: Any) -> None:
    """Change fields of a JSON file; NaN and infinity as Python writes them."""
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_attention_heads", -4),
        ("num_key_value_heads", 3),
        ("num_hidden_layers", 10**7),
        ("hidden_size", "32"),
        ("rms_norm_eps", float("nan")),
        ("rope_theta", float("inf")),
        ("dtype", "float7"),
        ("pad_token_id", 10**6),
    ],
)
def test_numbers_that_no_model_has(base: Path, refused: Callable[..., str], field: str, value: Any) -> None:
    edit(base / "config.json", **{field: value})
    line = refused(*convert(base))
    assert "config.json" in line and field in line


@pytest.mark.parametrize("name", ["evaluate", "publish", "train"])
def test_every_command_checks_a_config(base: Path, refused: Callable[..., str], name: str) -> None:
    edit(base / "config.json", model_type="moh_llama", num_attention_heads=-4)
    words = {
        "evaluate": (base, "--suite", "smoke", "--no-analysis", "--output-dir", base.parent / "report"),
        "publish": (base, "--repo-id", "me/moh", "--licence", "mit", "--dry-run"),
        "train": (_recipe(base),),
    }
    assert "num_attention_heads = -4" in refused(name, *words[name])


def _recipe(converted: Path, **keys: Any) -> Path:
    path, output = converted.parent / "recipe.yaml", converted.parent / "run"
    path.write_text(yaml.safe_dump({"model": str(converted), "output_dir": str(output), "max_steps": 4} | keys))
    return path


@pytest.mark.parametrize("content", [DEEP, "[1]"], ids=["deep", "list"])
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_files_that_are_no_objects(base: Path, refused: Callable[..., str], name: str, content: str) -> None:
    (base / name).write_text(content)
    assert name in refused("convert", base, "--output-dir", base.parent / "moh", "--heldout-tokens", "0")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_pipe_is_not_waited_for(base: Path, refused: Callable[..., str], name: str) -> None:
    (base / name).unlink()
    os.mkfifo(base / name)
    assert "is not a regular file" in refused(
        "convert", base, "--output-dir", base.parent / "moh", "--heldout-tokens", "0"
    )


@pytest.mark.parametrize("file", [7, "a\0b", "../model.safetensors"])
def test_an_index_that_names_no_files(base: Path, refused: Callable[..., str], file: Any) -> None:
    names = load_file(base / "model.safetensors")
    (base / "model.safetensors").rename(base.parent / "model.safetensors")  # which transformers would prefer
    (base / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, file)}))
    assert "model.safetensors.index.json" in refused(*convert(base))


def test_weights_that_are_no_floats(base: Path, refused: Callable[..., str]) -> None:
    tensors = load_file(base / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj.weight"
    save_file(tensors | {name: tensors[name].to(torch.int32)}, base / "model.safetensors")
    assert f"{name} holds" in refused(*convert(base))


def test_norms_that_overflow(base: Path, refused: Callable[..., str], river: Path) -> None:
    tensors = load_file(base / "model.safetensors")
    for name in tensors:
        if name.endswith("layernorm.weight"):
            tensors[name].fill_(1e38)
    save_file(tensors, base / "model.safetensors")
    flags = ["--calibration", river, "--calibration-tokens", 256, "--heldout-tokens", 128]
    assert "not finite" in refused("convert", base, "--output-dir", base.parent / "moh", *flags)


def test_a_tokenizer_with_ids_beyond_the_embedding(base: Path, refused: Callable[..., str]) -> None:
    content = json.loads((base / "tokenizer.json").read_text())
    content["model"]["vocab"]["a"] = 10**9
    (base / "tokenizer.json").write_text(json.dumps(content))
    assert "id 1000000000" in refused("convert", base, "--output-dir", base.parent / "moh", "--heldout-tokens", "0")


@pytest.mark.parametrize("reader", ["recipe", "mixture", "suite", "architecture"])
def test_all_yaml_is_read_within_bounds(tmp_path: Path, refused: Callable[..., str], base: Path, reader: str) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(LAUGHS)
    commands = {
        "recipe": ("train", path),
        "mixture": ("mixture", "show", path),
        "suite": ("evaluate", base, "--suite", path, "--output-dir", tmp_path / "report"),
        "architecture": ("init", path, "--tokenizer", base, "--output-dir", tmp_path / "initial"),
    }
    assert "aliases are not supported" in refused(*commands[reader])


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"optimizer": {"learning_rate": float("inf")}}, "optimizer.learning_rate"),
        ({"checkpoint": {"save_steps": 0}}, "checkpoint.save_steps"),
        ({"output_dir": "a" * 5000}, "too long"),
    ],
)
def test_recipes_that_cannot_be_carried_out(
    base: Path, refused: Callable[..., str], keys: dict[str, Any], words: str
) -> None:
    assert main([str(word) for word in convert(base)]) == 0
    assert words in refused("train", _recipe(base.parent / "moh", **keys))
    assert not (base.parent / "run").exists()


def test_a_benchmark_with_a_name_that_no_file_bears(tmp_path: Path, base: Path, refused: Callable[..., str]) -> None:
    from moh_llm.evaluation.suite import SUITES

    suite = yaml.safe_load((SUITES / "smoke.yaml").read_text())
    suite["benchmarks"][0]["name"] = "n" * 300
    (tmp_path / "suite.yaml").write_text(yaml.safe_dump(suite))
    assert "at most 120 characters" in refused("evaluate", base, "--suite", tmp_path / "suite.yaml")
