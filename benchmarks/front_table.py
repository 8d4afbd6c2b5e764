"""What a user gets of a base for some time of this machine: the table on the first page of README.

    python benchmarks/front_table.py BASE --mixture data_mixtures/paper_local.yaml --output out/front \\
        --documents 20 --tokens-per-document 512 --text "$CORPORA"/*/validation*

Each level is a conversion on so many calibration tokens and so many steps of self-distillation of 2,048 tokens each, by
`recipes/smollm2_recovery.yaml`; the defaults are meant for 2 minutes, 10 minutes and 2 hours of SmolLM2-135M on two CPU
cores. The table has the time of the conversion and of the steps here; opening models and text, and what a run scores
by itself, take time besides. Cells: perplexity / base perplexity, and KL to the base in nats
per token, with 95 % intervals over the documents. Finished models are kept, and an interrupted run goes on, so the same
command can be given again; in a folder of another base, mixture, length or dtype it stops.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import held_out
from command import add_compute_dtype, device_and_dtype, keep_settings, mixture_settings, status_of
from recovery import ROOT, read_texts, score
from transformers import AutoTokenizer

from moh_llm.conversion.base import open_base
from moh_llm.devices import COMPUTE_DTYPE
from moh_llm.errors import UserError
from moh_llm.evaluation.runner import spell_seconds
from moh_llm.intervals import show_figure
from moh_llm.records.conversion import NAME as CONVERSION

LEVELS = ["8192:0", "24576:40", "24576:700"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="folder or Hub id of the dense model")
    parser.add_argument("--mixture", required=True, help="text to calibrate with and to tune on")
    parser.add_argument("--text", nargs="+", required=True, help="text files or globs to score on")
    held_out.add_arguments(parser)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5, 0.67, 0.78], help="of the heads that are on")
    parser.add_argument("--levels", nargs="+", default=LEVELS, metavar="TOKENS:STEPS", help="of calibration and tuning")
    parser.add_argument("--context", type=int, default=512, help="tokens in a sequence")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="keys of all runs' recipes")
    parser.add_argument("--output", type=Path, required=True, help="folder of the models, runs and figures")
    add_compute_dtype(parser)
    args = parser.parse_args()
    return status_of(run, args)


def run(args: argparse.Namespace) -> None:
    try:
        levels = [(int(tokens), int(steps)) for tokens, steps in (level.split(":") for level in args.levels)]
    except ValueError as error:
        raise UserError(f"--levels {' '.join(args.levels)}: give TOKENS:STEPS, such as 24576:40") from error
    base = open_base(args.base)
    _, _, args.compute_dtype = device_and_dtype(args)
    settings = {"base": base.fingerprint, "context": args.context, "compute dtype": args.compute_dtype}
    settings |= mixture_settings(args.mixture)
    keep_settings(args.output, settings)
    texts = read_texts(args, AutoTokenizer.from_pretrained(base.folder))
    folders, seconds = {}, {}
    for tokens, steps in levels:
        for share in args.shares:
            label = f"{share:g} of the heads, {tokens} tokens, {steps} steps"
            folders[label], seconds[label] = make(args, share, tokens, steps)
            print(f"{label}: {spell_seconds(seconds[label])}", flush=True)
    score(args, folders, texts)
    found = json.loads((args.output / "scores.json").read_text())["models"]
    print(f"| time | {' | '.join(f'{share:.0%} of the heads' for share in args.shares)} |")
    print(f"|---|{'---|' * len(args.shares)}")
    labels = iter(folders)
    for _ in levels:
        row = [next(labels) for _ in args.shares]
        spent = [seconds[label] for label in row]
        time = " to ".join(dict.fromkeys((spell_seconds(min(spent)), spell_seconds(max(spent)))))
        print(f"| {time} | {' | '.join(map(cell, (found[label] for label in row)))} |")


def cell(figures: dict) -> str:
    """Ratio and KL of one model."""
    ratio = show_figure(figures["perplexity_ratio"], figures["ratio_interval"], ".3f")
    return f"x {ratio}, KL {show_figure(figures['kl'], figures['kl_interval'], '.3f')}"


def make(args: argparse.Namespace, share: float, tokens: int, steps: int) -> tuple[Path, float]:
    """The folder of a model, which is made where it is not there, and the seconds of its conversion and steps."""
    converted = args.output / "models" / f"{share:g}-{tokens}"
    if not converted.exists():
        words = ["--active-ratio", f"{share}", "--context", f"{args.context}", "--verify", "none"]
        words += ["--calibration", args.mixture, "--calibration-tokens", f"{tokens}", "--output", str(converted)]
        call("convert.py", args, args.base, *words)
    seconds = json.loads((converted / CONVERSION).read_text())["seconds"]
    if not steps:
        return converted, seconds
    output = args.output / "runs" / f"{share:g}-{tokens}-{steps}"
    words = ["--model", str(converted), "--output_dir", str(output), "--data.mixture", args.mixture]
    words += ["--max_steps", f"{steps}", "--data.sequence_length", f"{args.context}"]
    words += ["--evaluation.eval_steps", f"{steps}", *(f"--{setting}" for setting in args.set)]
    call("train.py", args, str(ROOT / "recipes" / "smollm2_recovery.yaml"), *words)
    return output / "model", seconds + json.loads((output / "run.json").read_text())["seconds"]


def call(script: str, args: argparse.Namespace, *words: str) -> None:
    """Run a script of the repository's root, which shows its progress. Raises UserError where it fails."""
    environment = os.environ | {COMPUTE_DTYPE: args.compute_dtype}
    command = [sys.executable, str(ROOT / script), *words]
    if status := subprocess.run(command, stdout=sys.stderr, env=environment).returncode:
        raise UserError(f"{script} ended with status {status}; the same command goes on")


if __name__ == "__main__":
    sys.exit(main())
