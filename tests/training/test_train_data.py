"""What a run reads: from text or from shards, in any number of processes, and what it says of it."""

import json
from pathlib import Path

import pytest
from cards import check_card
from trained import read_log
from transformers import AutoTokenizer

from moh_llm.cli import main
from moh_llm.errors import UserError
from moh_llm.hub.card import write_local_card
from moh_llm.training import loop
from moh_llm.training.loop import train


@pytest.mark.slow
def test_text_and_shards_and_reading_ahead_give_the_same_run(
    configure, mixture_file, model_folder, finished_run, run, tmp_path, monkeypatch
):
    shards = tmp_path / "tokens"
    flags = ["--tokenizer", str(model_folder), "--output", str(shards)]
    assert main(["tokenize", str(mixture_file), *flags]) == 0
    for readers, mixture in ((0, shards), (2, mixture_file)):
        monkeypatch.setattr(loop, "reading_processes", lambda device, number=readers: number)
        output = str(tmp_path / f"again{readers}")
        train(configure(output_dir=output, **{"data.mixture": str(mixture)}))
        assert read_log(Path(output)) == read_log(finished_run)
    # A run that was begun from text accepts shards of the same text.
    record = train(configure())
    record.config["data"]["mixture"] = str(shards)
    assert train(configure(**{"data.mixture": str(shards)})) == record


def test_the_receipt_is_logged_and_kept(configure, tmp_path):
    record = train(configure(max_steps=10, **{"checkpoint.save_steps": 4}))
    log = [line for line in read_log(tmp_path / "run") if "loss" in line]
    for line in log:
        read = line["tokens_of_source"]
        assert sum(read.values()) == line["tokens"] == line["step"] * 128
        # Within as many blocks as there are sources of what was planned.
        assert abs(read["one"] - 0.7 * line["tokens"]) <= 2 * 32
    receipt = record.data_read
    assert {name: entry["tokens"] for name, entry in receipt.items()} == log[-1]["tokens_of_source"]
    for step in (8, 10):
        checkpoint = json.loads((tmp_path / "run" / "checkpoints" / f"step-{step:06d}" / "checkpoint.json").read_text())
        assert {n: e["tokens"] for n, e in checkpoint["data"].items()} == log[step - 1]["tokens_of_source"]
    write_local_card(tmp_path / "run" / "model")
    read = check_card((tmp_path / "run" / "model" / "README.md").read_text())["Text it was trained on"]
    assert "1,280 tokens of the mixture tiny, in sequences of 32 tokens" in read
    for name, entry in receipt.items():
        assert f"| `{name}` | {entry['weight']:.2%} | {entry['share']:.2%} | {entry['tokens']:,} |" in read


def test_too_many_epochs_are_refused_before_the_first_step(configure, mixture_file, tmp_path):
    text = mixture_file.read_text().replace("weight: 0.3", "max_epochs: 0.5\n    weight: 0.3")
    other = mixture_file.with_name("bounded.yaml")
    other.write_text(text)
    with pytest.raises(UserError, match=r"source two would be read \d+\.\d\d times .* more than its max_epochs=0\.5"):
        train(configure(max_steps=2000, **{"data.mixture": str(other)}))
    assert not (tmp_path / "run").exists()


def test_shards_of_another_tokenizer_are_refused(configure, mixture_file, model_folder, tmp_path):
    other = AutoTokenizer.from_pretrained(model_folder)
    other.add_tokens(["river"])
    other.save_pretrained(tmp_path / "other")
    flags = ["--tokenizer", str(tmp_path / "other"), "--output", str(tmp_path / "tokens")]
    assert main(["tokenize", str(mixture_file), *flags]) == 0
    with pytest.raises(UserError, match=r"were made with tokenizer .*other \(\w{12}\), not with"):
        train(configure(**{"data.mixture": str(tmp_path / "tokens")}))
