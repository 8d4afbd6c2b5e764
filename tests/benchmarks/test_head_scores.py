"""Scores by which other methods choose heads: retrieval scores and DuoAttention's gates."""

import random
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from moh_llm.analysis.retrieval import Answer, Prompt
from moh_llm.conversion.plan import plan_layers
from moh_llm.modeling import MoHLlamaForCausalLM

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from baselines import duo
from baselines.duo import make_text, train_gates
from baselines.retrieval_heads import TIES, retrieval_scores
from baselines.streaming import StreamingPlan, ranked_fits


@pytest.fixture(scope="module")
def base(make_llama) -> Path:
    return make_llama(
        num_attention_heads=6, num_key_value_heads=3, hidden_size=48, initializer_range=0.2, max_position_embeddings=512
    )


@torch.no_grad()
def test_retrieval_score_is_the_share_of_needles_that_the_largest_weights_copy(base):
    """Distances are chosen so that some heads do look there, and the answers are what the model writes, in part."""
    model = LlamaForCausalLM.from_pretrained(base, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 200, (60,), generator=generator).tolist()
    for _ in range(12):
        ids.append(model(torch.tensor([ids])).logits[0, -1].argmax().item())
    ids[64] = 5  # the model has this one wrong, and from then on it may have any
    output = model(torch.tensor([ids]), output_attentions=True)
    likely = output.logits[0].argmax(-1).tolist()
    places = {p - int(w[0, h, p - 1].argmax()) for w in output.attentions for h in range(6) for p in (61, 62, 70)}
    answers = [Answer("copying", distance, 60, 66) for distance in sorted(places)]
    answers += [Answer("passkey", 3, 64, 65), Answer("passkey", 9, 66, 72)]
    expected, looks, found = torch.zeros(2, 6), torch.zeros(2, 6), 0
    for answer in answers:
        span = range(answer.start, answer.stop)
        right = [likely[p - 1] == ids[p] for p in span]
        if sum(right) / len(right) > 0.5:
            found += 1
            for layer, weights in enumerate(output.attentions):
                for head in range(6):
                    most = [int(weights[0, head, p - 1].argmax()) == p - answer.distance for p in span]
                    expected[layer, head] += sum(a and b for a, b in zip(most, right, strict=True)) / len(right)
                    looks[layer, head] += sum(weights[0, head, p - 1, p - answer.distance] for p in span) / len(right)
    assert 0 < found < len(answers) and expected.gt(0).sum() > 2
    model.set_attn_implementation("sdpa")
    scores = retrieval_scores(model, [Prompt(ids, answers)])
    torch.testing.assert_close(scores, (expected + TIES * looks) / found, rtol=1e-6, atol=1e-8)
    assert model.config._attn_implementation == "sdpa"


@pytest.fixture
def tokenizer(base):
    return AutoTokenizer.from_pretrained(base)


def test_a_text_hides_passkeys_and_ends_with_questions_and_answers(tokenizer):
    ids, count = make_text([7] * 3000, 3000, tokenizer, random.Random(0))
    said = tokenizer.decode(ids)
    assert abs(len(ids) - 3000) < 100 and ids.count(7) > 100
    hidden, asked = said[: -len(tokenizer.decode(ids[-count:]))], tokenizer.decode(ids[-count:])
    for ordinal in ("first", "second", "third", "fourth"):
        key = asked.split(f"what is the {ordinal} passkey to the vault?\nPasskey: ")[1].split("\n")[0]
        assert len(key.split()) == duo.WORDS and f"it's the {ordinal} passkey to the vault: {key}\n" in hidden


def test_gates_mix_full_attention_of_the_model_and_streaming_attention(base):
    model = LlamaForCausalLM.from_pretrained(base).eval()
    ids = torch.randint(3, 200, (1, 100), generator=torch.Generator().manual_seed(0))
    gates, plain = torch.ones(2, 3, requires_grad=True), model.model(ids, use_cache=False).last_hidden_state
    full, own = duo.mixed_states(model, gates, ids, 16, 4)
    torch.testing.assert_close(full, plain.detach())
    torch.testing.assert_close(own, plain, rtol=1e-4, atol=1e-4)
    streaming = duo.mixed_states(model, 0 * gates, ids, 16, 4)[1].detach()
    plan = StreamingPlan(router="none", local_window=16, local_start=0, context=128, num_active_heads=0)
    config, fits = plan_layers(plan, model.config, ranked_fits(torch.zeros(2, 6), plan, model.config))
    moh = MoHLlamaForCausalLM(config).eval()
    tensors = {
        f"model.layers.{n}.self_attn.{name}": own for n, fit in enumerate(fits) for name, own in fit.tensors.items()
    }
    moh.load_state_dict(model.state_dict() | tensors)
    with torch.no_grad():
        expected = moh.model(ids, use_cache=False).last_hidden_state
    assert (expected - plain).abs().max() > 0.1
    torch.testing.assert_close(streaming, expected, rtol=1e-4, atol=1e-4)
    assert model.config._attn_implementation == "sdpa" and model.model(ids, use_cache=False)[0].equal(plain)


def test_the_gate_of_a_head_without_effect_falls(base, tokenizer, monkeypatch):
    model = LlamaForCausalLM.from_pretrained(base).eval()
    monkeypatch.setattr(duo, "WORDS", 1)
    monkeypatch.setattr(duo, "LENGTHS", (260, 270))
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight[:, 16:32] = 0  # of the second of three groups
    text = torch.randint(3, 200, (600,), generator=torch.Generator().manual_seed(0))
    gates = train_gates(model, text, tokenizer, 8, 4, steps=30)
    assert gates.shape == (2, 3) and gates.min() >= 0 and gates.max() <= 1
    others = [gates[layer, group] for layer in range(2) for group in range(3) if (layer, group) != (1, 1)]
    assert gates[1, 1] < 0.65 and min(others) > gates[1, 1] + 0.1
    changed = [name for name, weight in model.state_dict().items() if not weight.equal(before[name])]
    assert changed == ["model.layers.1.self_attn.o_proj.weight"]
