"""A conversion beside other ways to choose heads, without training: same text, same budgets, same fallback.

    python benchmarks/rivals.py BASE --calibration mixture.yaml --budgets 7 6 5 --seeds 0 1 2 --output out/rivals \\
        --documents 20 --tokens-per-document 512 --text "$CORPORA"/redpajama_c4/train* "$CORPORA"/dolma/train*

The base is calibrated once for each seed, which takes its own part of the calibration text and its own draws. A budget
is the mean number of active heads. Each method's heads, router and fallbacks are fitted to that text:

- "ours": what `convert.py --context 512` writes; and without fallbacks, with as many heads in each layer, with neither;
- "fixed heads": the same heads for all tokens, with fallbacks refitted (`--router none`);
- "random heads": a random choice for each token, with fallbacks and budgets fitted to it;
- "paper's layer": half of the heads shared, scored by the norm of their queries; and with our fallbacks, with our
  budgets, with both;
- "MLP on Top-K labels": the router of Deja Vu and Polar Sparsity (`baselines/routers.py`), and with both;
- "oracle": ours, but each token keeps the heads whose fallbacks would change the layer's output most.

Heads is the share that is on; KL(base || model), in nats per token, and perplexity / base perplexity are means over
texts and seeds, with 95 % intervals over documents; "seeds" is the least and the most KL of a seed, and
"less ours" the difference to the KL of "ours" on the same documents.
--output holds what was fitted and the figures of each batch: the same command goes on where it stopped.
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import held_out
import numpy as np
import torch
import transformers
from command import add_compute_dtype, device_and_dtype, kind_of_device, status_of
from local_plans import calibration_part
from rival_methods import NAMES, fit_methods, label_of, open_candidates, save_fits
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from moh_llm.conversion.base import open_base
from moh_llm.conversion.convert import peak_memory_mib
from moh_llm.conversion.layers import LayerwiseModel
from moh_llm.data.mixture import mixture_from_arguments
from moh_llm.data.tokenizer import open_tokenizer
from moh_llm.errors import UserError
from moh_llm.files import write_json
from moh_llm.intervals import interval, kls, perplexity_ratios, show_figure
from moh_llm.metrics import Batch, LogitsOf, compare_to_reference, logits_of


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="folder or Hub id of the dense model")
    parser.add_argument("--calibration", nargs="+", required=True, help="text files or a mixture, as for convert")
    parser.add_argument("--calibration-tokens", type=int, default=24576)
    parser.add_argument("--text", nargs="+", required=True, help="text files or globs, each counts the same")
    held_out.add_arguments(parser)
    parser.add_argument("--budgets", nargs="+", type=budget_of, default=[7, 6], help="mean active heads, such as 4.5")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="of the calibration")
    parser.add_argument("--methods", nargs="+", default=list(NAMES), choices=NAMES, metavar="NAME", help="not all")
    parser.add_argument("--by-text", action="store_true", help="print a table of each text, too")
    add_compute_dtype(parser, "float32", "since methods may differ by less than bfloat16 rounds")
    parser.add_argument("--output", type=Path, required=True, help="folder of what was fitted, and of figures.json")
    args = parser.parse_args()
    return status_of(run, args)


def budget_of(word: str) -> int | float:
    """A number of heads, which may be a fraction where layers have uneven budgets."""
    number = float(word)
    return int(number) if number.is_integer() else number


def run(args: argparse.Namespace) -> None:
    device, dtype, computed = device_and_dtype(args)
    base = open_base(args.base)
    tokenizer = open_tokenizer(base.folder, base.config.vocab_size)
    length = min(held_out.WINDOW, base.config.max_position_embeddings)
    texts = held_out.read_texts(args.text, args, tokenizer, length, held_out.BATCH)
    apart = ("base", "output", "seeds", "by_text", "compute_dtype")
    asked = {key: value for key, value in vars(args).items() if key not in apart} | {"dtype": computed}
    asked |= {"base": base.fingerprint, "torch": torch.__version__, "transformers": transformers.__version__}
    asked["hashes of texts"] = {name: held_out.hash_batches(batches) for name, batches in texts.items()}
    asked["device"] = kind_of_device(device)
    args.output.mkdir(parents=True, exist_ok=True)
    path = args.output / "figures.json"
    found: dict[str, Any] = {"asked": asked, "calibration": {}, "seconds": {}, "seeds": {}}
    if path.exists():
        found = json.loads(path.read_text())
        if found.get("asked") != asked:
            raise UserError(f"{path} holds figures of other models, text or methods; name another folder")
    write_json(path, found)  # what is fitted is of these settings, too
    mixture = mixture_from_arguments(args.calibration)
    dense = AutoModelForCausalLM.from_pretrained(base.folder, dtype=dtype).to(device).eval()
    for seed in args.seeds:
        batches = calibration_part(mixture, tokenizer, args.calibration_tokens, length, seed)
        text = held_out.hash_batches(batches)
        if found["calibration"].setdefault(str(seed), text) != text:
            raise UserError(f"{path} holds figures of another calibration text; name another folder")
        read = held_out.ngrams_of_batches(batches)
        shares = ", ".join(f"{held_out.overlap(own, read).share:.2%} of {name}" for name, own in texts.items())
        print(f"seed {seed}: of 13-grams the calibration text holds {shares}", flush=True)
        seconds = found["seconds"].setdefault(str(seed), {"scoring": 0.0})
        fits = args.output / f"fits-{seed}.safetensors"
        if not fits.exists():
            write_json(path, found)
            began = time.perf_counter()
            layers = LayerwiseModel(base.folder, base.weight_map, base.config, dtype, device)
            save_fits(fit_methods(layers, batches, args.methods, args.budgets, args.output, seed), fits)
            seconds["calibration"] = round(time.perf_counter() - began, 1)
        candidates = open_candidates(dense, fits, args.methods)
        figures = found["seeds"].setdefault(str(seed), {})

        def save(spent: float, seconds: dict[str, float] = seconds) -> None:
            seconds["scoring"] = round(seconds["scoring"] + spent, 1)
            write_json(path, found)

        compare(candidates, logits_of(dense), texts, figures, save)
    for own in [list(texts), *([name] for name in texts if args.by_text)]:
        print_table(found, args.seeds, base.config.num_attention_heads, own)
    print(f"{computed}, {asked['device']}, torch {torch.__version__}, transformers {transformers.__version__}", end="")
    print(f"; seconds {found['seconds']}; peak memory {peak_memory_mib()} MiB")


def compare(
    candidates: dict[str, LogitsOf],
    reference: LogitsOf,
    texts: dict[str, list[Batch]],
    found: dict[str, Any],
    save: Callable[[float], None],
) -> None:
    """Add the batches to `found` that it lacks: for each text a list of their documents and sums over these."""
    total = sum(map(len, texts.values()))
    with tqdm(total=total, desc="score", unit="batch", initial=sum(map(len, found.values()))) as bar:
        for name, batches in texts.items():
            done = found.setdefault(name, [])
            for batch in batches[len(done) :]:
                began = time.perf_counter()
                results = compare_to_reference(candidates, reference, [batch])
                documents = batch["documents"][:, 1:][batch["labels"][:, 1:] != -100].unique().tolist()
                done.append({"documents": documents, "sums": {key: row.sums.tolist() for key, row in results.items()}})
                save(time.perf_counter() - began)
                bar.update()


def sums_of(batches: Sequence[dict[str, Any]], label: str) -> np.ndarray:
    """Sums over a text's documents `[D, 5]`, as `Comparison` has them, from those over parts in each batch."""
    sums: dict[int, np.ndarray] = {}
    for document, row in itertools.chain.from_iterable(
        zip(b["documents"], b["sums"][label], strict=True) for b in batches
    ):
        sums[document] = sums.get(document, np.zeros(5)) + np.array(row)
    return np.stack(list(sums.values()))


def print_table(found: dict[str, Any], seeds: Sequence[int], heads: int, texts: list[str]) -> None:
    """A row for each method and budget, over these texts, in Markdown."""
    of_seeds = [found["seeds"][str(seed)] for seed in seeds]
    labels = list(of_seeds[0][texts[0]][0]["sums"])
    one = [sums_of(of_seeds[0][text], labels[0]) for text in texts]
    print(f"{', '.join(texts)}: {sum(map(len, one))} documents, {int(sum(sums[:, 0].sum() for sums in one))} tokens")
    print("| heads | method | KL | x base | seeds | less ours |\n|---|---|---|---|---|---|")
    order = sorted(labels, key=lambda label: (-float(label.split("/")[1]), NAMES.index(label.split("/")[0])))

    def sums_by_seed(label: str) -> list[list[np.ndarray]]:
        return [[sums_of(seed[text], label) for text in texts] for seed in of_seeds]

    def over_seeds(by_seed: list[list[np.ndarray]]) -> list[np.ndarray]:
        return [np.mean(own, axis=0) for own in zip(*by_seed, strict=True)]  # documents are the same for all seeds

    def figure_of(own: list[np.ndarray], figure: Callable[[np.ndarray], np.ndarray]) -> str:
        return show_figure(np.mean([figure(sums.sum(0)[None])[0] for sums in own]), interval(own, figure), ".4f")

    for label in order:
        by_seed = sums_by_seed(label)
        mean = over_seeds(by_seed)
        spread = [np.mean([kls(sums.sum(0)[None])[0] for sums in own]) for own in by_seed]
        name, budget = label.split("/")
        less = "not scored"
        if (ours := label_of("ours", budget)) in labels:
            both = [np.hstack(pair) for pair in zip(mean, over_seeds(sums_by_seed(ours)), strict=True)]
            less = "" if label == ours else figure_of(both, kl_differences)
        kl, ratio = figure_of(mean, kls), figure_of(mean, perplexity_ratios)
        seeds_kl = f"{min(spread):.4f} to {max(spread):.4f}"
        print(f"| {float(budget) / heads:.3f} | {name} | {kl} | {ratio} | {seeds_kl} | {less} |")


def kl_differences(sums: np.ndarray) -> np.ndarray:
    """KL less another model's on the same tokens `[R]`, of R rows of the sums of both, `[R, 10]`."""
    return kls(sums[:, :5]) - kls(sums[:, 5:])


if __name__ == "__main__":
    sys.exit(main())
