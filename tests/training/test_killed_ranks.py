"""SIGKILL of one of four processes under FSDP2, at random moments and while a checkpoint is written."""

import random
import time
from pathlib import Path

import forks
import pytest
import torch
from safetensors.torch import load_file
from trained import read_checkpoint, read_log
from ways import ROOT, WAYS

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch is built without torch.distributed")
# Two seconds between a checkpoint's bytes and its end.
SLOWLY = """
import sys, time
from moh_llm.cli import main
from moh_llm.training import checkpoints
mark = checkpoints.mark_files
checkpoints.mark_files = lambda *given: time.sleep(2) or mark(*given)
sys.exit(main(["train", *sys.argv[1:]]))
"""
KEYS = {"max_steps": 60, "checkpoint.save_steps": 8, "data.micro_batch_size": 1, "evaluation.eval_steps": 30}
WORDS = [f"--{name}={value}" for name, value in KEYS.items()]


def steps_in(output: Path) -> int:
    """Lines of the log."""
    return len((output / "log.jsonl").read_text().splitlines()) if (output / "log.jsonl").exists() else 0


@pytest.mark.slow
def test_the_next_start_goes_on_from_a_complete_checkpoint(recipe, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    done = forks.run(
        "train.py", recipe, *WORDS, f"--output-dir={whole}", folder=ROOT, environment=WAYS["fsdp2"], processes=4
    )
    assert done.returncode == 0, done.stderr[-3000:]
    words = ["-c", SLOWLY, recipe, *WORDS, f"--output-dir={broken}"]
    draw = random.Random(0)
    # Killed before there is a checkpoint, while one is written, and when one is complete.
    for reached in ("checkpoints", "checkpoints/.step-*/*", "checkpoints/step-*/checkpoint.json"):
        before = steps_in(broken)
        programs = forks.start(words, ROOT, WAYS["fsdp2"], processes=4)
        deadline = time.monotonic() + 300
        while steps_in(broken) < before + 3 or not list(broken.glob(reached)):
            assert all(program.poll() is None for program in programs), programs[0].stderr[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.001)
        if ".step" not in reached:
            time.sleep(draw.random())
        draw.choice(programs).kill()
        assert forks.finish(programs) != 0
        assert list(broken.glob("checkpoints/.step-*")) or ".step" not in reached
    done = forks.run(*words, folder=ROOT, environment=WAYS["fsdp2"], processes=4)
    assert done.returncode == 0 and "resumed from" in done.stdout, done.stderr[-3000:]
    assert read_log(broken) == read_log(whole)
    last = [read_checkpoint(folder / "checkpoints" / "step-000060") for folder in (broken, whole)]
    last += [load_file(folder / "model" / "model.safetensors") for folder in (broken, whole)]
    for mine, others in (last[:2], last[2:]):
        assert mine.keys() == others.keys() and all(torch.equal(tensor, others[name]) for name, tensor in mine.items())
    assert not list(broken.glob("checkpoints/.*"))
