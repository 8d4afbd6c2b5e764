"""Layers with Mixtral's feed-forward experts: values and losses are those of transformers' own Mixtral."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AttentionInterface, AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM
from transformers.models.llama.modeling_llama import eager_attention_forward
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from moh_llm.modeling import MoHLlamaConfig, MoHLlamaForCausalLM

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
ALL_ON = {"num_shared_heads": 4, "num_active_heads": 4}
ROUTED = {"num_shared_heads": 1, "num_active_heads": 3, "router_type": "linear"}


def make_pair(**plan) -> tuple[MixtralForCausalLM, MoHLlamaForCausalLM]:
    """A Mixtral, and a MoH model with the same weights."""
    torch.manual_seed(0)
    base = MixtralForCausalLM(MixtralConfig(**SIZES, router_aux_loss_coef=0.3)).eval()
    moh = MoHLlamaForCausalLM(MoHLlamaConfig(**SIZES, expert_balance_coef=0.3, **plan)).eval()
    missing, unexpected = moh.load_state_dict(base.state_dict(), strict=False)
    assert not unexpected and all(".self_attn.router." in name for name in missing)
    return base, moh


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(0, 50, (3, 20), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_all_heads_on_it_is_transformers_mixtral(ids, dtype, implementation, one_thread):
    base, moh = (model.to(dtype) for model in make_pair(**ROUTED))
    for model in (base, moh):
        assert model.config._experts_implementation == "grouped_mm"
        model.set_experts_implementation(implementation)
        assert model.config._experts_implementation == implementation
    with torch.no_grad():
        expected = base(ids).logits
        assert not torch.equal(moh(ids).logits, expected)
        with moh.all_heads_active():
            assert torch.equal(moh(ids).logits, expected)
            written = (model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0) for model in (base, moh))
            assert torch.equal(*written)


@pytest.mark.parametrize("padded", [False, True])
def test_the_loss_of_experts_is_transformers(ids, padded):
    """And so are its gradients, those of the language-modelling loss included."""
    base, moh = make_pair(**ALL_ON)
    mask = torch.ones_like(ids)
    mask[0, :7] = 1 - padded
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": ids, "output_router_logits": True}
    wanted, got = base(**inputs), moh(**inputs)
    assert wanted.aux_loss > 1 and got.aux_loss == 0  # no head is routed
    torch.testing.assert_close(got.loss, wanted.loss)
    for output in (wanted, got):
        output.loss.backward()
    expected = {name: weight.grad for name, weight in base.named_parameters()}
    gates = [name for name in expected if name.endswith("mlp.gate.weight")]
    assert len(gates) == 3
    for name, weight in moh.named_parameters():
        torch.testing.assert_close(weight.grad, expected[name])


def test_both_load_balance_losses_are_added_with_their_coefficients(ids):
    _, moh = make_pair(**ROUTED, head_balance_coef=0.5)
    output = moh(ids, labels=ids, output_router_logits=True)
    recorded = moh.model(ids, output_expert_logits=True)
    assert [tuple(logits.shape) for logits in recorded.expert_logits] == [(60, 4)] * 3
    experts = load_balancing_loss_func(recorded.expert_logits, 4, 2)
    cross_entropy = moh(ids, labels=ids).loss
    assert output.aux_loss > 0.1 and experts > 1
    torch.testing.assert_close(output.loss, cross_entropy + 0.5 * output.aux_loss + 0.3 * experts)
    # A part of a step counts as much as it has of the step's predicted tokens.
    half = moh(ids, labels=ids, output_router_logits=True, num_items_in_batch=2 * 57)
    torch.testing.assert_close(2 * half.loss, output.loss)


def test_files_have_mixtrals_names(ids, tmp_path, one_thread):
    base, moh = make_pair(**ROUTED)
    for name, model in (("base", base), ("moh", moh)):
        model.save_pretrained(tmp_path / name)
    moh = MoHLlamaForCausalLM.from_pretrained(tmp_path / "moh")
    moh.save_pretrained(tmp_path / "moh")
    stored = load_file(tmp_path / "moh" / "model.safetensors")
    for name, tensor in load_file(tmp_path / "base" / "model.safetensors").items():
        assert torch.equal(stored.pop(name), tensor), name
    assert stored and all(".self_attn.router." in name for name in stored)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "moh")
    assert torch.equal(again(ids).logits, moh(ids).logits)


def test_the_names_of_an_mlp_stay(tmp_path):
    """Also of a model that no checkpoint was loaded into, whose names are turned back by all patterns."""
    sizes = SIZES | {"num_local_experts": 0}
    MoHLlamaForCausalLM(MoHLlamaConfig(**sizes, **ALL_ON)).save_pretrained(tmp_path)
    names = {f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
    assert names < load_file(tmp_path / "model.safetensors").keys()


def test_its_format_is_one_that_older_code_refuses():
    config = MoHLlamaConfig(**SIZES, **ROUTED)
    assert config.moh_format == 5 and MoHLlamaConfig(**SIZES | {"num_local_experts": 0}, **ROUTED).moh_format == 1
    with pytest.raises(ValueError, match="num_experts_per_tok=5 must lie between 1 and num_local_experts=4"):
        MoHLlamaConfig(**SIZES | {"num_experts_per_tok": 5})


def test_vllm_is_refused(monkeypatch):
    monkeypatch.setitem(AttentionInterface._global_mapping, "vllm", eager_attention_forward)  # as vLLM does
    config = MoHLlamaConfig(**SIZES, **ROUTED)
    with pytest.raises(ValueError, match=r"experts \(num_local_experts\) are not served by vLLM; use transformers"):
        MoHLlamaForCausalLM._from_config(config, attn_implementation="vllm")
