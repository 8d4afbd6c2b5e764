"""The record against direct calls on batches made by hand; time by length with a false clock."""

import json
from collections.abc import Callable, Sequence

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from moh_llm.analysis import heads as module
from moh_llm.analysis.heads import analyse, dense_attention, measure_load, seconds_by_length
from moh_llm.errors import UserError
from moh_llm.flops import forward_flops
from moh_llm.metrics import Batch

ROW = 64  # the tiny model's context
TEXTS = {
    "short": ["A mill,", " two boats", "", "and a river that was high that spring, below the poplars."] * 3,
    "long": ["The boats lay tied to the poplars below the mill. " * 3, "x", "No more."],
}
TOKENS = {"short": 150, "long": 73}  # of each text, of at most 150


@pytest.fixture
def by_hand(tokenizer) -> Callable[[Sequence[str], int], list[Batch]]:
    """The first tokens of some documents: full rows in one batch, the rest as another."""

    def make(documents: Sequence[str], tokens: int) -> list[Batch]:
        packed = []
        for document in documents:
            packed += list(enumerate(tokenizer(document)["input_ids"][-ROW:])) if document else []
        rows: list[list[tuple[int, int]]] = []
        for number, (place, token) in enumerate(packed[:tokens]):
            if number % ROW == 0:
                rows.append([])
            # What goes on from the row before is read from the row's start on.
            rows[-1].append((min(place, rows[-1][-1][0] + 1) if rows[-1] else 0, token))
        parts = [row for row in rows if len(row) == ROW], [row for row in rows if len(row) < ROW]
        packed = [torch.tensor(part) for part in parts if part]
        return [{"input_ids": part[..., 1], "position_ids": part[..., 0]} for part in packed]

    return make


def test_parts_are_those_of_direct_calls(make_moh, unlike_plan, tokenizer, by_hand) -> None:
    model = make_moh(vocab_size=257, **unlike_plan)
    found = analyse(model, tokenizer, TEXTS, tokens_per_text=150, lengths=[3, 64, 65])
    assert json.loads(json.dumps(found, allow_nan=False)) == found

    batches = {name: by_hand(documents, 150) for name, documents in TEXTS.items()}
    assert {name: sum(part["input_ids"].numel() for part in text) for name, text in batches.items()} == TOKENS
    measures = measure_load(model, batches)
    assert {name: found[name] for name in measures} == measures

    heads = model.config.num_attention_heads
    assert (found["heads"], found["device"], found["dtype"]) == (heads, "cpu", "float64")
    assert found["num_active"] == model.config.active_heads_per_layer
    assert found["all_heads_until"] == (3 if unlike_plan.get("head_fallback") == "local" else 0)
    assert [cost["length"] for cost in found["flops"]] == [cost["length"] for cost in found["seconds"]] == [3, 64]
    assert found["flops"][0]["moh"] == forward_flops(model.config, 3)
    assert found["flops"][0]["dense"] == forward_flops(model.config, 3, dense=True)
    assert all(cost["moh"] > 0 and cost["dense"] > 0 for cost in found["seconds"])


def test_the_model_is_left_as_it_is_set(make_moh, tokenizer) -> None:
    model = make_moh(vocab_size=257)
    model.set_active_heads([2, 4])
    before = model.config._attn_implementation
    found = analyse(model, tokenizer, TEXTS, lengths=[])
    assert found["num_active"] == [2, 4] and found["head_load"]["load"] == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert [router.num_active for router in model.routers] == [2, 4]
    assert model.config._attn_implementation == before


def test_models_without_a_choice_and_texts_without_tokens_are_refused(make_moh, tokenizer) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    dense = LlamaForCausalLM(LlamaConfig(vocab_size=257, **sizes))
    with pytest.raises(UserError, match="a LlamaForCausalLM has no heads to choose among"):
        analyse(dense, tokenizer, TEXTS)
    with pytest.raises(UserError, match="no routed heads"):
        analyse(make_moh(vocab_size=257, num_shared_heads=4, num_active_heads=4), tokenizer, TEXTS)
    model = make_moh(vocab_size=257)
    for texts in ({}, {"empty": []}, {**TEXTS, "empty": [""]}):
        with pytest.raises(UserError, match="no tokens"):
            analyse(model, tokenizer, texts)


def test_seconds_are_medians_of_turns(make_moh, monkeypatch) -> None:
    """The clock moves only while the model runs: by numbers of our choice."""
    model = make_moh(num_shared_heads=1, num_active_heads=2)
    # For each length a turn that is not counted, and three that are.
    durations = iter([100.0, 200.0, 5.0, 10.0, 1.0, 30.0, 9.0, 20.0, 300.0, 400.0, 2.0, 8.0, 4.0, 7.0, 3.0, 6.0])
    now, calls = [0.0], []

    def forward(input_ids: torch.Tensor, use_cache: bool) -> None:
        now[0] += next(durations)
        dense = ["forward" in vars(layer.self_attn) for layer in model.model.layers]
        calls.append((tuple(input_ids.shape), use_cache, dense))

    monkeypatch.setattr(model, "forward", forward)
    monkeypatch.setattr(module, "_SLOW", 1e9)
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    found = seconds_by_length(model, [3, 5])
    assert [tuple(one.values()) for one in found] == [(3, 5.0, 20.0), (5, 3.0, 7.0)]
    turns = [[False, False], [True, True]] * 4
    assert calls == [((1, length), False, dense) for length in (3, 5) for dense in turns]


@pytest.mark.parametrize(
    "fields", [{"converted": True}, {"router_type": "two_stage", "num_key_value_heads": 4}], ids=["value", "two_stage"]
)
@torch.no_grad()
def test_dense_attention_is_the_base_without_its_routers(make_moh, batch, fields) -> None:
    model = make_moh(num_shared_heads=1, num_active_heads=2, **fields)
    inputs = {name: batch[name] for name in ("input_ids", "position_ids")} | {"use_cache": False}
    before = model(**inputs).logits
    with model.all_heads_active():
        expected = model(**inputs).logits
    routed = []
    handles = [router.register_forward_hook(lambda *_: routed.append(1)) for router in model.routers]
    with dense_attention(model):
        assert torch.equal(model(**inputs).logits, expected)
    assert not routed
    assert torch.equal(model(**inputs).logits, before) and len(routed) == 2
    assert not torch.equal(before, expected)
    for handle in handles:
        handle.remove()
