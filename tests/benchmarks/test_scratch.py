"""The benchmark that trains methods from scratch: the real command at a tiny size, and what its methods are."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import scratch
from scratch import SIZES, difference_interval, make_methods

METHODS = ["moh-75", "moa-75", "switchhead", "static-50", "moh-75-quantized", "moh-100"]


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Run the command with further arguments: returns its status and the record that it wrote."""
    text = tmp_path / "text.jsonl"
    documents = [f"{i} boats were counted on the river at noon, and {i * 7} birds. " * 3 for i in range(400)]
    text.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    monkeypatch.setattr(scratch, "VOCABULARY", 300)
    numbers = {"--size": "tiny", "--tokens": 512, "--context": 32, "--batch": 4, "--held-out-tokens": 256}
    numbers["--learning-rate"] = 0.01

    def run(output: str, *arguments: str) -> tuple[int, dict]:
        words = [str(word) for pair in numbers.items() for word in pair]
        monkeypatch.setattr(
            sys, "argv", ["scratch.py", str(text), "--output-dir", str(tmp_path / output), *words, *arguments]
        )
        status = scratch.main()
        path = tmp_path / output / "scratch.json"
        return status, json.loads(path.read_text()) if path.exists() else {}

    return run


def test_methods_are_trained_and_compared(command, capsys, tmp_path):
    status, record = command("out", "--seeds", "1", "--methods", *METHODS)
    assert status == 0
    printed = capsys.readouterr().out
    assert (tmp_path / "out" / "tokenizer" / "tokenizer.json").exists()
    assert "at equal tokens" in printed and "at equal flops" in printed and printed.count("\nmoh-75 ") == 2
    dense = record["methods"]["dense"]["flops_per_token"]
    for equal in ("tokens", "flops"):
        rows = {row["method"]: row for row in record["tables"][equal]}
        assert list(rows) == ["dense", *METHODS]
        for name, row in rows.items():
            # Training has begun: a model that knows nothing has the logarithm of its vocabulary.
            assert 3 < row["loss"] < np.log(300)
            assert ("difference" in row) == (name != "dense")
            if equal == "flops":
                flops = row["tokens"] * record["methods"][name]["flops_per_token"]
                assert flops == pytest.approx(rows["dense"]["tokens"] * dense, rel=0.5 / 4)
            else:
                assert row["tokens"] == 512
    tokens = record["held_out"]["tokens_of_documents"]
    losses = {row["method"]: row["loss"] for row in record["tables"]["tokens"]}
    nats = record["runs"]["switchhead, seed 0, 4 steps"]["nats"]
    assert len(nats) == len(tokens) and sum(nats) / sum(tokens) == pytest.approx(losses["switchhead"])
    assert len(set(losses.values())) == len(losses)


def test_an_interrupted_command_goes_on(command, monkeypatch, capsys):
    arguments = ["--methods", "moh-75", "moa-50", "--seeds", "2", "--equal", "tokens"]
    _, whole = command("whole", *arguments)
    train, trained = scratch.train, []

    def interrupted(*args):
        if len(trained) == 3:
            raise RuntimeError  # a signal would end pytest where the command does not go on
        trained.append(train(*args))

    monkeypatch.setattr(scratch, "train", interrupted)
    with pytest.raises(RuntimeError):
        command("parts", *arguments)
    trained.clear()
    status, parts = command("parts", *arguments)
    assert status == 0 and len(trained) == 3
    assert list(parts["runs"]) == list(whole["runs"])
    for name, run in whole["runs"].items():
        assert parts["runs"][name]["nats"] == run["nats"], name
    capsys.readouterr()
    status, _ = command("parts", *arguments, "--learning-rate", "0.002")
    assert status == 1 and "is of another learning_rate" in capsys.readouterr().err


@pytest.mark.parametrize("size", SIZES)
def test_sizes_are_matched(size):
    methods = make_methods(SIZES[size], 4096, 512)
    flops = {name: method.flops_per_token(512) for name, method in methods.items()}
    inner = {name: methods[name].parameters()[1] for name in ("dense", "moa-75", "moa-50", "switchhead", "moh-75")}
    for name in ("moa-75", "moa-50", "switchhead"):
        assert inner[name] == pytest.approx(inner["dense"], rel=0.004)
    assert 0 < inner["moh-75"] - inner["dense"] < 0.02 * inner["dense"]
    large = "dense", "dense-averaged", "moh-100", "moh-100-normalized"
    assert all(flops[name] < flops["dense"] for name in methods if name not in large)
    assert flops["dense-averaged"] == flops["dense"]
    assert 0 < flops["moh-100"] - flops["dense"] < 0.02 * flops["dense"]  # its routers
    for percent in (75, 50):
        assert flops[f"static-{percent}"] < flops[f"moh-{percent}"]


def test_intervals_are_of_documents_and_seeds():
    generator = np.random.default_rng(1)
    tokens = generator.integers(50, 200, 300)
    reference = generator.normal(3, 0.1, (3, 300)) * tokens
    # Documents differ by 0.2 around 0.05: a standard error of 0.2 / sqrt(300), and more since they weigh unequally.
    nats = reference + generator.normal(0.05, 0.2, 300) * tokens
    low, high = difference_interval(tokens, nats, reference)
    assert low < 0.05 < high and 0.04 < high - low < 0.06
    # Seeds that differ by much more than documents do make it wide.
    low, high = difference_interval(tokens, nats + np.array([[-1.0], [0], [1]]) * tokens, reference)
    assert high - low > 1
