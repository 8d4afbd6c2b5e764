"""Heads of a text's tokens against the loops, and tokens as strings."""

import json
from dataclasses import asdict

import pytest
import torch
from transformers import AutoTokenizer

from moh_llm.analysis.tokens import token_heads, token_strings
from moh_llm.errors import UserError

TEXT = "A mill,\n two boats"


@pytest.fixture
def tokenizer(byte_tokenizer, tmp_path):
    byte_tokenizer(tmp_path / "tokenizer")
    return AutoTokenizer.from_pretrained(tmp_path / "tokenizer")


def test_each_token_has_the_heads_of_the_loops(make_moh, recompute, tokenizer, plan) -> None:
    model = make_moh(vocab_size=257, **plan)
    ids = torch.tensor([tokenizer(TEXT)["input_ids"]])
    batch = {"input_ids": ids, "position_ids": torch.arange(ids.shape[1])[None]}
    wanted = [(layer.gates != 0).tolist() for layer in recompute(model, [batch])]
    found = token_heads(model, tokenizer, TEXT, layers=[1, 0])
    assert found.layers == [1, 0] and found.on == wanted[::-1]
    assert found.tokens == [*"A mill,", "\\n", *" two boats"]
    last = 0 if len(model.config.shared_heads_per_layer[1]) == 4 else 1
    default = token_heads(model, tokenizer, TEXT)
    assert default.layers == [last] and default.on == [wanted[last]]
    assert json.loads(json.dumps(asdict(found))) == asdict(found)


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


def test_unknown_layers_and_empty_texts_are_refused(make_moh, tokenizer) -> None:
    model = make_moh(vocab_size=257)
    for layer in (2, -1):
        with pytest.raises(UserError, match=f"layer={layer} must lie between 0 and 1"):
            token_heads(model, tokenizer, TEXT, layers=[layer])
    with pytest.raises(UserError, match="no tokens"):
        token_heads(model, tokenizer, "")
