"""What `moh-llm evaluate` costs beside plain lm-eval, and how long it takes to get going.

    python benchmarks/evaluation.py MODEL --data-dir DIR --suite paper --limit 20

Three tables of medians; within a round the two sides take turns, so that what else the machine does strikes both:
start: seconds from the start of the command to the moment before the first model is loaded (imports, the suite's
data, a look at every row), against a process that only imports lm-eval and its Hugging Face model;
scoring: seconds of each benchmark on the loaded model, against `lm_eval.evaluate` on the same tasks and model;
command: wall time of `moh-llm evaluate` and of `lm_eval run` on the same tasks, data, limit and batch size, one process
each, from start to report. Below it, on how many tasks both reported the same figure: on all, as long as nothing else
differs, with --batch-size 1 (lm-eval's command puts requests of all tasks into common batches, and what a sequence is
padded with moves the last digits).
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
Figures = dict[str, float]  # of each task, in percent
IMPORTS = "import lm_eval.models.huggingface; from lm_eval.tasks import TaskManager; from lm_eval import evaluate"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a model")
    parser.add_argument("--data-dir", type=Path, help="local data, as for moh-llm evaluate")
    parser.add_argument("--suite", default="smoke", help="which suite (default: smoke)")
    parser.add_argument("--limit", type=int, default=10, help="items of each task (default: 10)")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5, help="repetitions of each timing (default: 5)")
    parser.add_argument("--skip", nargs="*", default=[], choices=["start", "scoring", "command"])
    args = parser.parse_args()
    cores = f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    print(f"{platform.machine()}, {cores}, Python {platform.python_version()}, CPU, the checkpoint's dtype")
    os.environ["TQDM_DISABLE"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        if "start" not in args.skip:
            compare("start", args.rounds, {"ours": lambda: start(args), "imports": imports})
        if "scoring" not in args.skip:
            scoring(args, Path(folder))
        if "command" not in args.skip:
            commands(args, Path(folder) / "tasks")
    return 0


def compare(name: str, rounds: int, sides: dict[str, Callable[[], float]]) -> None:
    """Run both sides in turn and print medians and the median of their ratios, first by second."""
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(rounds):
        for side in list(sides) if number % 2 else reversed(list(sides)):
            seconds[side].append(sides[side]())
    first, second = seconds.values()
    ratios = [a / b for a, b in zip(first, second, strict=True)]
    medians = ", ".join(f"{side} {statistics.median(values):.3f} s" for side, values in seconds.items())
    print(
        f"{name}: {medians}, ratio {statistics.median(ratios):.3f} (from {min(ratios):.3f} to {max(ratios):.3f}, "
        f"{rounds} rounds)",
        flush=True,
    )


def command_line(args: argparse.Namespace, output: Path) -> list[str]:
    """Our command."""
    data = ["--data-dir", str(args.data_dir)] if args.data_dir else []
    words = [args.model, "--suite", args.suite, *data, "--limit", str(args.limit), "--device", "cpu", "--no-analysis"]
    return [sys.executable, "evaluate.py", *words, "--batch-size", str(args.batch_size), "--output", str(output)]


def start(args: argparse.Namespace) -> float:
    """Seconds until our command says that it loads a model; it is stopped then."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        process = subprocess.Popen(
            command_line(args, Path(folder) / "out"),
            cwd=ROOT,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line)
            if line.startswith("loading "):
                seconds = time.perf_counter() - began
                process.kill()
                process.wait()
                return seconds
    raise SystemExit("".join(said))


def imports() -> float:
    """Seconds of a process that imports what lm-eval needs for a model."""
    return timed([sys.executable, "-c", IMPORTS])


def commands(args: argparse.Namespace, folder: Path) -> None:
    """Both commands in turn, and whether their figures are the same; ``folder`` is for lm-eval's task files."""
    metrics = plain_tasks(args, folder)
    figures: dict[str, Figures] = {}
    sides = {
        "ours": lambda: ours(args, figures),
        "lm-eval": lambda: plain(args, folder, metrics, figures),
    }
    compare("command", args.rounds, sides)
    apart = {task: abs(value - figures["lm-eval"][task]) for task, value in figures["ours"].items()}
    same = sum(difference == 0 for difference in apart.values())
    print(f"figures: {same} of {len(apart)} tasks the same", end="")
    print("" if same == len(apart) else f", {max(apart, key=apart.__getitem__)} {max(apart.values()):.2g} % apart")


def ours(args: argparse.Namespace, figures: dict[str, Figures]) -> float:
    """Seconds of our command; what it reports goes into ``figures``."""
    with tempfile.TemporaryDirectory() as folder:
        seconds = timed(command_line(args, Path(folder) / "out"))
        report = json.loads((Path(folder) / "out" / "report.json").read_text(encoding="utf-8"))
    rows = [row["scores"]["model"]["tasks"] for row in report["benchmarks"]]
    figures["ours"] = {task: figure["value"] for row in rows for task, figure in row.items()}
    return seconds


def plain_tasks(args: argparse.Namespace, folder: Path) -> dict[str, str]:
    """Write the suite's tasks as a user of lm-eval would, on files; returns the metric of each, as lm-eval has it."""
    import lm_eval
    import yaml

    from moh_llm.evaluation.suite import load_suite
    from moh_llm.evaluation.tasks import data_file

    suite = load_suite(args.suite)
    data = suite.data_folder(args.data_dir)
    if data is None:
        raise SystemExit("give --data-dir: both sides read files")
    folder.mkdir()
    metrics = {}
    for benchmark in suite.benchmarks:
        for part in benchmark.expand():
            root = Path(lm_eval.__file__).parent / "tasks" if benchmark.stock else suite.folder
            files = {split: str(data_file(data, benchmark, part, split)) for split in benchmark.splits()}
            task: dict[str, Any] = {"include": str(root / part.definition), "task": f"own_{part.task}"}
            task |= {"num_fewshot": benchmark.shots, "dataset_path": "json"}
            task |= {"dataset_kwargs": {"data_files": files, "cache_dir": str(folder / "cache")}}
            if benchmark.fewshot_split is None:
                task |= {"training_split": None, "validation_split": None, "fewshot_split": None}
                task |= {"test_split": benchmark.eval_split}
            (folder / f"own_{part.task}.yaml").write_text(yaml.safe_dump(task))
            metrics[part.task] = f"{benchmark.metric},{benchmark.filter}"
    return metrics


def plain(args: argparse.Namespace, tasks: Path, metrics: dict[str, str], figures: dict[str, Figures]) -> float:
    """Seconds of lm-eval's command on the tasks in the folder ``tasks``; what it reports goes into ``figures``."""
    names = ",".join(f"own_{task}" for task in metrics)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--device", "cpu", "--output_path", folder]
        command += ["--model_args", f"pretrained={args.model}", "--batch_size", str(args.batch_size)]
        seconds = timed([*command, "--limit", str(args.limit), "--include_path", str(tasks), "--tasks", names])
        (file,) = Path(folder).rglob("results_*.json")
        results = json.loads(file.read_text(encoding="utf-8"))["results"]
    figures["lm-eval"] = {task: 100 * results[f"own_{task}"][metric] for task, metric in metrics.items()}
    return seconds


def timed(command: list[str]) -> float:
    """Seconds of a command; ends the benchmark when it fails."""
    began = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return time.perf_counter() - began


def scoring(args: argparse.Namespace, folder: Path) -> None:
    """Each benchmark on one loaded model, by our runner and by lm-eval's `evaluate` alone."""
    import logging

    from lm_eval import evaluate

    from moh_llm.evaluation.language_model import load_model
    from moh_llm.evaluation.processes import Team
    from moh_llm.evaluation.scoring import SEEDS, run_benchmark
    from moh_llm.evaluation.suite import load_suite
    from moh_llm.evaluation.tasks import load_tasks

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    lm = load_model(args.model, args.batch_size, "auto", "cpu", Team(), None)
    for loaded in load_tasks(load_suite(args.suite), folder / "ours", args.data_dir, args.limit):

        def lm_evals(loaded: Any = loaded) -> float:
            began = time.perf_counter()
            for task in loaded.tasks:
                task.set_fewshot_seed(SEEDS["fewshot"])
            tasks = {task.config.task: task for task in loaded.tasks}
            evaluate(lm, {"tasks": tasks, "groups": {}}, limit=args.limit, bootstrap_iters=0)
            return time.perf_counter() - began

        def runners(loaded: Any = loaded) -> float:
            began = time.perf_counter()
            run_benchmark(lm, loaded, args.limit, Team())
            return time.perf_counter() - began

        lm_evals()  # the first pass of a shape is slower
        compare(f"scoring {loaded.benchmark.name}", args.rounds, {"ours": runners, "lm-eval": lm_evals})


if __name__ == "__main__":
    sys.exit(main())
