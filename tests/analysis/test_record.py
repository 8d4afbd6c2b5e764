"""The record against direct calls of the functions it is made of, on batches made by hand."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from moh_llm.analysis import record as module
from moh_llm.analysis.cost import flops_by_length
from moh_llm.analysis.features import feature_rank, similarity_table
from moh_llm.analysis.heads import head_load, token_heads
from moh_llm.analysis.record import SENTENCE, analyse
from moh_llm.analysis.scores import routing_scores
from moh_llm.analysis.watch import last_routed_layer
from moh_llm.errors import UserError
from moh_llm.metrics import Batch

ROW = 64  # the tiny model's context
TEXTS = {
    "short": ["A mill,", " two boats", "", "and a river that was high that spring, below the poplars."] * 3,
    "long": ["The boats lay tied to the poplars below the mill. " * 3, "x", "No more."],
}
TOKENS = {"short": 150, "long": 73}  # of each text, of at most 150


@pytest.fixture
def tokenizer(byte_tokenizer, tmp_path):
    byte_tokenizer(tmp_path / "tokenizer")
    return AutoTokenizer.from_pretrained(tmp_path / "tokenizer")


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


def test_parts_are_those_of_direct_calls(make_moh, unlike_plan, tokenizer, by_hand, monkeypatch) -> None:
    monkeypatch.setattr(module, "_COSTLY_TOKENS", 80)
    model = make_moh(vocab_size=257, **unlike_plan)
    found = analyse(model, tokenizer, TEXTS, "two boats", tokens_per_text=150, lengths=[3, 64, 65])
    assert json.loads(json.dumps(found, allow_nan=False)) == found

    batches = {name: by_hand(documents, 150) for name, documents in TEXTS.items()}
    assert {name: sum(part["input_ids"].numel() for part in text) for name, text in batches.items()} == TOKENS
    everything = [batch for text in batches.values() for batch in text]
    assert found["texts"] == TOKENS
    assert found["head_load"] == asdict(head_load(model, everything))
    last, by_text = last_routed_layer(model), found["head_load_by_text"]
    assert (by_text["layer"], by_text["tokens"]) == (last, TOKENS)
    assert by_text["shared_heads"] == model.config.shared_heads_per_layer[last]
    for name, text in batches.items():
        load = head_load(model, text)
        assert (by_text["load"][name], by_text["balance"][name]) == (load.load[last], load.balance[last])
    assert found["token_heads"] == {"text": "two boats", **asdict(token_heads(model, tokenizer, "two boats"))}

    few = [batch for documents in TEXTS.values() for batch in by_hand(documents, 40)]
    table = {which: asdict(similarity) for which, similarity in similarity_table(model, few).items()}
    assert found["similarity"] == {"tokens": 80, **table}
    assert found["feature_rank"] == asdict(feature_rank(model, everything))

    scores = found["routing_scores_by_text"]
    assert scores["layer"] == last and list(scores["texts"]) == list(TEXTS)
    recorded = found["routing_scores"]["layers"] + list(scores["texts"].values())
    of_texts = [routing_scores(model, text)[last] for text in batches.values()]
    for layer, direct in zip(recorded, routing_scores(model, everything) + of_texts, strict=True):
        for kind, distribution in asdict(direct).items():
            if distribution is not None:
                fine = distribution.pop("histogram")
                distribution["histogram"] = [sum(fine[5 * number : 5 * number + 5]) for number in range(20)]
                assert sum(layer[kind]["histogram"]) == layer[kind]["count"]
            assert layer[kind] == distribution
    assert found["routing_scores"]["bins"] == 20 and len(found["routing_scores"]["quantiles"]) == 5

    heads = model.config.num_attention_heads
    assert (found["layers"], found["heads"], found["device"], found["dtype"]) == (2, heads, "cpu", "float64")
    assert found["num_shared"] == [len(ids) for ids in model.config.shared_heads_per_layer]
    assert found["num_active"] == model.config.active_heads_per_layer
    assert found["all_heads_until"] == (3 if unlike_plan.get("head_fallback") == "local" else 0)
    assert found["flops"] == [asdict(cost) for cost in flops_by_length(model.config, [3, 64])]
    assert [cost["length"] for cost in found["seconds"]] == [3, 64]
    assert all(cost["moh"] > 0 and cost["dense"] > 0 for cost in found["seconds"])


def test_defaults_on_a_longer_context(make_moh, tokenizer, monkeypatch, capsys) -> None:
    monkeypatch.setattr(module, "_LONGEST_TIMED", 256)
    model = make_moh(vocab_size=257, max_position_embeddings=600)
    found = analyse(model, tokenizer, {"one": ["poplars " * 300] * 3})
    assert found["texts"] == {"one": 1024} and found["similarity"]["tokens"] == 1024
    assert [cost["length"] for cost in found["flops"]] == [128, 256, 512]
    assert [cost["length"] for cost in found["seconds"]] == [128, 256]
    assert found["token_heads"]["text"] == SENTENCE == "".join(found["token_heads"]["tokens"])
    # Seven passes over 1,024 tokens, and four turns of two passes at each timed length: 10,240 tokens.
    assert re.search(r"analysis: 100%.* 10\.2k/10\.2k ", capsys.readouterr().err)


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


def test_numbers_that_json_has_no_sign_for_are_refused(make_moh, tokenizer) -> None:
    model = make_moh(vocab_size=257)
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight.fill_(float("nan"))
    with pytest.raises(UserError, match="do not give finite numbers; dtype float32 may help"):
        analyse(model, tokenizer, TEXTS)
