"""Bases that are more, or other, than their config says: what is converted is what transformers loads of them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, normalizers, processors
from transformers import AutoModelForCausalLM, AutoTokenizer, MistralConfig

from moh_llm.cli import main
from moh_llm.conversion.base import open_base

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
IDS = torch.randint(0, 250, (2, 48), generator=torch.Generator().manual_seed(0))
PAPER = ["--preset", "paper", "--heldout-tokens", "0"]  # where only the base's own tensors matter


@pytest.fixture
def base(make_llama: Callable[..., Path], tmp_path: Path) -> Path:
    """A tiny LLaMA of one file, to be changed."""
    return Path(shutil.copytree(make_llama(), tmp_path / "base"))


@pytest.fixture
def tied(make_llama: Callable[..., Path], tmp_path: Path) -> Path:
    """The same with tied embeddings, and so without an output projection."""
    folder = Path(shutil.copytree(make_llama(tie_word_embeddings=True), tmp_path / "base"))
    assert HEAD not in load_file(folder / "model.safetensors")
    return folder


def edit(folder: Path, **tensors: torch.Tensor) -> None:
    """Write tensors into a folder's one file."""
    file = folder / "model.safetensors"
    save_file(load_file(file) | tensors, file, metadata={"format": "pt"})


def edit_config(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def logits(folder: Path) -> torch.Tensor:
    """Of the model as transformers loads it, with all heads on."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        if not hasattr(model, "all_heads_active"):
            return model(IDS, return_dict=True).logits
        with model.all_heads_active():
            return model(IDS).logits


def shards_beside(folder: Path) -> None:
    """Put an older save's index and shards beside a folder's one file."""
    torch.manual_seed(0)
    stored = load_file(folder / "model.safetensors")
    old = {name: value + 0.1 * torch.randn_like(value) for name, value in stored.items()}
    names, weight_map = sorted(old), {}
    for number, part in enumerate((names[:9], names[9:]), 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: old[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


# ---- which weights are the model


def test_one_file_is_preferred_to_the_index_of_an_older_save(base, convert, tmp_path, one_thread):
    wanted = logits(base)
    shards_beside(base)
    assert torch.equal(logits(base), wanted)  # transformers' own choice
    assert convert(base, tmp_path / "moh", *PAPER) == 0
    assert torch.equal(logits(tmp_path / "moh"), wanted)


def _twice(base: Path) -> None:
    shards_beside(base)
    (base / "model.safetensors").unlink()
    edit_shard = base / "model-00001-of-00002.safetensors"
    save_file(load_file(edit_shard) | {"model.norm.weight": torch.ones(32)}, edit_shard, metadata={"format": "pt"})


AMBIGUOUS = {
    "in two files": (_twice, "has two tensors model.norm.weight"),
    "of torch.distributed": (
        lambda base: shutil.copy(base / "model.safetensors", base / "shard-00001-model-00001-of-00001.safetensors"),
        "has two sets of weights",
    ),
    "without prefix": (
        lambda base: edit(base, **{"norm.weight": torch.full((32,), 2.0)}),
        "transformers loads norm.weight as model.norm.weight",
    ),
}


@pytest.mark.parametrize("spoil,message", AMBIGUOUS.values(), ids=AMBIGUOUS)
def test_what_is_not_one_model_is_refused_in_one_line(base, convert, tmp_path, capsys, spoil, message):
    spoil(base)
    assert convert(base, tmp_path / "moh") == 2
    lines = capsys.readouterr().err.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert len(errors) == 1 and message in errors[0], lines
    assert not (tmp_path / "moh").exists()


# ---- tied embeddings


def test_an_own_projection_beside_tied_embeddings_is_the_models(tied, convert, read_tensors, tmp_path, one_thread):
    table = load_file(tied / "model.safetensors")[EMBEDDING]
    edit(tied, **{HEAD: table + 0.05 * torch.randn(table.shape, generator=torch.Generator().manual_seed(1))})
    wanted = logits(tied)
    assert convert(tied, tmp_path / "moh") == 0
    assert torch.equal(logits(tmp_path / "moh"), wanted)
    assert main(["convert", "--to-dense", str(tmp_path / "moh"), "--output-dir", str(tmp_path / "dense")]) == 0
    back, own = read_tensors(tmp_path / "dense"), read_tensors(tied)
    assert back.keys() == own.keys() and all(torch.equal(back[name], own[name]) for name in own)
    assert torch.equal(logits(tmp_path / "dense"), wanted)


# ---- dtypes


def test_dtypes_are_kept_and_the_models_is_that_of_its_matrices(base, convert, read_tensors, tmp_path):
    """Matrices in two halves: float32 is the narrowest dtype that rounds neither."""
    stored = load_file(base / "model.safetensors")
    own = {name: value.to(torch.float16 if "up_proj" in name else torch.bfloat16) for name, value in stored.items()}
    own |= {name: value for name, value in stored.items() if value.ndim == 1}
    edit(base, **own)
    edit_config(base, dtype="bfloat16")
    assert convert(base, tmp_path / "moh", "--heldout-tokens", "0") == 0
    written = read_tensors(tmp_path / "moh")
    for name, value in own.items():
        assert written[name].dtype == value.dtype and torch.equal(written[name], value)
    assert {value.dtype for name, value in written.items() if name not in own} == {torch.float32}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "moh")
    assert model.dtype == torch.float32
    assert all(torch.equal(value.float(), model.state_dict()[name]) for name, value in own.items())


# ---- what transformers ignores

STRAY = {
    "self_attn.k_scale": torch.ones(()),
    "self_attn.q_proj.bias": torch.ones(32),
    "self_attn.rotary_emb.inv_freq": torch.ones(4),
    "mlp.up_proj.weight_scale": torch.ones(64, dtype=torch.float8_e4m3fn),
}


def test_tensors_that_the_architecture_does_not_have_are_left_out(base, convert, tmp_path, capsys, one_thread):
    wanted = logits(base)
    edit(base, **{f"model.layers.{layer}.{name}": t.clone() for layer in (0, 1) for name, t in STRAY.items()})
    assert torch.equal(logits(base), wanted)
    assert convert(base, tmp_path / "moh") == 0
    (warning,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert "6 tensors" in warning and "model.layers.0.self_attn.k_scale" in warning and "inv_freq" not in warning
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "moh", output_loading_info=True)
    assert not info["unexpected_keys"] and not info["missing_keys"]
    assert torch.equal(logits(tmp_path / "moh"), wanted)
    record = json.loads((tmp_path / "moh" / "conversion.json").read_text())
    dense = sum(value.numel() for value in AutoModelForCausalLM.from_pretrained(base).state_dict().values())
    assert record["parameters"]["dense"] == dense


def test_settings_of_a_session_are_no_part_of_a_model(base, convert, tmp_path, one_thread):
    wanted = logits(base)
    edit_config(base, return_dict=False, output_hidden_states=True, attn_implementation="flash_attention_2")
    assert convert(base, tmp_path / "moh") == 0
    assert torch.equal(logits(tmp_path / "moh"), wanted)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "moh")(IDS).logits.shape == wanted.shape


@pytest.mark.parametrize("revision", ["refs/pr/1", None])
def test_a_revision_on_the_hub_follows_an_at_sign(base, monkeypatch, revision):
    asked = []
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda name, revision, **_: asked.append((name, revision)) or str(base)
    )
    assert open_base(f"me/base@{revision}" if revision else "me/base").name == "me/base"
    assert asked == [("me/base", revision)]


# ---- links


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "model.safetensors"])
def test_a_file_that_is_a_link_out_of_the_base_is_refused(base, convert, tmp_path, capsys, name):
    (base / name).rename(tmp_path / name)
    (base / name).symlink_to(tmp_path / name)
    assert convert(base, tmp_path / "moh", *PAPER) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and str(base / name) in errors[0] and "is a link" in errors[0]
    assert not (tmp_path / "moh").exists()


# ---- the tokenizer


def test_texts_have_the_ids_that_the_base_gives_them(make_model, convert, tmp_path):
    """Whose class transformers chooses by `model_type`, another one than the file names."""
    base = Path(shutil.copytree(make_model(MistralConfig, sliding_window=None), tmp_path / "base"))
    words = ["<unk>", "<s>", "</s>", "\u2581", "t", "h", "\u2581t", "th", "\u2581th"]
    merges = [("\u2581", "t"), ("t", "h"), ("\u2581t", "h")]
    tokenizer = Tokenizer(models.BPE({word: n for n, word in enumerate(words)}, merges, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Replace("\u2581", " ")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens(words[:3])
    tokenizer.save(str(base / "tokenizer.json"))
    own = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (base / "tokenizer_config.json").write_text(json.dumps(own))
    wanted = AutoTokenizer.from_pretrained(base)("th</s>th th").input_ids
    assert convert(base, tmp_path / "moh", *PAPER) == 0
    assert main(["convert", "--to-dense", str(tmp_path / "moh"), "--output-dir", str(tmp_path / "dense")]) == 0
    for folder in ("moh", "dense"):
        assert AutoTokenizer.from_pretrained(tmp_path / folder)("th</s>th th").input_ids == wanted, folder
        kept = json.loads((tmp_path / folder / "tokenizer_config.json").read_text())
        assert kept.pop("tokenizer_class") != own["tokenizer_class"] and kept.items() <= own.items()
