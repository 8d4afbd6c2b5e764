"""The ways in which people load a model, and that what was published stays loadable."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from moh_llm.analysis.heads import heads_on
from moh_llm.modeling import MoHLlamaConfig, MoHLlamaForCausalLM, MoHLlamaForSequenceClassification

PLAN = {"num_shared_heads": 1, "num_active_heads": 2, "shared_heads": [[2], [1]], "router_type": "linear"}
PLAN |= {"head_fallback": "value"}


@pytest.fixture
def folder(make_pair, byte_tokenizer, tmp_path) -> Path:
    """A MoH model's folder with a tokenizer that has a chat template."""
    make_pair(**PLAN)
    byte_tokenizer(tmp_path / "moh")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "moh")
    tokenizer.chat_template = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "moh")
    return tmp_path / "moh"


def test_import_moh_llm_loads_no_torch():
    program = "import sys, moh_llm; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.strip() == "[]"


def test_sequence_classification_scores_the_last_token_that_is_no_padding(folder, ids):
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3, pad_token_id=0).eval()
    assert type(model) is MoHLlamaForSequenceClassification
    ids[0, 20:] = 0
    with torch.no_grad():
        logits = model(ids).logits
        for row, length in enumerate((20, 24, 24)):
            hidden = model.model(ids[row : row + 1, :length]).last_hidden_state[0, -1]
            torch.testing.assert_close(logits[row], model.score(hidden))
    model.save_pretrained(folder.parent / "classifier")
    again = AutoModelForSequenceClassification.from_pretrained(folder.parent / "classifier").eval()
    with torch.no_grad():
        assert torch.equal(again(ids).logits, logits)


@pytest.mark.parametrize("fallback", [{}, {"head_fallback": "local", "local_window": 2, "local_sinks": 1}])
def test_the_budget_of_heads_is_of_routers_that_an_adapter_trains(make_pair, ids, fallback):
    from peft import LoraConfig, get_peft_model

    dense, moh = make_pair(**PLAN | fallback)
    whole, found, on = moh(ids).logits, dense(ids).logits, heads_on(moh, ids)
    assert not torch.allclose(whole, found, atol=1e-2)
    adapted = get_peft_model(moh, LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["router", "fallback"]))
    adapted.eval()
    torch.testing.assert_close(adapted(ids).logits, whole)
    assert torch.equal(heads_on(moh, ids), on)
    with torch.no_grad():  # a wrapped router is asked, too, where its scores do not decide
        few = adapted(ids[:, :2], output_router_logits=True).router_logits
    assert [logits.shape[1] for logits in few] == [2] * len(moh.routers)
    with adapted.all_heads_active():
        torch.testing.assert_close(adapted(ids).logits, found)
    adapted(input_ids=ids, labels=ids).loss.backward()
    trained = {
        name.split(".modules_to_save")[0].split(".")[-1]
        for name, weight in adapted.named_parameters()
        if weight.grad is not None and "modules_to_save" in name
    }
    assert trained == {"router", "fallback"}


def test_four_bits_leave_routing_whole_and_train_with_adapters(folder, ids):
    pytest.importorskip("bitsandbytes")
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import BitsAndBytesConfig

    four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    device = {"": 0 if torch.cuda.is_available() else "cpu"}
    model = MoHLlamaForCausalLM.from_pretrained(folder, quantization_config=four_bits, device_map=device)
    whole = MoHLlamaForCausalLM.from_pretrained(folder).to(model.device)
    attention = model.model.layers[0].self_attn
    assert type(attention.q_proj).__name__ == "Linear4bit"
    for name, weight in whole.model.layers[0].self_attn.named_parameters():
        if name.startswith(("router", "fallback")):
            assert torch.equal(attention.get_parameter(name).float(), weight), name

    adapted = get_peft_model(prepare_model_for_kbit_training(model), LoraConfig(target_modules="all-linear", r=2))
    wrapped = {name for name, _ in adapted.named_parameters() if "lora_" in name}
    assert wrapped and not [name for name in wrapped if "router" in name or "fallback" in name]
    adapted.train()
    ids = ids.to(model.device)
    optimizer = torch.optim.AdamW((weight for weight in adapted.parameters() if weight.requires_grad), lr=1e-2)
    losses = []
    for _ in range(4):
        loss = adapted(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


# Format 1 as it was first published: config fields, tensors by name, and the logits they mean. A change that breaks
# this needs a new `FORMAT`, and code that still reads this one.
CONFIG = {
    **{"model_type": "moh_llama", "moh_format": 1, "vocab_size": 11, "hidden_size": 8, "intermediate_size": 12},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2},
    **{"tie_word_embeddings": True, "rms_norm_eps": 1e-5},
    **{"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
}
DENSE = {"input_layernorm": (8,), "post_attention_layernorm": (8,)}
DENSE |= {"mlp.gate_proj": (12, 8), "mlp.up_proj": (12, 8), "mlp.down_proj": (8, 12)}
DENSE |= {f"self_attn.{name}_proj": (8 if name in "qo" else 4, 8) for name in "qkvo"}
ROUTING = {
    "query_norm": {},
    "linear": {
        **{"router.routed.weight": (3, 8), "router.routed.bias": (3,)},
        **{"fallback.own_value.weight": (3, 8), "fallback.own_value.bias": (3,), "fallback.bias": (3, 2)},
    },
    "two_stage": {"router.routed.weight": (3, 8), "router.shared.weight": (1, 8), "router.stage.weight": (2, 8)},
    "normalized": {"router.routed.weight": (3, 8), "router.stage.weight": (2, 8)},
}
FIELDS = {
    "query_norm": {"num_shared_heads": 1, "num_active_heads": 3},
    "linear": {"num_active_heads": [2, 3], "num_shared_heads": 1, "shared_heads": [[2], [0]], "head_fallback": "value"},
    "two_stage": {"num_shared_heads": 1, "num_active_heads": 2, "router_score": "weighted"},
    "normalized": {"num_shared_heads": 1, "num_active_heads": 3, "router_score": "normalized"},
}
LOGITS = {  # of the naive loop
    "query_norm": [0.242491, 1.323626, 1.112118],
    "linear": [1.287030, -0.376783, -1.672633],
    "two_stage": [-0.196640, 1.798989, 2.037740],
    "normalized": [-0.156055, 1.486366, 1.677214],
}


@pytest.mark.parametrize("router_type", sorted(LOGITS))
def test_what_was_published_in_format_1_keeps_its_meaning(tmp_path, router_type):
    config = CONFIG | FIELDS[router_type] | {"router_type": "two_stage" if router_type == "normalized" else router_type}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shapes = {"model.embed_tokens.weight": (11, 8), "model.norm.weight": (8,)}
    of_layer = {f"{name}.weight": shape for name, shape in DENSE.items()}
    of_layer |= {f"self_attn.{name}": shape for name, shape in ROUTING[router_type].items()}
    for name, shape in of_layer.items():
        shapes |= {f"model.layers.{layer}.{name}": shape for layer in range(2)}
    weights = {}
    for name, shape in shapes.items():
        numbers = torch.arange(torch.Size(shape).numel(), dtype=torch.float64) + 7 * len(weights)
        weights[name] = (1.3 * torch.sin(1.7 * numbers)).reshape(shape)
    save_file(weights, tmp_path / "model.safetensors")
    model, info = MoHLlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float64, output_loading_info=True)
    assert not any(info.values())
    with torch.no_grad():
        logits = model(torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])).logits[0, -1, :3]
    torch.testing.assert_close(logits, torch.tensor(LOGITS[router_type], dtype=torch.float64), rtol=0, atol=1e-5)


def test_a_later_format_is_refused_in_one_line():
    with pytest.raises(ValueError, match=r"moh_format=7: this code reads formats up to 6; load .*trust_remote_code"):
        MoHLlamaConfig(**(CONFIG | {"moh_format": 7}))
