"""Two processes on the CPU give what one gives, and agree on what went wrong; a killed run goes on where it was."""

import json
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forks
import pytest
from records import read

from moh_llm.evaluation.config import EvaluationConfig
from moh_llm.evaluation.processes import Finished, file_name
from moh_llm.evaluation.suite import SUITES, load_suite

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
    words += ["--limit", "3", "--batch-size", "1", "--log-samples", "--output-dir"]
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


# Fewer items than processes; a benchmark that fails on the second process only; a device for all of them; an
# error of the user's that only the second process meets; the analysis, on the first process only.
ODD_CASES = """
import os, sys
import pytest
from lm_eval.models.huggingface import HFLM
from moh_llm.analysis import heads
from moh_llm.cli import main
from moh_llm.errors import UserError
from moh_llm.evaluation import processes
from moh_llm.evaluation.config import EvaluationConfig
from moh_llm.evaluation.runner import score
from moh_llm.evaluation.suite import load_suite
model, suite = {"model": sys.argv[1]}, load_suite("smoke")
rank = int(os.environ["RANK"])
scores = score(model, suite, EvaluationConfig(sys.argv[1], limit=1))["model"]
assert {name: found.items for name, found in scores.scores.items()} == {"Facts": 1, "Stories": 1, "Answers": 1}

def fail(*_, **__):
    raise RuntimeError("the second one's")

generate = HFLM.generate_until
HFLM.generate_until = fail if rank else generate
scores = score(model, suite, EvaluationConfig(sys.argv[1], limit=3))["model"]
assert scores.errors == {"Answers": "RuntimeError: the second one's"} and list(scores.scores) == ["Facts", "Stories"]
with pytest.raises(UserError, match="--device cpu: each of 2 processes has a device of its own"):
    score(model, suite, EvaluationConfig(sys.argv[1], limit=1, device="cpu"))

def only_here():
    if rank:
        raise UserError("no disk")

with pytest.raises(SystemExit if rank else UserError, match="2" if rank else "no disk .process 1 of 2."):
    processes.connect().barrier(only_here)

HFLM.generate_until, analyse = generate, heads.analyse
heads.analyse = lambda *words: analyse(*words, tokens_per_text=32, lengths=[128])
assert main(["evaluate", sys.argv[2], "--suite", "smoke", "--limit", "1", "--output-dir", "report"]) == 0
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


# The script dies without a word in the fifth benchmark: in the second one of the second model.
DIE = """
import os, runpy, signal, sys
from moh_llm.evaluation import runner
whole, calls = runner.run_benchmark, []
def run(*arguments):
    calls.append(arguments)
    if len(calls) == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return whole(*arguments)
runner.run_benchmark = run
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The benchmarks that are run from here on."""
    from moh_llm.evaluation import runner

    names, whole = [], runner.run_benchmark

    def run(lm: Any, loaded: Any, limit: Any) -> Any:
        names.append(loaded.benchmark.name)
        return whole(lm, loaded, limit)

    monkeypatch.setattr(runner, "run_benchmark", run)
    return names


@pytest.mark.slow
def test_a_killed_run_goes_on(
    tiny_llama: Path,
    tiny_moh: Path,
    smoke_report: Path,
    ran: list[str],
    tmp_path: Path,
    run_evaluate: Callable[..., int],
    without_times: Callable[[Any], Any],
) -> None:
    words = [tiny_moh, "--base", tiny_llama, "--suite", "smoke", "--batch-size", "3", "--device", "cpu"]
    words += ["--log-samples", "--output-dir"]
    command = ["-c", DIE, str(ROOT / "evaluate.py"), *map(str, words), str(tmp_path / "killed")]
    died = forks.run(*command, folder=tmp_path, environment={"PYTHONPATH": str(ROOT)})
    assert died.returncode == -signal.SIGKILL
    assert not (tmp_path / "killed").exists()
    assert len(list(tmp_path.glob("killed.partial/*/*.jsonl"))) == 4

    assert run_evaluate(*words, tmp_path / "killed") == 0
    assert ran == ["Stories", "Answers"]
    assert not (tmp_path / "killed.partial").exists()
    whole = smoke_report / "report"
    assert without_times(read(tmp_path / "killed")) == without_times(read(whole))
    logs = [
        {file.relative_to(run): file.read_bytes() for file in (run / "samples").rglob("*.jsonl")}
        for run in (tmp_path / "killed", whole)
    ]
    assert logs[0] == logs[1] and len(logs[0]) == 6


def test_scores_are_taken_over_where_nothing_that_they_depend_on_differs(
    tiny_llama: Path, tmp_path: Path, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from moh_llm.evaluation import runner

    model = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
    shutil.copytree(SUITES / "smoke", tmp_path / "smoke")
    shutil.copy(SUITES / "smoke.yaml", tmp_path / "own.yaml")
    finished = Finished(tmp_path / "kept")

    def run(**options: Any) -> list[str]:
        """The benchmarks that are run anew."""
        ran.clear()
        suite = load_suite(str(tmp_path / "own.yaml"))
        settings = EvaluationConfig(str(model), **{"limit": 1, "device": "cpu"} | options)
        scores = runner.score({"model": str(model)}, suite, settings, finished=finished)["model"].scores
        assert {name: found.items for name, found in scores.items()} == dict.fromkeys(all_of_them, settings.limit)
        return list(ran)

    all_of_them = ["Facts", "Stories", "Answers"]
    assert run() == all_of_them and run(batch_size=3) == []
    assert run(limit=2) == all_of_them and run(log_samples=True) == all_of_them
    assert run(compute_dtype="bfloat16") == all_of_them and run() == all_of_them
    with monkeypatch.context() as patch:
        patch.setattr(runner, "__version__", "9")
        assert run() == all_of_them
    assert run() == all_of_them
    file = tmp_path / "smoke" / "moh-llm__smoke" / "stories" / "train.jsonl"
    file.write_text("".join(reversed(file.read_text(encoding="utf-8").splitlines(keepends=True))))
    assert run() == ["Stories"]
    facts = tmp_path / "smoke" / "facts.yaml"
    facts.write_text(facts.read_text(encoding="utf-8") + "# changed\n", encoding="utf-8")
    assert run() == all_of_them
    tokenizer = model / "tokenizer_config.json"  # the same weights, but another tokenizer
    tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text()) | {"note": "changed"}))
    assert run() == all_of_them


def test_only_what_was_kept_is_removed(tmp_path: Path) -> None:
    finished = Finished(tmp_path / "report.partial")
    finished.write("model", "A", {}, {}, [])
    (mine := finished.folder / "notes.txt").write_text("mine")
    finished.remove()
    assert list(finished.folder.iterdir()) == [mine]
    mine.unlink()
    finished.remove()
    assert list(tmp_path.iterdir()) == []


def test_names_stay_below_their_folder_and_apart() -> None:
    unsafe = {"..": "_", ".hidden": "_hidden", "a/../b": "a_.._b", "Natural Q": "Natural_Q"}
    assert {name: file_name(name)[:-9] for name in unsafe} == unsafe
    names = ["a b", "a_b", "a/b", "a  b", ".b", "_b", "..b"]
    assert len({file_name(name) for name in names}) == len(names)
    assert [file_name(name) for name in ("a_b", "v1.5", "MMLU-5")] == ["a_b", "v1.5", "MMLU-5"]
