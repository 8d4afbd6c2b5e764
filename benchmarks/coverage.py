"""In which share of draws intervals of 95 % hold the truth: over documents, and over the items of benchmarks.

    python benchmarks/coverage.py documents BASE out/local out/value --text "$CORPORA/redpajama_c4/*" "$CORPORA/dolma/*"
    python benchmarks/coverage.py items

`documents` compares converted models with their base on the first tokens of each document of the texts. These
documents are the population, whose perplexity ratio and KL are the truth. From each text, and from all together, so
many documents are drawn with replacement, `--draws` times, and intervals made of them: by percentiles of a bootstrap
over documents, and those that this package prints. `items` does so with simulated right and wrong answers of a model
and its base: 1.96 standard errors (delta method for the share of the base's score), and those printed.
A share is of draws in which an interval was printed; where that is fewer than half of all, it is left out.
"""

import argparse
import itertools
import math
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from command import add_compute_dtype, device_and_dtype, load_models, status_of
from held_out import BATCH, WINDOW, encode, texts_of
from transformers import AutoTokenizer

from moh_llm.data.shards import TokenizedSource, TokenStream
from moh_llm.data.windows import validation_batches
from moh_llm.devices import name_device
from moh_llm.evaluation import statistics
from moh_llm.evaluation.statistics import kept_share, value_of
from moh_llm.intervals import interval, kls, perplexity_ratios
from moh_llm.metrics import compare_to_reference, logits_of

NUMBERS = (5, 6, 8, 10, 20, 64)  # of documents
FIGURES = {"ratio": perplexity_ratios, "KL": kls}
ITEMS, BASES, DIFFERING, LOST = (30, 100, 500), (0.3, 0.5, 0.7, 0.9), (0.01, 0.02, 0.05, 0.1, 0.3), (1.0, 0.5, 0.25)
SEED, BOOTSTRAPS, NORMAL = 0, 500, 1.96

Ends = tuple[float, float] | list[float] | None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    jobs = parser.add_subparsers(required=True, metavar="documents|items")
    texts = jobs.add_parser("documents", help="intervals of perplexity ratio and KL")
    texts.add_argument("base", help="the dense model")
    texts.add_argument("models", nargs="+", help="converted folders")
    texts.add_argument("--text", nargs="+", required=True, help="text files or globs, each a population")
    texts.add_argument("--documents", type=int, default=400, metavar="N", help="at most, of each text")
    add_compute_dtype(texts)
    items = jobs.add_parser("items", help="intervals of scores, differences and shares")
    for job, run, draws in ((texts, cover_documents, 2000), (items, cover_items, 500)):
        job.add_argument("--draws", type=int, default=draws)
        job.set_defaults(job=run)
    args = parser.parse_args()
    return status_of(args.job, args)


def cover_documents(args: argparse.Namespace) -> None:
    """Print the table of documents."""
    device, dtype, computed = device_and_dtype(args)
    tokenizer = AutoTokenizer.from_pretrained(args.base)
    base, models = load_models(args.base, args.models, device, dtype)
    length = min(WINDOW, base.config.max_position_embeddings)
    populations: dict[tuple[str, str], np.ndarray] = {}
    for text in args.text:
        stream = TokenStream.from_documents(list(encode(itertools.islice(texts_of(text), args.documents), tokenizer)))
        batches = validation_batches([TokenizedSource(text, 1.0, stream, stream)], length, len(stream), BATCH)
        found = compare_to_reference({name: logits_of(m) for name, m in models.items()}, logits_of(base), batches)
        populations |= {(Path(text).parent.name or text, name): each.sums for name, each in found.items()}
    for name in models:
        of_all = [sums for (_, model), sums in populations.items() if model == name]
        populations["all", name] = np.concatenate(of_all)
    print(f"share of {args.draws} draws, seed {SEED}; {computed}, {name_device(device)}\n")
    print(f"| text | documents | model | figure | interval | {' | '.join(map(str, NUMBERS))} |")
    print("|---|---|---|---|---|" + "---|" * len(NUMBERS))
    all_shares: dict[str, list[dict[int, float]]] = {"bootstrap": [], "printed": []}
    for (text, name), sums in populations.items():
        for figure, function in FIGURES.items():
            shares = cover_population(sums, function, args.draws)
            for method, by_number in shares.items():
                cells = " | ".join(f"{100 * share:.1f}" for share in by_number.values())
                print(f"| {text} | {len(sums)} | {Path(name).name} | {figure} | {method} | {cells} |", flush=True)
                all_shares[method].append(by_number)
    print("\nleast of all")
    for method, found in all_shares.items():
        least = [min(shares[n] for shares in found) for n in NUMBERS]
        print(f"| {method} | " + " | ".join(f"{100 * share:.1f}" for share in least) + " |")


def cover_population(
    sums: np.ndarray, figure: Callable[[np.ndarray], np.ndarray], draws: int
) -> dict[str, dict[int, float]]:
    """By interval and number of documents, the share of draws from `sums` `[D, 5]` whose interval holds the truth."""
    generator, truth = np.random.default_rng(SEED), figure(sums.sum(0)[None])[0]
    held: dict[str, dict[int, float]] = {"bootstrap": {}, "printed": {}}
    for number in NUMBERS:
        drawn = sums[generator.integers(0, len(sums), (draws, number))]
        held["bootstrap"][number] = float(np.mean([covers(bootstrap(one, figure), truth) for one in drawn]))
        held["printed"][number] = float(np.mean([covers(interval([one], figure), truth) for one in drawn]))
    return held


def bootstrap(sums: np.ndarray, figure: Callable[[np.ndarray], np.ndarray]) -> Ends:
    """Percentiles of the figure over documents that are drawn with replacement."""
    count = len(sums)
    drawn = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), BOOTSTRAPS).astype(np.float64)
    return np.percentile(figure(drawn @ sums), (2.5, 97.5)).tolist()


def cover_items(args: argparse.Namespace) -> None:
    """Print the table of items: the least share over bases' scores and sides."""
    print(f"least share of {args.draws} draws, seed {SEED}, over bases of {BASES} and {LOST} of the items lost\n")
    print("| items | differ | difference: 1.96 errors | printed | share: 1.96 errors | printed |")
    print("|---|---|---|---|---|---|")
    for items, differing in itertools.product(ITEMS, DIFFERING):
        found = [
            cover_scores(items, base, differing, lost, args.draws)
            for base, lost in itertools.product(BASES, LOST)
            if differing * lost <= base + 1e-9 and base + differing * (1 - lost) <= 1  # what is possible together
        ]
        least = [min(one[key] for one in found if not math.isnan(one[key])) for key in found[0]]
        print(f"| {items} | {differing:.0%} | {' | '.join(f'{100 * share:.1f}' for share in least)} |", flush=True)


def cover_scores(items: int, base: float, differing: float, lost: float, draws: int) -> dict[str, float]:
    """By interval, the share of draws in which it holds the truth."""
    draw, held = np.random.default_rng(SEED), {}
    only_base, only_model = differing * lost, differing * (1 - lost)
    shares = np.array([base - only_base, only_model, only_base, 1 - base - only_model]).clip(0)
    truth = {"difference": only_model - only_base, "share": 1 + (only_model - only_base) / base}
    for _ in range(draws):
        kind = draw.choice(4, items, p=shares / shares.sum())
        model, of_base = np.isin(kind, (0, 1)).astype(float), np.isin(kind, (0, 2)).astype(float)
        for key, ends in intervals_of(model, of_base).items():
            if ends is not None:
                held.setdefault(key, []).append(covers(ends, truth[key.split(":")[0]]))
    keys = "difference: errors", "difference: printed", "share: errors", "share: printed"
    few = draws / 2
    return {key: float(np.mean(held[key])) if len(held.get(key, [])) > few else math.nan for key in keys}


def intervals_of(model: np.ndarray, base: np.ndarray) -> dict[str, Ends]:
    """All intervals of the difference and of the share, in parts of one."""
    m, b = model.mean(), base.mean()
    errors = [values.std(ddof=1) / math.sqrt(len(values)) for values in (model, base, model - base)]
    found: dict[str, Ends] = {"difference: errors": (m - b - NORMAL * errors[2], m - b + NORMAL * errors[2])}
    values = value_of([model.tolist()], 0, 1), value_of([base.tolist()], 0, 1)
    delta = value_of(statistics.difference([model.tolist()], [base.tolist()]), -1, 1)
    found["difference: printed"] = delta.interval and [end / 100 for end in delta.interval]
    kept = kept_share(*values, delta)
    found["share: printed"] = kept.interval and [end / 100 for end in kept.interval]
    if b >= 5 * errors[1]:
        both = (errors[0] ** 2 + errors[1] ** 2 - errors[2] ** 2) / 2
        variance = max(errors[0] ** 2 + (m / b) ** 2 * errors[1] ** 2 - 2 * m / b * both, 0.0)
        half = NORMAL * math.sqrt(variance)
        found["share: errors"] = (m - half) / b, (m + half) / b
    return found


def covers(ends: Ends, truth: float) -> bool:
    """Whether an interval holds the truth."""
    return ends is not None and ends[0] - 1e-12 <= truth <= ends[1] + 1e-12


if __name__ == "__main__":
    sys.exit(main())
