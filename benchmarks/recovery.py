"""How fast each method of recovery closes the gap to the base: the runs behind docs/recovery.md.

    python benchmarks/recovery.py BASE --mixture data_mixtures/paper_local.yaml --output out/recovery_methods
    moh-llm report out/recovery_methods/runs/* --output out/recovery_methods/report

BASE is converted twice at three quarters of its heads: calibrated (the default) and the paper's layer. Every method
then reads the same text in the same order with the same number of steps. Runs that are finished are kept, and an
interrupted one goes on, so the same command can be given again.
"""

import argparse
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FULL, LORA = "smollm2_recovery.yaml", "smollm2_lora.yaml"
CROSS_ENTROPY = ["--objective.kind", "cross_entropy"]
# name: model, recipe, overrides ("HALF": half of the steps), number of seeds
METHODS: dict[str, tuple[str, str, list[str], int]] = {
    "calibrated-distillation": ("calibrated", FULL, [], 3),
    "paper-distillation": ("paper", FULL, [], 3),
    "calibrated-layers": ("calibrated", FULL, ["--objective.layer_coefficient", "10"], 1),
    "calibrated-cross-entropy": ("calibrated", FULL, CROSS_ENTROPY, 1),
    "paper-cross-entropy": ("paper", FULL, CROSS_ENTROPY, 1),
    "calibrated-annealed": ("calibrated", FULL, ["--schedule.anneal_steps", "HALF"], 1),
    "paper-annealed": ("paper", FULL, ["--schedule.anneal_steps", "HALF"], 1),
    "calibrated-lora": ("calibrated", LORA, [], 1),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="folder or Hub id of the dense model")
    parser.add_argument("--mixture", required=True, help="text to calibrate with, to tune on and to score on")
    parser.add_argument("--output", type=Path, required=True, help="folder of the models and runs")
    parser.add_argument("--steps", type=int, default=98, help="of 2,048 tokens each")
    parser.add_argument("--every", type=int, default=14, help="steps between scores")
    parser.add_argument("--tokens", type=int, default=4096, help="held-out tokens of a score")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; of several each has one thread")
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS), help="not all of them")
    args = parser.parse_args()
    models = {"calibrated": ["--calibration", args.mixture], "paper": ["--preset", "paper"]}
    for name, flags in models.items():
        folder = args.output / "models" / name
        if not folder.exists():
            command = [sys.executable, "convert.py", args.base, *flags, "--verify", "quick", "--output"]
            subprocess.run([*command, str(folder.resolve())], check=True, cwd=ROOT)
    # Seeds first: the first one of every method, then the others.
    jobs = [(seed, name) for seed in range(3) for name in args.only if seed < METHODS[name][3]]
    lock = threading.Lock()

    def run(seed: int, name: str) -> int:
        model, recipe, overrides, _ = METHODS[name]
        command = [sys.executable, "train.py", f"recipes/{recipe}", "--seed", str(seed), "--data.mixture", args.mixture]
        command += ["--model", str((args.output / "models" / model).resolve()), "--max_steps", str(args.steps)]
        command += ["--output", str((args.output / "runs" / f"{name}-{seed}").resolve()), "--save_dtype", "float32"]
        command += ["--evaluation.every", str(args.every), "--evaluation.max_tokens", str(args.tokens)]
        command += [str(args.steps // 2) if word == "HALF" else word for word in overrides]
        threads = {"OMP_NUM_THREADS": "1"} if args.jobs > 1 else {}
        done = subprocess.run(command, cwd=ROOT, env=os.environ | threads, capture_output=True, text=True)
        with lock:
            print(f"{name}, seed {seed}: {(done.stdout if not done.returncode else done.stderr).strip()[-300:]}")
            sys.stdout.flush()
        return done.returncode

    with ThreadPoolExecutor(args.jobs) as pool:
        return max(pool.map(lambda job: run(*job), jobs))


if __name__ == "__main__":
    sys.exit(main())
