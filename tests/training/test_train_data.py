"""What a run reads: from text or from shards, in any number of processes, and what it says of it."""

import json
from pathlib import Path

import pytest
from trained import read_log

from moh_llm.cli import main
from moh_llm.training.loop import train


@pytest.mark.slow
def test_text_and_shards_give_the_same_run(configure, mixture_file, model_folder, finished_run, run, tmp_path):
    shards = tmp_path / "tokens"
    flags = ["--tokenizer", str(model_folder), "--output-dir", str(shards)]
    assert main(["tokenize", str(mixture_file), *flags]) == 0
    output = str(tmp_path / "again")
    train(configure(output_dir=output, **{"data.mixture": str(shards)}))
    assert read_log(Path(output)) == read_log(finished_run)
    # A run that was begun from text accepts shards of the same text.
    record = train(configure())
    record.config["data"]["mixture"] = str(shards)
    assert train(configure(**{"data.mixture": str(shards)})) == record


def test_sources_are_read_by_their_weights_and_checkpoints_know_it(configure, tmp_path):
    train(configure(max_steps=10, **{"checkpoint.save_steps": 4}))
    log = [line for line in read_log(tmp_path / "run") if "loss" in line]
    for line in log:
        read = line["tokens_of_source"]
        # Within as many blocks as there are sources of what was planned.
        assert abs(read["one"] - 0.7 * line["tokens"]) <= 2 * 32
    for step in (8, 10):
        checkpoint = json.loads((tmp_path / "run" / "checkpoints" / f"step-{step:06d}" / "checkpoint.json").read_text())
        assert {n: e["tokens"] for n, e in checkpoint["data"].items()} == log[step - 1]["tokens_of_source"]
