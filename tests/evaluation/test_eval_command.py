"""The numbers are those of lm-eval's own command, to the last digit, for tasks of every kind."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from moh_llm.evaluation.suite import load_suite

pytest.importorskip("lm_eval")

# Choices by likelihood and by likelihood per byte, two readings of the same items, several parts, generation
# with drawn examples, and whether a word is the likeliest.
NAMES = ["MMLU", "GSM8K", "TruthfulQA", "HellaSwag", "BoolQ", "LAMBADA", "WinoGrande", "Natural Questions"]
LIMIT = 3


@pytest.mark.slow
def test_scores_equal_lm_evals_command(tiny_llama: Path, tmp_path: Path, shared_benchmarks: Path) -> None:
    import lm_eval

    from moh_llm.evaluation.config import EvaluationConfig
    from moh_llm.evaluation.runner import score

    suite = load_suite("paper")
    chosen = [benchmark for benchmark in suite.benchmarks if benchmark.name in NAMES]
    assert len(chosen) == len(NAMES)
    chosen = [dataclasses.replace(b, parts=["anatomy", "virology"]) if b.name == "MMLU" else b for b in chosen]
    suite = dataclasses.replace(suite, benchmarks=chosen)

    stock = Path(lm_eval.__file__).parent / "tasks"
    tasks = {}
    for benchmark in chosen:
        for part in benchmark.expand():
            folder = shared_benchmarks / benchmark.dataset.replace("/", "__") / part.config
            # All splits, as the command would find them on the Hub.
            files = {file.stem: str(file) for file in folder.glob("*.jsonl")}
            task = {"include": str(stock / part.definition), "task": f"own_{part.task}", "num_fewshot": benchmark.shots}
            task |= {"dataset_path": "json"}
            task |= {"dataset_kwargs": {"data_files": files, "cache_dir": str(tmp_path / "cache")}}
            (tmp_path / f"own_{part.task}.yaml").write_text(yaml.safe_dump(task))
            tasks[f"own_{part.task}"] = benchmark
    # One sequence a pass: the command puts the requests of all tasks into common batches, and what a sequence is
    # padded with moves the last digits.
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--model_args", f"pretrained={tiny_llama}"]
    command += ["--tasks", ",".join(tasks), "--include_path", str(tmp_path), "--limit", str(LIMIT), "--device", "cpu"]
    command += ["--batch_size", "1", "--output_path", str(tmp_path / "theirs")]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TQDM_DISABLE": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | offline, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (file,) = (tmp_path / "theirs").rglob("results_*.json")
    theirs = json.loads(file.read_text(encoding="utf-8"))["results"]

    options = EvaluationConfig(str(tiny_llama), data_dir=shared_benchmarks, limit=LIMIT, batch_size=1, device="cpu")
    ours = score({"model": str(tiny_llama)}, suite, options)["model"]
    assert not ours.errors
    for name, benchmark in tasks.items():
        expected = theirs[name][f"{benchmark.metric},{benchmark.filter}"]
        assert ours.scores[benchmark.name].tasks[name.removeprefix("own_")] == (expected, LIMIT)
    # Not all of them nothing or everything, which any two programs might agree on.
    figures = [value for result in ours.scores.values() for value, _ in result.tasks.values()]
    assert sum(0 < value < 1 for value in figures) >= 3
