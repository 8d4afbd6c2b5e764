"""Conversion through the command: what is written, that it loads anywhere, and what is refused."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from moh_llm.cli import main
from moh_llm.modeling import MoHLlamaForCausalLM

ROOT = Path(__file__).resolve().parents[2]
TEXT = "The river was high that spring, and the boats lay tied to the poplars below the mill. " * 40


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "river.jsonl"
    path.write_text("".join(json.dumps({"text": f"{i}. {TEXT}"}) + "\n" for i in range(12)))
    return path


def convert(base: Path, output: Path, text: Path, *flags: str) -> int:
    small = ["--calibration-tokens", "1024", "--heldout-tokens", "256"]
    return main(["convert", str(base), "--output", str(output), "--calibration", str(text), *small, *flags])


@pytest.mark.parametrize("layout", ["one file", "shards"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_default_conversion(make_llama, text, tmp_path, layout, dtype):
    base = make_llama(dtype=dtype, max_shard_size="20KB" if layout == "shards" else "1GB", tie_word_embeddings=True)
    assert convert(base, tmp_path / "moh", text) == 0
    moh = MoHLlamaForCausalLM.from_pretrained(tmp_path / "moh")
    assert moh.dtype == dtype
    assert moh.config.router_type == "linear"
    assert (moh.config.num_shared_heads, moh.config.num_active_heads) == (2, 3)  # 3/4 of 4; 40 % of that

    # The base's tensors are there bit for bit, and beside them only the routers'.
    original = {k: v for shard in base.glob("*.safetensors") for k, v in load_file(shard).items()}
    written = {k: v for shard in (tmp_path / "moh").glob("*.safetensors") for k, v in load_file(shard).items()}
    assert all(torch.equal(written[name], tensor) for name, tensor in original.items())
    assert all(".router." in name for name in written.keys() - original.keys())
    index = json.loads((tmp_path / "moh" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == written.keys()
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in written.values())

    record = json.loads((tmp_path / "moh" / "conversion.json").read_text())
    proof = record["verification"]
    assert proof["all_heads_active"]["logits_equal_base"] is True
    assert record["base"]["name"] == str(base)
    assert record["calibration"]["tokens"] >= 1024
    assert proof["converted"]["kl"] > 0 and proof["paper_router"]["kl"] > 0
    assert proof["converted"]["perplexity_ratio"] == proof["converted"]["perplexity"] / proof["base_perplexity"]


def test_calibrated_router_is_nearer_to_the_base_than_the_papers(make_llama, text, tmp_path):
    assert (
        convert(make_llama(num_attention_heads=8, num_key_value_heads=4, hidden_size=64), tmp_path / "moh", text) == 0
    )
    proof = json.loads((tmp_path / "moh" / "conversion.json").read_text())["verification"]
    assert proof["converted"]["kl"] < proof["paper_router"]["kl"]


def test_paper_preset_adds_no_tensor(make_llama, text, tmp_path):
    base = make_llama()
    assert convert(base, tmp_path / "moh", text, "--preset", "paper") == 0
    assert (tmp_path / "moh" / "model.safetensors").read_bytes() == (base / "model.safetensors").read_bytes()
    config = MoHLlamaForCausalLM.from_pretrained(tmp_path / "moh").config
    assert (config.num_shared_heads, config.num_active_heads, config.router_type) == (2, 3, "query_norm")
    assert config.shared_heads is None and config.router_score == "quantized"


def test_loads_where_moh_llm_is_not_importable(make_llama, text, tmp_path):
    base, output = make_llama(), tmp_path / "moh"
    assert convert(base, output, text) == 0
    # An import hook keeps the package, installed or not, out of the child's reach.
    code = """
import sys, torch
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name == "moh_llm":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Hide())
try:
    import moh_llm
except ModuleNotFoundError:
    pass
else:
    sys.exit("moh_llm is importable")
from transformers import AutoModel, AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True)
torch.save(model(torch.arange(1, 30)[None]).logits.detach(), sys.argv[2])
model.save_pretrained(sys.argv[3])
AutoModelForCausalLM.from_pretrained(sys.argv[3], trust_remote_code=True)
"""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"HF_MODULES_CACHE": str(tmp_path / "c")}
    arguments = [str(output), str(tmp_path / "logits.pt"), str(tmp_path / "again")]
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        expected = MoHLlamaForCausalLM.from_pretrained(output).eval()(torch.arange(1, 30)[None]).logits
    assert torch.equal(torch.load(tmp_path / "logits.pt", weights_only=True), expected)


def test_all_heads_query_norm_gives_the_base(make_llama, text, tmp_path):
    base = make_llama()
    flags = ["--router", "query_norm", "--num-shared-heads", "2", "--num-active-heads", "4"]
    assert convert(base, tmp_path / "all", text, *flags) == 0
    proof = json.loads((tmp_path / "all" / "conversion.json").read_text())["verification"]
    assert proof["converted"]["perplexity_ratio"] == 1 and proof["converted"]["kl"] == 0
    ids = torch.arange(1, 30)[None]
    with torch.no_grad():
        moh = MoHLlamaForCausalLM.from_pretrained(tmp_path / "all").eval()
        assert torch.equal(moh(ids).logits, LlamaForCausalLM.from_pretrained(base).eval()(ids).logits)


def test_importance_and_dtype(make_llama, text, tmp_path):
    base = make_llama()
    assert convert(base, tmp_path / "moh", text, "--shared", "importance", "--dtype", "bfloat16") == 0
    moh = MoHLlamaForCausalLM.from_pretrained(tmp_path / "moh")
    assert moh.dtype == torch.bfloat16
    assert [len(ids) for ids in moh.config.shared_heads] == [2, 2]
    cast = LlamaForCausalLM.from_pretrained(base, dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(moh.state_dict()[name], tensor) for name, tensor in cast.items())


def test_files_that_travel(make_llama, text, tmp_path):
    base = make_llama()
    (base / "LICENSE.txt").write_text("licence of the base")
    (base / "training_args.bin").write_bytes(b"pickle")
    assert convert(base, tmp_path / "moh", text) == 0
    names = {path.name for path in (tmp_path / "moh").iterdir()}
    assert {"tokenizer.json", "generation_config.json", "LICENSE.txt", "routing_moh.py"} <= names
    assert "training_args.bin" not in names


def edit_config(base: Path, **fields: object) -> list[str]:
    """Change fields of the base's config; returns no flags."""
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | fields))
    return []


def _drop_weights(base: Path, tmp_path: Path) -> list[str]:
    (base / "model.safetensors").unlink()
    return []


def _truncate(base: Path, tmp_path: Path) -> list[str]:
    data = (base / "model.safetensors").read_bytes()
    (base / "model.safetensors").write_bytes(data[: len(data) // 2])
    return []


def _other_architecture(base: Path, tmp_path: Path) -> list[str]:
    return edit_config(base, model_type="gpt2", architectures=["GPT2LMHeadModel"])


def _quantised(base: Path, tmp_path: Path) -> list[str]:
    return edit_config(base, quantization_config={"quant_method": "gptq"})


def _missing_tensor(base: Path, tmp_path: Path) -> list[str]:
    from safetensors.torch import save_file

    tensors = load_file(base / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    return []


def _other_size(base: Path, tmp_path: Path) -> list[str]:
    return edit_config(base, intermediate_size=96)


def _no_head_count(base: Path, tmp_path: Path) -> list[str]:
    return edit_config(base, num_attention_heads=None)


def _config_is_a_list(base: Path, tmp_path: Path) -> list[str]:
    (base / "config.json").write_text("[]")
    return []


def _odd_hidden_size(base: Path, tmp_path: Path) -> list[str]:
    return edit_config(base, num_attention_heads=5)


def _no_tokenizer(base: Path, tmp_path: Path) -> list[str]:
    for path in base.glob("tokenizer*"):
        path.unlink()
    return []


def _empty_text(base: Path, tmp_path: Path) -> list[str]:
    (tmp_path / "empty.jsonl").write_text("")
    return ["--calibration", str(tmp_path / "empty.jsonl")]


def _short_text(base: Path, tmp_path: Path) -> list[str]:
    (tmp_path / "short.txt").write_text("A few words.")
    return ["--calibration", str(tmp_path / "short.txt")]


def _missing_text(base: Path, tmp_path: Path) -> list[str]:
    return ["--calibration", str(tmp_path / "nowhere.jsonl")]


def _full_output(base: Path, tmp_path: Path) -> list[str]:
    (tmp_path / "moh").mkdir()
    (tmp_path / "moh" / "mine.txt").write_text("keep me")
    return []


BAD_INPUT = {
    "no weights": (_drop_weights, "has no weights"),
    "truncated": (_truncate, "model.safetensors is damaged or truncated"),
    "architecture": (_other_architecture, "model_type 'gpt2' (GPT2LMHeadModel) cannot be converted"),
    "quantised": (_quantised, "weights are quantised (gptq)"),
    "missing tensor": (_missing_tensor, "the weights lack model.layers.1.mlp.up_proj.weight"),
    "other size": (_other_size, "mlp.down_proj.weight in model.safetensors has shape [32, 64], which config.json"),
    "no head count": (_no_head_count, "config.json gives no number for num_attention_heads"),
    "config is a list": (_config_is_a_list, "model_type None (no architecture named) cannot be converted"),
    "odd hidden size": (_odd_hidden_size, "hidden size (32) is not a multiple of the number of attention heads (5)"),
    "no tokenizer": (_no_tokenizer, "has no tokenizer that loads"),
    "empty text": (_empty_text, "holds no text"),
    "short text": (_short_text, "fewer than one window"),
    "missing text": (_missing_text, "no file at"),
    "output in the way": (_full_output, "exists and is not empty; pass --overwrite"),
    "too many active": (lambda b, t: ["--num-active-heads", "5"], "num_active_heads=5 must lie between"),
    "fewer active than shared": (
        lambda b, t: ["--num-shared-heads", "3", "--num-active-heads", "2"],
        "num_active_heads=2 must lie between num_shared_heads=3",
    ),
    "ratio": (lambda b, t: ["--active-ratio", "1.5"], "--active-ratio 1.5 must be above 0 and at most 1"),
    "ratio and number": (lambda b, t: ["--active-ratio", "1", "--num-active-heads", "3"], "not both"),
    "no tokens": (lambda b, t: ["--calibration-tokens", "0"], "--calibration-tokens 0 must be at least 1"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_line_and_leaves_nothing(make_llama, text, tmp_path, capsys, case):
    spoil, message = BAD_INPUT[case]
    base = make_llama()
    flags = spoil(base, tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    assert convert(base, tmp_path / "moh", text, *flags) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and message in error, error
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_missing_folder(tmp_path, capsys):
    assert main(["convert", str(tmp_path / "nowhere"), "--output", str(tmp_path / "moh")]) == 2
    assert f"error: folder {tmp_path / 'nowhere'} does not exist" in capsys.readouterr().err


def test_overwrite_replaces_only_a_finished_conversion(make_llama, text, tmp_path):
    base = make_llama()
    _full_output(base, tmp_path)
    assert convert(base, tmp_path / "moh", text, "--overwrite", "--num-active-heads", "9") == 2
    assert (tmp_path / "moh" / "mine.txt").exists()
    assert convert(base, tmp_path / "moh", text, "--overwrite") == 0
    assert not (tmp_path / "moh" / "mine.txt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["moh"]


@pytest.mark.parametrize("dtype", [None, "bfloat16"], ids=["copied", "cast"])
def test_a_disk_that_refuses_leaves_nothing(make_llama, text, tmp_path, dtype):
    """A real refusal: the kernel lets no file of the child grow beyond 30 kB, less than the weights."""
    flags = ["--dtype", dtype] if dtype else []
    command = ["convert", str(make_llama()), "--output", str(tmp_path / "moh"), "--calibration", str(text), *flags]
    code = (
        "import resource, sys\n"
        "from moh_llm.cli import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))\n"
        f"sys.exit(main({[*command, '--heldout-tokens', '256']!r}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    error = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 2, done.stderr
    assert error.startswith("error: cannot write") and "free some space" in error
    assert list(tmp_path.iterdir()) == []


def test_stories_reproduce_the_golden_logits(shared, tmp_path):
    import numpy as np

    base = shared / "data" / "checkpoints" / "stories260K-hf"
    golden = np.load(shared / "golden" / "official_moh_stories260K.npz")
    arguments = ["convert", str(base), "--preset", "paper", "--output", str(tmp_path / "paper")]
    assert main([*arguments, "--heldout-tokens", "512"]) == 0
    for implementation in ("eager", "sdpa"):
        moh = MoHLlamaForCausalLM.from_pretrained(tmp_path / "paper", attn_implementation=implementation).eval()
        with torch.no_grad():
            got = moh(torch.from_numpy(golden["input_ids"])).logits.numpy()
        np.testing.assert_allclose(got, golden["logits"], atol=1e-4)
