"""A conversion that added tokens is trained: it teaches itself, since its base has no rows for them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny import save_wider_tokenizer
from trained import read_record

from moh_llm.errors import UserError
from moh_llm.hub.card import build_card
from moh_llm.records.conversion import read_chain
from moh_llm.training.loop import train


@pytest.fixture(scope="session")
def wider_model(made_once: Callable[..., Path], base_folder: Path, convert: Callable[..., int]) -> Path:
    """A conversion of `base_folder` with four more tokens."""
    tokenizer = made_once("tokenizer-of-more", save_wider_tokenizer)
    flags = ["--tokenizer", str(tokenizer), "--num-active-heads", "2"]
    return made_once("moh-of-more", lambda folder: convert(base_folder, folder, *flags))


def test_new_tokens_are_trained_from_run_to_run(
    configure, wider_model: Path, base_folder: Path, read_tensors, tmp_path: Path
) -> None:
    embedding = "model.embed_tokens.weight"
    first = configure(model=str(wider_model), output_dir=str(tmp_path / "one"), max_steps=2)
    train(first)
    assert read_record(tmp_path / "one")["reference"] == "base"
    before, after = (read_tensors(folder)[embedding] for folder in (wider_model, tmp_path / "one" / "model"))
    assert before.shape == after.shape == (320, 32)
    assert not torch.equal(before[257], after[257])  # "th" is in the text
    # The base has other weights than the model now, and could not teach it.
    second = {"model": str(tmp_path / "one" / "model"), "output_dir": str(tmp_path / "two"), "max_steps": 2}
    with pytest.raises(UserError, match=r"base=.* has no rows for 4 tokens of model=.*; drop base"):
        train(configure(**second, base=str(base_folder)))
    record = train(configure(**second))
    assert record.reference == "start" and record.evaluation.kl > 0
    entries = read_chain(tmp_path / "two" / "model").entries
    assert [entry.kind for entry in entries] == ["conversion", "run", "run"]
    assert entries[0].new_tokens == 4 and [entry.teacher for entry in entries[1:]] == ["base", "start"]
    assert ", 4 new tokens" in build_card(tmp_path / "two" / "model", None)
