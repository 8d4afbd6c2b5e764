"""How far a converted model is from its base on given text, beside the paper's layer.

    python benchmarks/perplexity.py out/moh --base BASE c4/validation.jsonl book/validation.jsonl
    python benchmarks/perplexity.py out/recovery/model --base BASE "$CORPORA/*c4/train*" --held-out-share 0.1 \\
        --documents 150 --tokens-per-document 128 --overlap-with mixture.yaml

Each text is read whole, or in the documents that the flags choose, in windows of 512 tokens with
documents isolated. Figures are ratios to the base on the same windows: perplexity / base
perplexity, and KL(base || model) in nats per token, each with its 95 % interval by bootstrap over
documents. Overlap is the share of a text's 13-grams of tokens that the named text holds, too.
"""

import argparse
import sys
from pathlib import Path

import held_out
import torch
from command import status_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from moh_llm.conversion.verify import by_paper_plan
from moh_llm.devices import choose_device
from moh_llm.files import write_json
from moh_llm.intervals import interval, kls, perplexity_ratios, show_figure, show_interval
from moh_llm.metrics import compare_to_reference, logits_of
from moh_llm.modeling import MoHLlamaForCausalLM


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="converted folder")
    parser.add_argument("text", nargs="+", help="text files, each a row of the table")
    parser.add_argument("--base", required=True, help="the dense model it was converted from")
    held_out.add_arguments(parser)
    parser.add_argument("--overlap-with", nargs="+", metavar="TEXT", help="text files or a mixture, as for convert")
    parser.add_argument("--overlap-tokens", type=int, metavar="N", help="only its first N tokens, as for calibration")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    return status_of(run, parser.parse_args())


def run(args: argparse.Namespace) -> None:
    dtype = getattr(torch, args.dtype)
    device = choose_device()
    tokenizer = AutoTokenizer.from_pretrained(args.base)
    base = AutoModelForCausalLM.from_pretrained(args.base, dtype=dtype).to(device).eval()
    model = MoHLlamaForCausalLM.from_pretrained(args.model, dtype=dtype).to(device).eval()
    heads, active = model.config.num_attention_heads, model.config.active_heads_per_layer
    print(f"{args.model}: {sum(active) / len(active):g} of {heads} heads, {args.dtype}, {device}")
    length = min(held_out.WINDOW, base.config.max_position_embeddings)
    texts = held_out.read_texts(args.text, args, tokenizer, length, held_out.BATCH)
    read = held_out.ngrams_of(args.overlap_with, tokenizer, args.overlap_tokens) if args.overlap_with else None
    header = (
        f"{'text':<48} {'docs':>5} {'tokens':>7} {'overlap':>8} {'base ppl':>9} {'x base':>7} {'95 %':>16} {'KL':>7}"
    )
    print(f"{header} {'95 %':>18} {'paper x':>8} {'paper KL':>8}")

    rows, found = [], []
    for text, batches in texts.items():
        candidates = {"model": logits_of(model), "paper": by_paper_plan(model)}
        model_row, paper = compare_to_reference(candidates, logits_of(base), batches).values()
        found.append(model_row.sums)
        overlap = held_out.overlap(batches, read) if read else None
        rows.append(
            {
                "text": text,
                "documents": model_row.documents,
                "tokens": model_row.tokens,
                "overlap": held_out.describe(overlap),
                "base_perplexity": model_row.reference_perplexity,
                "ratio": model_row.perplexity_ratio,
                "ratio_interval": model_row.ratio_interval,
                "kl": model_row.kl,
                "kl_interval": model_row.kl_interval,
                "paper_ratio": paper.perplexity_ratio,
                "paper_ratio_interval": paper.ratio_interval,
                "paper_kl": paper.kl,
                "paper_kl_interval": paper.kl_interval,
            }
        )
        print(
            f"{text[-48:]:<48} {model_row.documents:>5} {model_row.tokens:>7} "
            f"{f'{overlap.share:.2%}' if overlap else '-':>8} {model_row.reference_perplexity:>9.2f} "
            f"{model_row.perplexity_ratio:>7.4f} {show_interval(model_row.ratio_interval, '.4f'):>16} "
            f"{model_row.kl:>7.4f} {show_interval(model_row.kl_interval, '.4f'):>18} "
            f"{paper.perplexity_ratio:>8.2f} {paper.kl:>8.4f}",
            flush=True,
        )
    mean = {
        "documents": sum(row["documents"] for row in rows),
        "ratio": sum(row["ratio"] for row in rows) / len(rows),
        "ratio_interval": interval(found, perplexity_ratios),
        "kl": sum(row["kl"] for row in rows) / len(rows),
        "kl_interval": interval(found, kls),
    }
    print(
        f"mean of {len(rows)} texts, {mean['documents']} documents: "
        f"ratio {show_figure(mean['ratio'], mean['ratio_interval'], '.4f')}, "
        f"KL {show_figure(mean['kl'], mean['kl_interval'], '.4f')}"
    )
    if args.json:
        write_json(args.json, {"mean": mean, "texts": rows})


if __name__ == "__main__":
    sys.exit(main())
