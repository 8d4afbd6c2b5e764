"""Adapters over weights of 4 bits (QLoRA), and the attention that a recipe may ask for."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from trained import read_log

from moh_llm.errors import UserError
from moh_llm.modeling import MoHLlamaForCausalLM
from moh_llm.records.tensors import is_routing_weight
from moh_llm.training import networks, precision
from moh_llm.training.loop import train

QLORA = {"quantization": "nf4", "lora.rank": 4}
SIZES = {"hidden_size": 64, "intermediate_size": 128}  # bitsandbytes needs multiples of 64 on a CPU
needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)


@pytest.fixture(scope="session")
def wide_folder(made_once, make_llama, convert) -> Path:
    """A LLaMA of those sizes with a linear router, which is trained in passes this short; not to be changed."""
    flags = ["--fallback", "value", "--num-active-heads", "2", "--heldout-tokens", "0"]
    base = make_llama(max_position_embeddings=64, tie_word_embeddings=True, **SIZES)
    return made_once("wide", lambda folder: convert(base, folder, *flags))


@pytest.fixture
def configure_wide(configure, wide_folder: Path):
    """`configure` with adapters over that model in 4 bits."""
    return lambda **keys: configure(model=str(wide_folder), **QLORA | keys)


@needs_bitsandbytes
def test_the_linear_maps_alone_are_quantized(configure_wide, wide_folder: Path) -> None:
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Params4bit

    whole = MoHLlamaForCausalLM.from_pretrained(wide_folder).state_dict()
    student = networks.make_student(configure_wide())
    found = dict(student.get_base_model().named_parameters())
    quantized = {name.replace(".base_layer", ""): w for name, w in found.items() if isinstance(w, Params4bit)}
    maps = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert quantized.keys() == {name for name in whole if name.endswith(tuple(f"{part}.weight" for part in maps))}
    for name, weight in quantized.items():
        assert weight.quant_state.quant_type == "nf4" and networks.full_shape(weight) == whole[name].shape
        near = dequantize_4bit(weight.data, weight.quant_state)
        assert 0.01 < float((near - whole[name]).norm() / whole[name].norm()) < 0.2, name
    for name, weight in found.items():
        if name in whole and name not in quantized:
            assert torch.equal(weight, whole[name]), name  # embedding, norms, routers, fallbacks
    trained = networks.trained_weights(student)
    assert all("lora_" in name or is_routing_weight(name) for name in trained)
    assert any("fallback" in name for name in trained)


@pytest.mark.slow
@needs_bitsandbytes
def test_the_loss_falls_and_adapters_are_merged_into_the_whole_weights(
    configure_wide, wide_folder: Path, read_tensors
) -> None:
    rates = {"optimizer.learning_rate": 2e-3, "checkpoint.save_steps": 12}
    config = configure_wide(max_steps=24, **{"evaluation.eval_steps": 12, **rates})
    record = train(config)
    log = [line for line in read_log(Path(config.output_dir)) if "loss" in line]
    assert sum(line["loss"] for line in log[-4:]) < 0.95 * sum(line["loss"] for line in log[:4])
    before, after = read_tensors(wide_folder), read_tensors(Path(config.output_dir) / "model")
    last = load_file(Path(config.output_dir) / "checkpoints" / "step-000024" / "model.safetensors")
    assert after.keys() == before.keys()
    for name, weight in after.items():
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{stem}.lora_A.default.weight" in last:
            a, b = (last[f"{stem}.lora_{letter}.default.weight"] for letter in "AB")
            assert b.abs().max() > 0
            torch.testing.assert_close(weight, before[name] + 32 / 4 * b @ a, atol=1e-6, rtol=1e-5)
        elif (trained := last.get(f"base_model.model.{name}")) is not None:
            assert torch.equal(weight, trained), name
        else:
            assert torch.equal(weight, before[name]), name
    assert "quantization_config" not in (Path(config.output_dir) / "model" / "config.json").read_text()
    # The totals are of weights, not of the bytes that hold them.
    student = networks.make_student(replace(config, quantization=None))
    assert record.parameters["total"] == sum(weight.numel() for weight in student.parameters())


@needs_bitsandbytes
def test_a_cpu_that_would_misread_the_weights_is_refused(configure) -> None:
    with pytest.raises(UserError, match="q_proj, whose 32 inputs are not a multiple of 64"):
        train(configure(**QLORA))


def test_what_cannot_be_quantized_is_refused(configure, monkeypatch) -> None:
    with pytest.raises(UserError, match="quantization=nf4 needs adapters"):
        configure(quantization="nf4")
    with pytest.raises(UserError, match="quantization=int8 must be"):
        configure(quantization="int8")
    for strategy in ("DEEPSPEED", "FSDP"):
        with monkeypatch.context() as patch:
            patch.setenv(f"ACCELERATE_USE_{strategy}", "true")
            with pytest.raises(UserError, match=f"quantization and {strategy}: .* take ddp or one process"):
                train(configure(**QLORA))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="quantization=nf4 needs bitsandbytes; pip install"):
        train(configure(**QLORA))


CUDA, CPU = torch.device("cuda"), torch.device("cpu")
LACKS = [
    ("flash_attention_2", CPU, {}, "needs a CUDA device"),
    ("flash_attention_3", CUDA, {}, "needs the package flash-attn-3; install it"),
    ("flash_attention_2", CUDA, {"mixed_precision": "no"}, "computes in bfloat16; set mixed_precision to bf16"),
    ("flash_attention_2", CUDA, {"data.micro_batch_size": 2}, "one sequence only; set data.micro_batch_size to 1"),
]


@pytest.mark.parametrize(("name", "device", "keys", "message"), LACKS)
def test_attention_that_cannot_be_had_is_refused(configure, monkeypatch, name, device, keys, message) -> None:
    monkeypatch.setitem(precision.FLASH, "flash_attention_2", (lambda: True, "flash-attn"))
    monkeypatch.setitem(precision.FLASH, "flash_attention_3", (lambda: False, "flash-attn-3"))
    recipe = {"mixed_precision": "bf16", "data.micro_batch_size": 1}
    for allowed in ("sdpa", "flash_attention_2"):
        precision.check_attention(configure(attn_implementation=allowed, **recipe), CUDA)
    with pytest.raises(UserError, match=f"attn_implementation={name} .*{message}"):
        precision.check_attention(configure(attn_implementation=name, **recipe | keys), device)
