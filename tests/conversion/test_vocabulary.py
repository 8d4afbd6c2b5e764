"""A base that gets more tokens: what it answers about its own tokens stays."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny import save_wider_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from moh_llm.modeling import MoHLlamaForCausalLM
from moh_llm.records.conversion import read_chain, read_conversion

OLD = 257  # tokens of the base: bytes, and the end of a text
NEW = ["th", "the", " mill", "<|user|>"]


@pytest.fixture(scope="session")
def wider(made_once: Callable[..., Path]) -> Path:
    """A tokenizer with four more tokens than the base's."""
    return made_once("wider-tokenizer", save_wider_tokenizer)


def expected_row(table: torch.Tensor, tokenizer, token: str) -> torch.Tensor:
    """The row of a new token, given the base's rows."""
    if token in ("", "<|user|>"):
        return table[:OLD].double().mean(0).float()
    return torch.stack([table[tokenizer.convert_tokens_to_ids(byte.replace(" ", "Ġ"))] for byte in token]).mean(0)


@pytest.mark.parametrize("tied", [True, False])
def test_the_bases_tokens_stay_as_they_were(
    make_llama, convert, wider: Path, read_tensors, tmp_path: Path, tied: bool, one_thread: None
) -> None:
    # Of several files, with rows that no token of the base has.
    base = make_llama(tie_word_embeddings=tied, vocab_size=OLD + 1, max_shard_size="40KB", max_position_embeddings=64)
    output = tmp_path / "moh"
    assert convert(base, output, "--tokenizer", str(wider)) == 0
    before, after = read_tensors(base), read_tensors(output)
    names = ["model.embed_tokens.weight"] + ["lm_head.weight"] * (not tied)
    tokenizer, known = AutoTokenizer.from_pretrained(output), AutoTokenizer.from_pretrained(base)
    assert tokenizer.convert_tokens_to_ids(NEW) == [257, 258, 259, 260]
    assert tokenizer.chat_template == "{{ messages }}"
    for name, tensor in before.items():
        kept = after[name][:OLD] if name in names else after[name]
        assert torch.equal(kept, tensor[: len(kept)]), name
    for name in names:
        assert after[name].shape == (320, 32)
        for token in NEW:
            row = after[name][tokenizer.convert_tokens_to_ids(token)]
            torch.testing.assert_close(row, expected_row(before[name], known, token), rtol=1e-5, atol=1e-6)
        mean = expected_row(before[name], known, "")
        torch.testing.assert_close(after[name][261:], mean.expand(59, -1), rtol=1e-5, atol=1e-6)

    moh, dense = MoHLlamaForCausalLM.from_pretrained(output).eval(), AutoModelForCausalLM.from_pretrained(base).eval()
    ids = torch.randint(1, OLD, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), moh.all_heads_active():
        assert torch.equal(moh.model(ids).last_hidden_state, dense.model(ids).last_hidden_state)
        torch.testing.assert_close(moh(ids).logits[..., :OLD], dense(ids).logits[..., :OLD], rtol=1e-6, atol=1e-6)


def test_records_say_what_was_added(make_llama, convert, wider: Path, tmp_path: Path, capsys) -> None:
    base, output = make_llama(max_position_embeddings=64), tmp_path / "moh"
    assert convert(base, output, "--tokenizer", str(wider)) == 0
    assert "4 new tokens" in capsys.readouterr().out
    record, (entry,) = read_conversion(output), read_chain(output).entries
    added = record.vocabulary
    assert (added.tokenizer, added.new_tokens, entry.new_tokens) == (wider.name, 4, 4)
    assert entry.dense_sha256 == record.base.dense_sha256 != added.dense_sha256 == entry.made.dense
    assert record.base.name == str(base)
    assert record.verification.all_heads_active.equals_base


REFUSED = {
    "own": "has no token that .* lacks; drop --tokenizer",
    "moved": r"token .* has id [12] in .*, and this tokenizer gives it id [12]; add tokens to the base's own",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_other_tokenizers_are_refused(make_llama, convert, byte_tokenizer, tmp_path: Path, capsys, kind: str) -> None:
    folder = tmp_path / kind
    folder.mkdir()
    byte_tokenizer(folder)
    if kind == "moved":
        content = json.loads((folder / "tokenizer.json").read_text())
        vocabulary = content["model"]["vocab"]
        first, second = (token for token, number in vocabulary.items() if number in (1, 2))
        vocabulary[first], vocabulary[second] = 2, 1
        (folder / "tokenizer.json").write_text(json.dumps(content))
    assert convert(make_llama(), tmp_path / "moh", "--tokenizer", str(folder)) != 0
    assert re.search(REFUSED[kind], capsys.readouterr().err)
    assert not (tmp_path / "moh").exists()
