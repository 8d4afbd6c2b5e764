"""Conversion through the command: what is written, and that it loads anywhere."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, LlamaForCausalLM

from moh_llm.cli import main
from moh_llm.conversion.checkpoint import REMOTE_CODE
from moh_llm.hub.checks import list_files
from moh_llm.modeling import MoHLlamaForCausalLM

INDEX = "model.safetensors.index.json"


def record_of(folder: Path) -> dict:
    return json.loads((folder / "conversion.json").read_text())


def forbidden(*args: object, **kwargs: object) -> None:
    raise AssertionError("this was not to be called")


@pytest.mark.parametrize(("shards", "dtype"), [("20KB", torch.float32), ("1GB", torch.bfloat16)], ids=str)
def test_default_conversion(make_llama, convert, read_tensors, tmp_path, shards, dtype):
    base = make_llama(dtype=dtype, max_shard_size=shards, tie_word_embeddings=True)
    assert convert(base, tmp_path / "moh") == 0
    moh = MoHLlamaForCausalLM.from_pretrained(tmp_path / "moh")
    assert moh.dtype == dtype
    assert (moh.config.router_type, moh.config.head_fallback) == ("threshold", "local")
    assert sum(moh.config.active_heads_per_layer) == 6  # 3/4 of 2 layers of 4

    # The base's files are there byte for byte, and beside them one of routing tensors.
    files = sorted(path.name for path in (tmp_path / "moh").glob("*.safetensors"))
    originals = sorted(base.glob("*.safetensors"))
    assert len(files) == len(originals) + 1
    for original, name in zip(originals, files, strict=False):
        assert (tmp_path / "moh" / name).read_bytes() == original.read_bytes()
    routing = load_file(tmp_path / "moh" / files[-1])
    assert all(".self_attn.router." in name or ".self_attn.fallback." in name for name in routing)
    assert {tensor.dtype for tensor in routing.values()} == {dtype}
    written = read_tensors(tmp_path / "moh")
    index = json.loads((tmp_path / "moh" / INDEX).read_text())
    assert index["weight_map"].keys() == written.keys() == read_tensors(base).keys() | routing.keys()
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in written.values())
    assert not [path.name for path in (tmp_path / "moh").iterdir() if path.name.startswith(("hidden-states", "."))]


def test_uneven_budgets_sum_to_the_asked_total(make_llama, convert, tmp_path):
    """0.84 of 3 layers of 4 heads is 10.1: ten, which no even budget gives, saved where a layer hardly matters."""
    base = make_llama(num_hidden_layers=3)
    tensors = load_file(base / "model.safetensors")
    tensors["model.layers.1.self_attn.o_proj.weight"] *= 1e-4
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    assert convert(base, tmp_path / "moh", "--keys", "0.84", "--fallback", "value") == 0
    assert json.loads((tmp_path / "moh" / "config.json").read_text())["num_active_heads"] == [4, 2, 4]
    moh = MoHLlamaForCausalLM.from_pretrained(tmp_path / "moh")
    assert [router.top_k for router in moh.routers] == [3, 1, 3]


GROUPS = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 64, "num_hidden_layers": 3}


def test_whole_groups(make_llama, convert, tmp_path):
    """Every token has both heads of a group on or off."""
    flags = ["shared=importance", "--fallback", "value"]
    assert convert(make_llama(**GROUPS), tmp_path / "moh", "--routing-granularity", "kv_group", *flags) == 0
    moh = MoHLlamaForCausalLM.from_pretrained(tmp_path / "moh").eval()
    config, budgets = moh.config, moh.config.active_heads_per_layer
    assert (config.routing_granularity, config.moh_format) == ("kv_group", 2)
    assert sum(budgets) == 18 and not any(active % 2 for active in budgets)
    gates = []
    for router in moh.routers:
        router.register_forward_hook(lambda module, args, output: gates.append(output[1]))
    with torch.no_grad():
        moh(torch.arange(1, 60)[None])
    for gate, shared, active in zip(gates, config.shared_heads_per_layer, budgets, strict=True):
        assert torch.equal(gate[..., 0::2], gate[..., 1::2]) and (gate.sum(-1) == active).all()
        assert gate[..., shared].eq(1).all()
    assert record_of(tmp_path / "moh")["verification"]["all_heads_active"]["equals_base"] is True


def test_how_much_is_verified(make_llama, convert, tmp_path):
    base, text = make_llama(), tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"Story {n} of a river. " * 20}) + "\n" for n in range(500)))
    for kind, tokens in (("none", "0"), ("some", "2048")):
        flags = ["--calibration", str(text), "--heldout-tokens", tokens]
        assert convert(base, tmp_path / kind, *flags) == 0
    assert "verification" not in record_of(tmp_path / "none")
    proof = record_of(tmp_path / "some")["verification"]
    assert 1024 < proof["held_out_tokens"] <= 2048 and proof["all_heads_active"]["equals_base"] is True
    # What is verified has no part in the model.
    weights = [
        [path.read_bytes() for path in sorted((tmp_path / kind).glob("*.safetensors"))] for kind in ("none", "some")
    ]
    assert weights[0] == weights[1]


def test_paper_preset_adds_no_tensor_and_without_proof_reads_no_text(make_llama, tmp_path, monkeypatch):
    base = make_llama()
    for path in base.glob("tokenizer*"):
        path.unlink()
    monkeypatch.setattr("moh_llm.conversion.convert.sample_mixture", forbidden)
    monkeypatch.setattr("moh_llm.conversion.convert.calibrate", forbidden)
    arguments = [
        "convert",
        str(base),
        "--output-dir",
        str(tmp_path / "moh"),
        "--preset",
        "paper",
        "--heldout-tokens",
        "0",
    ]
    assert main(arguments) == 0
    assert record_of(tmp_path / "moh").keys() >= {"plan", "parameters"}
    assert (tmp_path / "moh" / "model.safetensors").read_bytes() == (base / "model.safetensors").read_bytes()
    assert not (tmp_path / "moh" / INDEX).exists()
    config = MoHLlamaForCausalLM.from_pretrained(tmp_path / "moh").config
    assert (config.num_shared_heads, config.num_active_heads, config.router_type) == (2, 3, "query_norm")
    assert (config.shared_heads, config.router_score, config.head_fallback) == (None, "quantized", "none")


def test_importance_and_dtype(make_llama, convert, tmp_path):
    base = make_llama()
    flags = ["shared=importance", "--num-shared-heads", "2", "--dtype", "bfloat16"]
    assert convert(base, tmp_path / "moh", *flags) == 0
    moh = MoHLlamaForCausalLM.from_pretrained(tmp_path / "moh")
    assert moh.dtype == torch.bfloat16
    assert [len(ids) for ids in moh.config.shared_heads_per_layer] == [2, 2]
    cast = LlamaForCausalLM.from_pretrained(base, dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(moh.state_dict()[name], tensor) for name, tensor in cast.items())
    record = record_of(tmp_path / "moh")
    assert record["compute_dtype"] == record["verification"]["dtype"] == "float32"


def test_the_compute_dtype_is_not_the_stored_one(make_llama, convert, tmp_path, read_tensors, capsys):
    """A base in bfloat16 is fitted in float32, as the same weights in float32 are; what is written is rounded."""
    narrow = make_llama(dtype=torch.bfloat16, num_attention_heads=4, num_key_value_heads=2)
    wide = tmp_path / "wide"
    shutil.copytree(narrow, wide)
    LlamaForCausalLM.from_pretrained(narrow, dtype=torch.float32).save_pretrained(wide)
    flags = ["--context", "64"]
    for name, base in {"of-narrow": narrow, "of-wide": wide}.items():
        assert convert(base, tmp_path / name, *flags) == 0
    of_narrow, of_wide = (read_tensors(tmp_path / name) for name in ("of-narrow", "of-wide"))
    assert of_narrow.keys() == of_wide.keys() and any("router" in name for name in of_wide)
    for name, tensor in of_wide.items():
        assert tensor.dtype == torch.float32 and torch.equal(of_narrow[name], tensor.bfloat16()), name
    capsys.readouterr()
    assert convert(narrow, tmp_path / "again", *flags, "--compute-dtype", "bfloat16") == 0
    assert "in bfloat16" in capsys.readouterr().out
    record = record_of(tmp_path / "again")
    assert record["compute_dtype"] == record["verification"]["dtype"] == "bfloat16" and record["device"]
    again = read_tensors(tmp_path / "again")
    assert any(not torch.equal(again[name], tensor) for name, tensor in of_narrow.items())


def test_files_that_travel(make_llama, convert, tmp_path):
    base = make_llama()
    (base / "LICENSE.txt").write_text("licence of the base")
    (base / "chat_template.jinja").write_text("{{ 'plain' }}")
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "tool_use.jinja").write_text("{{ 'tools' }}")
    (base / "training_args.bin").write_bytes(b"pickle")
    of_the_base = ("run.json", "evaluation.json", "report.json", "trainer_state.json", "requirements.txt")
    for name in of_the_base:
        (base / name).write_text("{}")
    assert convert(base, tmp_path / "moh") == 0
    names = {path.name for path in (tmp_path / "moh").iterdir()}
    assert {"tokenizer.json", "generation_config.json", "LICENSE.txt"} <= names
    code = {file.name for file in REMOTE_CODE}
    assert {name for name in names if name.endswith(".py")} == code
    assert names.isdisjoint({"training_args.bin", *of_the_base}) and not list_files(tmp_path / "moh")[1]
    templates = AutoTokenizer.from_pretrained(tmp_path / "moh").chat_template
    assert templates == {"default": "{{ 'plain' }}", "tool_use": "{{ 'tools' }}"}
    # transformers 5.2 loads the files that the modelling file itself imports, not what those import.
    modeling = (tmp_path / "moh" / "modeling_moh_llama.py").read_text()
    assert set(re.findall(r"^from \.(\w+) import", modeling, re.MULTILINE)) == {Path(name).stem for name in code} - {
        "modeling_moh_llama"
    }


def test_stories_reproduce_the_golden_logits(shared, tmp_path):
    base = shared / "data" / "checkpoints" / "stories260K-hf"
    golden = np.load(shared / "golden" / "official_moh_stories260K.npz")
    arguments = ["convert", str(base), "--preset", "paper", "--output-dir", str(tmp_path / "paper")]
    assert main([*arguments, "--heldout-tokens", "512"]) == 0
    for implementation in ("eager", "sdpa"):
        moh = MoHLlamaForCausalLM.from_pretrained(tmp_path / "paper", attn_implementation=implementation).eval()
        with torch.no_grad():
            got = moh(torch.from_numpy(golden["input_ids"])).logits.numpy()
        np.testing.assert_allclose(got, golden["logits"], atol=1e-4)


def test_a_context_beyond_the_bases_positions_is_told(make_llama, convert, tmp_path, capsys):
    base = make_llama(max_position_embeddings=64)
    for asked, told in {"128": 1, "64": 0}.items():
        assert convert(base, tmp_path / asked, "--context", asked, "--preset", "paper", "--heldout-tokens", "0") == 0
        assert capsys.readouterr().err.count("is above the 64 positions") == told
    assert record_of(tmp_path / "128")["plan"]["context"] == 64


def test_a_base_for_chats_asks_for_conversations_in_the_users_text(make_llama, convert, tmp_path, capsys):
    base, chats = make_llama(max_position_embeddings=64), tmp_path / "chats.jsonl"
    roles = {"user": "What is a mill? " * 40, "assistant": "It grinds. " * 40}
    record = {"messages": [{"role": role, "content": text} for role, text in roles.items()]}
    chats.write_text(f"{json.dumps(record)}\n" * 40)
    mixture = tmp_path / "chats.yaml"
    mixture.write_text(f"name: chats\nsources:\n  chats: {{weight: 1, files: {chats}, type: messages}}\n")
    template = "{% for message in messages %}{{ message.role }}: {{ message.content }} {% endfor %}"
    for text, of_calibration, told in (
        (None, (), 0),
        (template, (), 1),
        (template, ("--calibration", str(mixture)), 0),
        (template, ("--calibration", "embedded"), 0),  # the default; it serves chats well enough
    ):
        if text is not None:
            (base / "chat_template.jinja").write_text(text)
        assert convert(base, tmp_path / "moh", "--overwrite", "--heldout-tokens", "0", *of_calibration) == 0
        assert capsys.readouterr().err.count("for chats add conversations to --calibration") == told
