"""The benchmark of one model by the code of two checkouts."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import checkouts

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(make_llama, convert, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "groups"
    flags = ["--fallback", "local", "--context", "64", "--local-window", "8", "--local-start", "16"]
    base = make_llama(num_attention_heads=4, num_key_value_heads=2)
    flags += ["--num-active-heads", "2", "--routing-granularity", "kv_group", "--heldout-tokens", "0"]
    assert convert(base, folder, *flags) == 0
    return folder


@pytest.mark.parametrize("task", ["prefill", "decode", "step"])
def test_a_turn_of_each_task(model, river, task):
    words = {"peer": ROOT, "model": model, "task": task, "text": river, "length": 64, "rows": 2, "steps": 2}
    turn = checkouts.prepare(argparse.Namespace(**words, dtype="float32"))
    first, second = turn(), turn()
    assert first["seconds"] > 0 and len(first["logits"]) == checkouts.SHOWN
    assert (first["logits"] == second["logits"]) == (task == "prefill")  # others go on


@pytest.mark.slow
def test_a_checkout_beside_itself_without_the_package(model, river, tmp_path):
    words = [str(ROOT), str(ROOT), "--model", str(model), "--task", "alone", "--text", str(river), "--length", "64"]
    words += ["--rounds", "1", "--json", str(tmp_path / "found.json")]
    subprocess.run([sys.executable, checkouts.__file__, *words], check=True)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["difference"] < 1e-5 and [len(own) for own in found["replies"]] == [1, 1]
    median, least, most = found["seconds"]
    assert 0 < least <= median <= most
    assert ("mib" in found) == Path("/proc/self/clear_refs").exists()
