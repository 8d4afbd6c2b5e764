"""How fast each method of recovery closes the gap to the base: the runs behind docs/recovery.md.

    python benchmarks/recovery.py BASE --mixture data_mixtures/paper_local.yaml --output out/recovery_methods
    moh-llm report out/recovery_methods/runs/* --output out/recovery_methods/report

BASE is converted with the same share of its heads: calibrated (the default), with the same heads for all tokens, and to
the paper's layer; for "-shared" with two shared heads, the first ones, the most important ones, or those that are
learned in the first half of the steps, and as many active heads in all layers. Every method then reads the same text in
the same order with the same number of steps. Runs that are finished are kept, and an interrupted one goes on, so the
same command can be given again; in a folder of another base, mixture, share, length or dtype it stops.

With --text all models of OUTPUT are then scored on documents of these files, with 95 % intervals over documents and the
share of 13-grams that the mixture's training part holds, too; figures go to OUTPUT/scores.json. Tuning does not read
what its mixture holds out, which may be taken from its own files (SHARE is the mixture's validation_share):

    python benchmarks/recovery.py BASE --mixture MIXTURE --output OUT --held-out-share SHARE --documents 100 \\
        --tokens-per-document 128 --text "$CORPORA/redpajama_c4/train*" "$CORPORA/pile/train*"
"""

import argparse
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import held_out
from command import add_compute_dtype, device_and_dtype, keep_settings, mixture_settings, status_of
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from moh_llm.conversion.base import open_base
from moh_llm.devices import COMPUTE_DTYPE
from moh_llm.errors import UserError
from moh_llm.files import write_json
from moh_llm.intervals import interval, kls, perplexity_ratios, show_documents, show_figure
from moh_llm.metrics import Batch, compare_to_reference, logits_of
from moh_llm.modeling import MoHLlamaForCausalLM

ROOT = Path(__file__).resolve().parents[1]
FULL, LORA = "smollm2_recovery.yaml", "smollm2_lora.yaml"
SHARED = 2  # heads of a layer, in the comparison of ways to choose them
CROSS_ENTROPY = ["--objective.kind", "cross_entropy"]
# name: model, recipe, overrides ("HALF": half of the steps), number of seeds
METHODS: dict[str, tuple[str, str, list[str], int]] = {
    "calibrated-distillation": ("calibrated", FULL, [], 3),
    "fixed-distillation": ("fixed", FULL, [], 3),
    "paper-distillation": ("paper", FULL, [], 3),
    "calibrated-layers": ("calibrated", FULL, ["--objective.layer_coefficient", "10"], 1),
    "calibrated-cross-entropy": ("calibrated", FULL, CROSS_ENTROPY, 3),
    "paper-cross-entropy": ("paper", FULL, CROSS_ENTROPY, 1),
    "calibrated-annealed": ("calibrated", FULL, ["--schedule.anneal_steps", "HALF"], 1),
    "paper-annealed": ("paper", FULL, ["--schedule.anneal_steps", "HALF"], 1),
    "calibrated-lora": ("calibrated", LORA, [], 3),
    "first-shared": ("first-shared", FULL, [], 3),
    "important-shared": ("important-shared", FULL, [], 3),
    "learned-shared": (
        "none-shared",
        FULL,
        ["--shared_heads.number", f"{SHARED}", "--shared_heads.steps", "HALF"],
        3,
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="folder or Hub id of the dense model")
    parser.add_argument("--mixture", required=True, help="text to calibrate with, to tune on and to score on")
    parser.add_argument("--output", type=Path, required=True, help="folder of the models and runs")
    parser.add_argument("--active-ratio", type=float, default=0.67, help="share of the heads that are on")
    parser.add_argument("--context", type=int, default=512, help="tokens in a sequence that models are converted for")
    parser.add_argument("--calibration-tokens", type=int, default=24576)
    parser.add_argument("--seeds", type=int, default=3, help="of methods that have several, at most 3")
    parser.add_argument("--steps", type=int, default=98, help="of 2,048 tokens each")
    parser.add_argument("--every", type=int, default=14, help="steps between scores")
    parser.add_argument("--run-tokens", type=int, default=4096, help="held-out tokens of a score during a run")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; of several each has one thread")
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS), help="not all of them")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="keys of all runs' recipes")
    parser.add_argument("--text", nargs="+", default=[], help="text files or globs to score all models on at the end")
    held_out.add_arguments(parser)
    add_compute_dtype(parser)
    args = parser.parse_args()
    return status_of(run, args)


def run(args: argparse.Namespace) -> None:
    base = open_base(args.base)
    _, _, computed = device_and_dtype(args)
    environment = os.environ | {COMPUTE_DTYPE: computed}  # of conversions and runs
    settings = {"base": base.fingerprint, "share of heads": args.active_ratio, "context": args.context}
    settings |= {"number of calibration tokens": args.calibration_tokens, "compute dtype": computed}
    keep_settings(args.output, settings | mixture_settings(args.mixture))
    texts = read_texts(args, AutoTokenizer.from_pretrained(base.folder)) if args.text else {}
    models = conversions(args)
    for name, flags in models.items():
        folder = args.output / "models" / name
        if not folder.exists():
            command = [sys.executable, str(ROOT / "convert.py"), args.base, *flags, "--verify", "none", "--output"]
            if status := subprocess.run([*command, str(folder)], env=environment).returncode:
                raise UserError(f"{name}: convert.py ended with status {status}; the same command goes on")
    # Seeds first: the first one of every method, then the others.
    jobs = [(seed, name) for seed in range(args.seeds) for name in args.only if seed < METHODS[name][3]]
    lock = threading.Lock()

    def train(seed: int, name: str) -> int:
        model, recipe, overrides, _ = METHODS[name]
        command = [sys.executable, str(ROOT / "train.py"), str(ROOT / "recipes" / recipe), "--seed", str(seed)]
        command += ["--data.mixture", args.mixture, "--save_dtype", "float32", "--max_steps", str(args.steps)]
        command += ["--model", str(args.output / "models" / model)]
        command += ["--output_dir", str(args.output / "runs" / f"{name}-{seed}")]
        command += ["--evaluation.eval_steps", str(args.every), "--evaluation.max_tokens", str(args.run_tokens)]
        command += [f"--{setting}" for setting in args.set]
        command += [str(args.steps // 2) if word == "HALF" else word for word in overrides]
        threads = {"OMP_NUM_THREADS": "1"} if args.jobs > 1 else {}
        done = subprocess.run(command, env=environment | threads, capture_output=True, text=True)
        with lock:
            print(f"{name}, seed {seed}: {(done.stdout if not done.returncode else done.stderr).strip()[-300:]}")
            sys.stdout.flush()
        return done.returncode

    with ThreadPoolExecutor(args.jobs) as pool:
        statuses = [*pool.map(lambda job: train(*job), jobs)]
    if failed := [f"{name}, seed {seed}" for (seed, name), status in zip(jobs, statuses, strict=True) if status]:
        raise UserError(f"{len(failed)} runs failed: {'; '.join(failed)}; the same command goes on")
    if texts:
        untuned = {f"{folder.name}, not tuned": folder for folder in sorted((args.output / "models").iterdir())}
        tuned = {folder.parent.name: folder for folder in sorted((args.output / "runs").glob("*/model"))}
        score(args, untuned | tuned, texts)


def conversions(args: argparse.Namespace) -> dict[str, list[str]]:
    """Words of `convert.py` for each model that a method starts from."""
    share = ["--active-ratio", f"{args.active_ratio}"]
    fitted = ["--calibration", args.mixture, "--calibration-tokens", f"{args.calibration_tokens}"]
    fitted += [*share, "--context", f"{args.context}"]
    linear = [*fitted, "--router", "linear", "--budgets", "even", "--num-shared-heads"]
    all_models = {
        "calibrated": fitted,
        "fixed": [*fitted, "--router", "none"],
        "paper": ["--preset", "paper", *share],
        "first-shared": [*linear, f"{SHARED}"],
        "important-shared": [*linear, f"{SHARED}", "--shared", "importance"],
        "none-shared": [*linear, "0"],
    }
    return {name: words for name, words in all_models.items() if name in {METHODS[method][0] for method in args.only}}


def read_texts(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> dict[str, list[Batch]]:
    """The documents that models are scored on. Raises UserError where there are too few."""
    positions = AutoConfig.from_pretrained(args.base).max_position_embeddings
    return held_out.read_texts(args.text, args, tokenizer, min(held_out.WINDOW, positions), held_out.BATCH)


def score(args: argparse.Namespace, folders: dict[str, Path], texts: dict[str, list[Batch]]) -> None:
    """Print how far each model is from the base on `texts`, as a mean over them; write OUTPUT/scores.json."""
    device, dtype, computed = device_and_dtype(args)
    tokenizer = AutoTokenizer.from_pretrained(args.base)
    base = AutoModelForCausalLM.from_pretrained(args.base, dtype=dtype).to(device).eval()
    read = held_out.ngrams_of([args.mixture], tokenizer, None)
    overlap = {name: held_out.overlap(batches, read) for name, batches in texts.items()}
    for name, found in overlap.items():
        print(f"{name}: {found.share:.2%} of its 13-grams are in the mixture's training part, too", flush=True)
    loaded = {
        label: MoHLlamaForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
        for label, folder in folders.items()
    }
    candidates = {label: logits_of(model) for label, model in loaded.items()}
    compared = {
        name: compare_to_reference(candidates, logits_of(base), tqdm(batches, desc=Path(name).name, unit="batch"))
        for name, batches in texts.items()
    }
    models: dict[str, Any] = {}
    for label in folders:
        own = {name: each[label] for name, each in compared.items()}
        sums = [each.sums for each in own.values()]
        means = {
            key: sum(getattr(each, key) for each in own.values()) / len(own)
            for key in ("perplexity_ratio", "kl", "top1_agreement")
        }
        means |= {"ratio_interval": interval(sums, perplexity_ratios), "kl_interval": interval(sums, kls)}
        documents = sum(map(len, sums))
        by_text = {
            name: {"documents": each.documents, "tokens": each.tokens} | each.figures() for name, each in own.items()
        }
        models[label] = {"documents": documents} | means | {"texts": by_text}
        print(
            f"{label:<28} ratio {show_figure(means['perplexity_ratio'], means['ratio_interval'], '.4f')}, "
            f"KL {show_figure(means['kl'], means['kl_interval'], '.4f')}, same top-1 {means['top1_agreement']:.1%}; "
            f"{len(texts)} texts, {show_documents(documents)}",
            flush=True,
        )
    record = {
        "compute_dtype": computed,
        "base": open_base(args.base).fingerprint,
        "texts": {name: held_out.hash_batches(batches) for name, batches in texts.items()},
        "overlap": {name: held_out.describe(found) for name, found in overlap.items()},
        "models": models,
    }
    write_json(args.output / "scores.json", record)


if __name__ == "__main__":
    sys.exit(main())
