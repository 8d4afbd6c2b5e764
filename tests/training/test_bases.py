"""Models whose folder is more than its config says: what is trained and saved is what transformers loads of it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moh_llm.modeling import MoHLlamaForCausalLM
from moh_llm.training import networks
from moh_llm.training.loop import train
from moh_llm.training.reference import find_starting_point
from moh_llm.training.saving import save_network
from moh_llm.training.sharding import read_slices

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
IDS = torch.randint(0, 250, (2, 24), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model(model_folder: Path, tmp_path: Path) -> Path:
    """A converted model with tied embeddings, in one file, to be changed."""
    folder = tmp_path / "moh"
    shutil.copytree(model_folder, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = {name: value for file in model_folder.glob("*.safetensors") for name, value in load_file(file).items()}
    assert HEAD not in tensors
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def edit(folder: Path, **tensors: torch.Tensor) -> None:
    file = folder / "model.safetensors"
    save_file(load_file(file) | tensors, file, metadata={"format": "pt"})


def edit_config(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def own_head(folder: Path) -> None:
    """Give a model with tied embeddings another output projection."""
    table = load_file(folder / "model.safetensors")[EMBEDDING]
    edit(folder, **{HEAD: table + 0.05 * torch.randn(table.shape, generator=torch.Generator().manual_seed(1))})


def other_shards(folder: Path) -> None:
    """Put the index and a shard of an older save beside it."""
    old = {name: value + 1 for name, value in load_file(folder / "model.safetensors").items()}
    save_file(old, folder / "model-00001-of-00001.safetensors", metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(old, "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def session(folder: Path) -> None:
    edit_config(folder, return_dict=False, output_hidden_states=True, _attn_implementation="flash_attention_2")


def logits(network: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return network(IDS).logits


@pytest.mark.parametrize("change", [own_head, other_shards, session])
def test_what_is_trained_is_what_transformers_loads(model: Path, change: Callable[[Path], None]) -> None:
    plain = logits(MoHLlamaForCausalLM.from_pretrained(model).eval())
    change(model)
    loads = change is not session  # whose attention is not installed
    wanted = logits(MoHLlamaForCausalLM.from_pretrained(model).eval()) if loads else plain
    assert torch.equal(wanted, plain) == (change is not own_head)
    whole, divided = (networks.load_network(model, torch.float32, empty=empty).eval() for empty in (False, True))
    read_slices(divided, model, torch.device("cpu"))  # as FSDP2 does
    for network in (whole, divided):
        assert torch.equal(logits(network), wanted)
        assert (network.lm_head.weight is network.model.embed_tokens.weight) == (change is not own_head)


def test_a_run_saves_the_model_that_it_trained(model: Path, configure, tmp_path: Path) -> None:
    own_head(model)
    session(model)
    train(configure(model=str(model), max_steps=2))
    saved = tmp_path / "run" / "model"
    network = MoHLlamaForCausalLM.from_pretrained(saved).eval()
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    trained = load_file(checkpoint / "model.safetensors")
    assert HEAD in trained
    for name, weight in network.named_parameters():
        assert torch.equal(weight, trained[name]), name
    assert network(IDS).logits.shape == (2, 24, 257)
    config = json.loads((saved / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    assert not {"return_dict", "_attn_implementation"} & config.keys()


def test_tuned_weights_keep_the_dtype_that_each_had(model: Path, configure, tmp_path: Path) -> None:
    vectors, matrices = torch.bfloat16, torch.float32
    tensors = load_file(model / "model.safetensors")
    tensors = {name: value.to(matrices if value.ndim > 1 else vectors) for name, value in tensors.items()}
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    edit_config(model, dtype="bfloat16")  # by the norms, or by habit
    config = configure(model=str(model))
    student = networks.make_student(config)
    tuned = {name: weight.detach() + 0.123456789 for name, weight in networks.trained_weights(student).items()}
    save_file(tuned, tmp_path / "model.safetensors")
    start, tokenizer = find_starting_point(config), networks.load_tokenizer(model)
    save_network(config, tmp_path, tokenizer, tmp_path / "saved", start, 3)
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == tuned.keys()
    for name, weight in saved.items():
        assert weight.dtype == tensors[name].dtype
        assert torch.equal(weight, tuned[name].to(weight.dtype)), name
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["dtype"] == str(matrices)[6:]
