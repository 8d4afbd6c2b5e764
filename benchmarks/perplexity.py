"""How far converted models are from their base on given text, beside the paper's layer.

    python benchmarks/perplexity.py out/moh --base BASE --text c4/validation.jsonl book/validation.jsonl
    python benchmarks/perplexity.py out/moh out/recovery/model --base BASE --text "$CORPORA"/*/validation* \\
        --documents 150 --tokens-per-document 128 --overlap-with mixture.yaml

Each text is read whole, or in the documents that the flags choose, in windows of 512 tokens with documents isolated.
Figures compare with the base on the same windows: perplexity / base perplexity, and KL(base || model) in nats per
token, each with its 95 % interval over documents, and the share of positions at which both give one token the highest
probability. Overlap is the share of a text's 13-grams of tokens that the named text holds, too. The paper's layer has
the first model's mean number of active heads.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import held_out
from baselines.routers import by_paper_plan
from command import add_compute_dtype, device_and_dtype, load_models, status_of
from tqdm import tqdm
from transformers import AutoTokenizer

from moh_llm.data.mixture import mixture_from_arguments
from moh_llm.data.sample import sample_mixture
from moh_llm.devices import name_device
from moh_llm.files import write_json
from moh_llm.intervals import interval, kls, perplexity_ratios, show_documents, show_figure
from moh_llm.metrics import Comparison, compare_to_reference, logits_of

MEANS = "perplexity_ratio", "kl", "top1_agreement"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="model", help="converted folders")
    parser.add_argument("--text", nargs="+", required=True, help="text files or globs, each a table")
    parser.add_argument("--base", required=True, help="the dense model they were converted from")
    held_out.add_arguments(parser)
    parser.add_argument("--overlap-with", nargs="+", metavar="TEXT", help="text files or a mixture, as for convert")
    add_compute_dtype(parser)
    parser.add_argument("--json", type=Path, help="write the means there, too")
    return status_of(run, parser.parse_args())


def run(args: argparse.Namespace) -> None:
    device, dtype, computed = device_and_dtype(args)
    base, models = load_models(args.base, args.models, device, dtype)
    tokenizer = AutoTokenizer.from_pretrained(args.base)
    length = min(held_out.WINDOW, base.config.max_position_embeddings)
    texts = held_out.read_texts(args.text, args, tokenizer, length, held_out.BATCH)
    if args.overlap_with:
        read = held_out.training_ngrams(sample_mixture(mixture_from_arguments(args.overlap_with), tokenizer))
    candidates = {name: logits_of(model) for name, model in models.items()}
    candidates["paper's layer"] = by_paper_plan(models[args.models[0]])
    found: dict[str, dict[str, Comparison]] = {}
    for text, batches in texts.items():
        found[text] = compare_to_reference(
            candidates, logits_of(base), tqdm(batches, desc=Path(text).name, unit="batch", leave=False)
        )
        first = found[text][args.models[0]]
        share = f", {read.overlap(*held_out.numbered(batches)):.2%} of 13-grams read" if args.overlap_with else ""
        print(f"\n{text}: {show_documents(first.documents)}, {first.tokens} tokens{share}; ", end="")
        print(f"base perplexity {first.reference_perplexity:.2f}")
        for name, own in found[text].items():
            show(name, own.figures())
    print(f"\nmean of {len(texts)} texts")
    means = {}
    for name in candidates:
        own = [each[name] for each in found.values()]
        sums = [each.sums for each in own]
        means[name] = {key: sum(getattr(each, key) for each in own) / len(own) for key in MEANS}
        means[name] |= {"ratio_interval": interval(sums, perplexity_ratios), "kl_interval": interval(sums, kls)}
        show(name, means[name])
    active = {name: model.config.active_heads_per_layer for name, model in models.items()}
    counts = ", ".join(f"{name} {sum(own) / len(own):g}" for name, own in active.items())
    print(f"active heads: {counts} of {base.config.num_attention_heads}; {computed}, {name_device(device)}")
    if args.json:
        write_json(args.json, {"compute_dtype": computed, "means": means})


def show(name: str, figures: dict[str, Any]) -> None:
    """Print one model's figures."""
    ratio = show_figure(figures["perplexity_ratio"], figures["ratio_interval"], ".4f")
    kl = show_figure(figures["kl"], figures["kl_interval"], ".4f")
    print(f"{name[-40:]:<40} x {ratio}, KL {kl}, same top-1 {figures['top1_agreement']:.1%}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
