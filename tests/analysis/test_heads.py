"""Head load against counting gates one by one; heads of a text's tokens against the loops, and tokens as strings."""

import math

import pytest
import torch
from transformers import AutoTokenizer

from moh_llm.analysis.heads import head_load, load_balance, token_heads, token_strings
from moh_llm.errors import UserError

TEXT = "A mill,\n two boats"


def test_load_is_that_of_a_count(make_moh, batches, recompute, plan) -> None:
    model = make_moh(**plan)
    found = head_load(model, batches)
    assert found.tokens == 37
    assert found.shared_heads == model.config.shared_heads_per_layer
    for layer, naive in enumerate(recompute(model, batches)):
        heads = range(model.config.num_attention_heads)
        counts = [sum(1 for token in naive.gates if token[head] != 0) for head in heads]
        assert found.load[layer] == [count / 37 for count in counts]
        routed = [counts[head] for head in model.config.routed_heads(layer)]
        routed = routed[:: model.config.heads_per_group]  # a group's heads have one load, and are balanced as one
        if len(routed) < 2 or not sum(routed):
            assert found.balance[layer] is None
        else:
            entropy = sum(-n / sum(routed) * math.log(n / sum(routed)) for n in routed if n)
            assert found.balance[layer] == pytest.approx(entropy / math.log(len(routed)))


def test_all_heads_on_is_a_load_of_one(make_moh, batches, plan) -> None:
    model = make_moh(**plan)
    before = head_load(model, batches)
    with model.all_heads_active():
        found = head_load(model, batches)
    assert found.load == [[1.0] * model.config.num_attention_heads] * 2
    assert all(balance is None or balance == pytest.approx(1) for balance in found.balance)
    assert before.load != found.load and head_load(model, batches) == before


def test_balance_of_known_loads() -> None:
    assert load_balance([0.5, 0.5, 0.5, 0.5]) == pytest.approx(1)
    assert load_balance([1.0, 0.0, 1.0, 0.0]) == pytest.approx(math.log(2) / math.log(4))
    assert load_balance([1.0, 0.0, 0.0]) == 0
    assert load_balance([0.3]) is None and load_balance([]) is None and load_balance([0.0, 0.0]) is None


def test_each_token_has_the_heads_of_the_loops(make_moh, recompute, tokenizer, plan) -> None:
    model = make_moh(vocab_size=257, **plan)
    ids = torch.tensor([tokenizer(TEXT)["input_ids"]])
    batch = {"input_ids": ids, "position_ids": torch.arange(ids.shape[1])[None]}
    wanted = [(layer.gates != 0).tolist() for layer in recompute(model, [batch])]
    found = token_heads(model, tokenizer, TEXT)
    last = 0 if len(model.config.shared_heads_per_layer[1]) == 4 else 1
    assert found.layers == [last] and found.on == [wanted[last]]
    assert found.tokens == [*"A mill,", "\\n", *" two boats"]


def test_parts_of_characters_go_by_their_names(tokenizer) -> None:
    ids = tokenizer("a\u00e9b\u2028")["input_ids"]
    strings = token_strings(tokenizer, ids)
    assert strings[0] == "a" and strings[3] == "b"
    assert strings[1:3] == tokenizer.convert_ids_to_tokens(ids[1:3])
    assert all(string.isprintable() and string for string in strings)


def test_spaces_of_a_tokenizer_that_drops_the_first_one(shared) -> None:
    tokenizer = AutoTokenizer.from_pretrained(shared / "data" / "checkpoints" / "stories260K-hf")
    text = "Once upon a time, there was a cat.\nThe end"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    strings = token_strings(tokenizer, ids)
    assert len(strings) == len(ids) < len(text)
    assert "".join(strings).removeprefix(" ") == text.replace("\n", "\\n")


def test_empty_texts_are_refused(make_moh, tokenizer) -> None:
    with pytest.raises(UserError, match="no tokens"):
        token_heads(make_moh(vocab_size=257), tokenizer, "")
