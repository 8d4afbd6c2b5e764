"""Two processes on the CPU give what one gives, and agree on what went wrong."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forks
import pytest

pytest.importorskip("lm_eval")

ROOT = Path(__file__).resolve().parents[2]


def on_two_processes(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return forks.run(*words, folder=folder, environment=variables, processes=2)


SUITE = """
name: some
title: Some of each kind
benchmarks:
  - {from: paper, name: HellaSwag}
  - {from: paper, name: TruthfulQA}
  - {from: paper, name: LAMBADA}
  - {from: paper, name: Natural Questions}
"""


@pytest.mark.slow
def test_scores_do_not_depend_on_the_number_of_processes(
    stories: Path,
    shared_benchmarks: Path,
    tmp_path: Path,
    run_evaluate: Callable[..., int],
    without_times: Callable[[Any], Any],
    one_thread: None,
) -> None:
    """Drawn examples, averaged readings, generation; an odd number of items. One sequence a pass, so to the bit."""
    (tmp_path / "some.yaml").write_text(SUITE)
    words = [str(stories), "--suite", str(tmp_path / "some.yaml"), "--data-dir", str(shared_benchmarks)]
    words += ["--limit", "3", "--batch-size", "1", "--log-samples", "--output"]
    done = on_two_processes(tmp_path, "-m", "moh_llm.cli", "evaluate", *words, str(tmp_path / "two"))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("[4/4] model: Natural Questions") == 1 == done.stdout.count("report.json")
    assert "accelerator" not in done.stderr  # DeepSpeed's banner
    assert len(done.stdout.splitlines()) < 12
    assert "| processes | 2 |" in (tmp_path / "two" / "report.md").read_text()
    assert run_evaluate(*words, tmp_path / "one", "--device", "cpu") == 0
    one, two = (
        without_times(json.loads((tmp_path / run / "report.json").read_text(encoding="utf-8")))
        for run in ("one", "two")
    )
    assert one == two
    assert any(0 < row["scores"]["model"]["value"] < 100 for row in one["benchmarks"])
    for file in (tmp_path / "one" / "samples").rglob("*.jsonl"):
        other = tmp_path / "two" / file.relative_to(tmp_path / "one")
        assert file.read_text(encoding="utf-8") == other.read_text(encoding="utf-8")


@pytest.mark.slow
def test_bars_of_short_work_are_not_shown(tiny_llama: Path, tmp_path: Path) -> None:
    """In an interpreter of its own: a bar's delay is read from the environment when tqdm is first imported."""
    command = [sys.executable, "-m", "moh_llm.cli", "evaluate", str(tiny_llama), "--suite", "smoke", "--limit", "1"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TQDM_")}
    environment |= {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, "--output", str(tmp_path / "out")], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0 and "[3/3] model" in done.stderr, done.stderr
    assert "it/s" not in done.stderr and "accelerator" not in done.stderr


# Fewer items than processes; a benchmark that fails on the second process only; a device for all of them; an
# error of the user's that only the second process meets; the analysis, on the first process only.
ODD_CASES = """
import os, sys
import pytest
from lm_eval.models.huggingface import HFLM
from moh_llm.analysis import record
from moh_llm.cli import main
from moh_llm.errors import UserError
from moh_llm.evaluation import processes
from moh_llm.evaluation.runner import score
from moh_llm.evaluation.suite import load_suite
model, suite = {"model": sys.argv[1]}, load_suite("smoke")
rank = int(os.environ["RANK"])
scores = score(model, suite, limit=1)["model"]
assert {name: found.items for name, found in scores.scores.items()} == {"Facts": 1, "Stories": 1, "Answers": 1}

def fail(*_, **__):
    raise RuntimeError("the second one's")

generate = HFLM.generate_until
HFLM.generate_until = fail if rank else generate
scores = score(model, suite, limit=3)["model"]
assert scores.errors == {"Answers": "RuntimeError: the second one's"} and list(scores.scores) == ["Facts", "Stories"]
with pytest.raises(UserError, match="--device cpu: each of 2 processes has a device of its own"):
    score(model, suite, limit=1, device="cpu")

def only_here():
    if rank:
        raise UserError("no disk")

with pytest.raises(SystemExit if rank else UserError, match="2" if rank else "no disk .process 1 of 2."):
    processes.join().agree(only_here)

HFLM.generate_until, analyse = generate, record.analyse
record.analyse = lambda *words: analyse(*words, tokens_per_text=32, lengths=[128])
assert main(["evaluate", sys.argv[2], "--suite", "smoke", "--limit", "1", "--output", "report"]) == 0
print("all is well", flush=True)
"""


@pytest.mark.slow
def test_processes_agree_on_what_went_wrong_and_the_first_analyses(
    tiny_llama: Path, tiny_moh: Path, tmp_path: Path
) -> None:
    (tmp_path / "odd.py").write_text(ODD_CASES)
    done = on_two_processes(tmp_path, "odd.py", str(tiny_llama), str(tiny_moh))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("all is well") == 2
    assert done.stderr.count("analysis of model: loading") == 1 == done.stdout.count("report.json")
    report = json.loads((tmp_path / "report" / "report.json").read_text(encoding="utf-8"))
    assert list(report["analysis"]["model"]["head_load_by_text"]["load"]) == ["Facts", "Stories", "Answers"]
