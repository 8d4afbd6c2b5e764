"""Loading a folder in a clean process by its own code, and comparing with the local model."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AttentionInterface, AutoTokenizer

from moh_llm.hub.proof import encode, observe, prove
from moh_llm.modeling import MoHLlamaConfig, MoHLlamaForCausalLM
from moh_llm.modeling.interval_attention_moh import NAME, reference_attention

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_sharded_model_is_the_same_there_bit_for_bit(moh_model, monkeypatch):
    # None of these may reach the clean process.
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("HF_MODULES_CACHE", "/nowhere")
    proof = prove(moh_model, moh_model)
    assert proof.failure is None
    assert proof.record["dtype"] == "float32"
    assert re.fullmatch(r"the logits of 3 texts \(1\d\d tokens\) and the generated tokens", proof.record["compared"])
    assert all(module.startswith("transformers_modules.") for module in proof.record["classes"].values())


@pytest.mark.slow
def test_another_backend_here_changes_nothing(make_model, forked_proof, monkeypatch):
    """The clean process has the files that travel alone, and so has the local model's side."""
    plan = {"num_shared_heads": 1, "num_active_heads": 2, "router_type": "linear"}
    folder = make_model(MoHLlamaConfig, head_fallback="local", local_window=4, local_sinks=1, **plan)
    forms = AttentionInterface._global_mapping
    monkeypatch.setitem(forms, NAME, lambda *args, **more: 1.01 * reference_attention(*args))
    registered = forms[NAME]
    assert prove(folder, folder).failure is None
    assert forms[NAME] is registered


def _move(tensor: torch.Tensor, place: int) -> None:
    """Change one element by one unit in the last place."""
    flat = tensor.view(-1)
    flat[place] = torch.nextafter(flat[place], torch.tensor(torch.inf))


@pytest.mark.slow
def test_one_changed_weight_is_found(folder, moh_model, forked_proof):
    """One element, by one unit in the last place."""
    name = "model.layers.0.self_attn.v_proj.weight"
    shard = next(shard for shard in folder.glob("*.safetensors") if name in load_file(shard))
    tensors = load_file(shard)
    _move(tensors[name], int(tensors[name].abs().argmax()))
    save_file(tensors, shard, metadata={"format": "pt"})
    failure = prove(folder, moh_model).failure
    assert failure is not None and "differs from the local model's by up to" in failure and "\n" not in failure


def test_what_is_observed_shows_every_matrix_of_the_default_layer(moh_model, monkeypatch):
    """And not what moves no bit of it: a router by too little to switch a head, a token that no text holds."""
    monkeypatch.setattr("moh_llm.hub.proof.NEW_TOKENS", 2)  # the most of an observation's time; logits show the weights
    model, tokenizer = MoHLlamaForCausalLM.from_pretrained(moh_model), AutoTokenizer.from_pretrained(moh_model)
    batch = encode(tokenizer, model.config)
    before = observe(model, batch, tokenizer.pad_token_id)
    unused = next(token for token in range(model.config.vocab_size) if not (before["generated"] == token).any())
    unseen = ["router.routed.weight", "router.routed.bias", "embed_tokens"]
    for name, parameter in model.named_parameters():
        old = parameter.data.clone()
        place = unused * parameter.shape[-1] if "embed_tokens" in name else int(old.abs().argmax())
        if "own_value.weight" in name:  # its products are small beside the bias: the largest alone may round away
            place = slice(None)
        _move(parameter.data, place)
        after = observe(model, batch, tokenizer.pad_token_id)
        seen = any(not torch.equal(after[key], tensor) for key, tensor in before.items())
        assert seen != any(part in name for part in unseen), name
        parameter.data.copy_(old)


def test_the_fallback_of_a_head_that_is_off_is_observed(make_model):
    """With local fallbacks a document's first tokens have all heads on; the short texts have no others."""
    plan = {"num_shared_heads": 1, "num_active_heads": 1, "router_type": "none", "head_fallback": "local"}
    folder = make_model(MoHLlamaConfig, local_window=4, local_sinks=1, local_start=100, **plan)
    model, tokenizer = MoHLlamaForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    batch = encode(tokenizer, model.config)
    before = observe(model, batch, tokenizer.pad_token_id)
    torch.nn.init.ones_(model.model.layers[0].self_attn.fallback.distant_value)
    after = observe(model, batch, tokenizer.pad_token_id)
    assert [name for name in before if not torch.equal(before[name], after[name])] == ["logits.long"]


def test_changed_code_is_found(folder, moh_model, forked_proof):
    with (folder / "attention_moh.py").open("a") as file:
        file.write("\n_dense = llama.LlamaRMSNorm.forward\n")
        file.write("llama.LlamaRMSNorm.forward = lambda self, x: _dense(self, x) * 1.001\n")
    failure = prove(folder, moh_model).failure
    assert failure is not None and "differs from the local model's" in failure


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('"query_key_norm": false', '"query_key_norm": true', "loading gave missing keys: model.layers.0.self_attn.k_"),
        ('"vocab_size": ', '"vocab_size": 1', "it does not load in a clean process: "),
    ],
)
def test_weights_that_are_not_those_of_the_config_fail(folder, moh_model, forked_proof, old, new, says):
    config = folder / "config.json"
    assert old in config.read_text()
    config.write_text(config.read_text().replace(old, new))
    failure = prove(folder, moh_model).failure
    assert failure is not None and failure.startswith(says) and "\n" not in failure
