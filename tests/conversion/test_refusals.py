"""What conversion refuses: one line that names the fault, exit status 2, and nothing left behind."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moh_llm.cli import main


def edit_config(**fields: object) -> Callable[[Path, Path], list[str]]:
    """Changes fields of the base's config."""

    def edit(base: Path, tmp_path: Path) -> list[str]:
        config = json.loads((base / "config.json").read_text())
        (base / "config.json").write_text(json.dumps(config | fields))
        return []

    return edit


def _nan(base: Path, tmp_path: Path) -> list[str]:
    tensors = load_file(base / "model.safetensors")
    tensors[Q_PROJ].view(-1)[7] = torch.nan
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    return []


def _truncate(base: Path, tmp_path: Path) -> list[str]:
    data = (base / "model.safetensors").read_bytes()
    (base / "model.safetensors").write_bytes(data[: len(data) // 2])
    return []


def _drop_tensor(base: Path, tmp_path: Path) -> list[str]:
    tensors = load_file(base / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    return []


def _drop_tokenizer(base: Path, tmp_path: Path) -> list[str]:
    for path in base.glob("tokenizer*"):
        path.unlink()
    return []


def _short_text(base: Path, tmp_path: Path) -> list[str]:
    (tmp_path / "short.txt").write_text("A few words.")
    return ["--calibration", str(tmp_path / "short.txt")]


GPT2 = edit_config(model_type="gpt2", architectures=["GPT2LMHeadModel"])
# MistralConfig's own default, 4096, holds where config.json says nothing.
OLD_MISTRAL = edit_config(model_type="mistral", architectures=["MistralForCausalLM"])
QWEN2 = edit_config(
    model_type="qwen2",
    architectures=["Qwen2ForCausalLM"],
    use_sliding_window=True,
    sliding_window=64,
    max_window_layers=0,
)
REMOTE = edit_config(auto_map={"AutoModelForCausalLM": "modeling_llama.LlamaForCausalLM"})
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def _too_large(base: Path, tmp_path: Path) -> list[str]:
    tensors = load_file(base / "model.safetensors")
    tensors[Q_PROJ].view(-1)[7] = -1e5
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    return ["--dtype", "float16", "--preset", "paper", "--heldout-tokens", "0"]


BAD_INPUT = {
    "truncated": (_truncate, "model.safetensors is damaged or truncated"),
    "missing tensor": (_drop_tensor, "the weights lack model.layers.1.mlp.up_proj.weight"),
    "NaN": (_nan, f"model.safetensors: {Q_PROJ} holds NaN or infinity"),
    "beyond float16": (_too_large, f"{Q_PROJ} has a value of 100000, which float16 cannot hold"),
    "other size": (edit_config(intermediate_size=96), "has shape [32, 64], config.json asks for [32, 96]"),
    "no head count": (edit_config(num_attention_heads=None), "config.json gives no number for num_attention_heads"),
    "architecture": (GPT2, "model_type 'gpt2' cannot be converted; these can: llama, mistral"),
    "quantised": (edit_config(quantization_config={"quant_method": "gptq"}), "weights are quantised"),
    "sliding window by default": (OLD_MISTRAL, "sliding_window=4096 is not supported"),
    "sliding window in use": (QWEN2, "sliding_window=64 is not supported"),
    "attention both ways": (edit_config(is_causal=False), "is_causal=False is not supported"),
    "code of its own": (REMOTE, "auto_map names code of its own"),
    "of a later version": (
        edit_config(model_type="moh_llama", moh_format=7),
        "moh_format=7 is newer than moh-llm reads (6); update it",
    ),
    "no tokenizer": (_drop_tokenizer, "has no tokenizer that loads"),
    "short text": (_short_text, "fewer than one window"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_line_and_leaves_nothing(make_llama, convert, tmp_path, capsys, case):
    spoil, message = BAD_INPUT[case]
    base = make_llama()
    given = spoil(base, tmp_path)
    before = [sorted(folder.rglob("*")) for folder in (base, tmp_path)]
    assert convert(base, tmp_path / "moh", *given) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and message in error, error
    assert [sorted(folder.rglob("*")) for folder in (base, tmp_path)] == before


def test_the_way_back_takes_a_moh_model_and_no_options(make_llama, convert, tmp_path, capsys):
    base = make_llama()
    assert main(["convert", str(base), "--to-dense", "--output-dir", str(tmp_path / "dense")]) == 2
    assert "is no MoH model (model_type 'llama'): it is dense already" in capsys.readouterr().err
    assert convert(base, tmp_path / "moh", "--preset", "paper", "--heldout-tokens", "0") == 0
    arguments = ["convert", str(tmp_path / "moh"), "--to-dense", "--output-dir", str(tmp_path / "dense")]
    for option, value in (("dtype", "bfloat16"), ("routing_granularity", "kv_group")):
        assert main([*arguments, f"--{option}", value]) == 2
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert error.startswith("error: ") and option in error
    assert [path.name for path in tmp_path.iterdir()] == ["moh"]
