"""How near conversions of one base come to it without any training, over budgets and kinds of plan.

    python benchmarks/quality.py BASE --calibration mixture.yaml --budgets 8 7 6 5 \\
        --text c4/validation.jsonl book/validation.jsonl arxiv/validation.jsonl --json quality.json

The base is calibrated once for each routing granularity and way of choosing shared heads; every plan is cut
from that, and one that splits key-value groups where these are routed is left out. Each row is a
model, each text a column: perplexity / base perplexity on windows of 512 tokens with documents
isolated, and the mean KL(base || model) in nats per token over all texts, with 95 % intervals
over documents. Beside each text stands the share of its 13-grams of tokens that the
calibration text holds, too; `--documents N --last` takes documents of the calibration's own files
that it did not read. The oracle rows drop, with
the same budgets and fallbacks, the heads or groups whose true contribution is least: what a perfect
router of this kind would reach.
"""

import argparse
import dataclasses
import itertools
import sys
import tempfile
import time
from pathlib import Path

import held_out
import torch
from baselines.oracle import by_oracle
from command import add_compute_dtype, device_and_dtype, status_of
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from moh_llm.conversion.base import BaseCheckpoint, open_base
from moh_llm.conversion.budget import plan_layers, routing_tensors
from moh_llm.conversion.calibrate import LayerCalibration, calibrate
from moh_llm.conversion.convert import peak_memory_mib
from moh_llm.conversion.layers import LayerwiseModel
from moh_llm.conversion.plan import PlanOptions
from moh_llm.data.mixture import mixture_from_arguments
from moh_llm.data.sample import sample_mixture
from moh_llm.data.windows import fixed_batches
from moh_llm.devices import name_device
from moh_llm.errors import UserError
from moh_llm.files import write_json
from moh_llm.intervals import interval, kls, perplexity_ratios, show_documents, show_figure
from moh_llm.metrics import Batch, LogitsOf, compare_to_reference, logits_of
from moh_llm.modeling import MoHLlamaForCausalLM


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="folder or Hub id of the dense model")
    parser.add_argument("--calibration", nargs="+", required=True, help="text files or a mixture, as for convert")
    parser.add_argument("--calibration-tokens", type=int, default=24576)
    parser.add_argument("--text", nargs="+", required=True, help="text files, each a column of the table")
    held_out.add_arguments(parser)
    parser.add_argument("--budgets", nargs="+", type=int, default=[8, 7, 6, 5], help="mean active heads")
    parser.add_argument("--even", nargs="*", type=int, default=[7, 6], help="budgets to try evenly, too")
    parser.add_argument("--shared", nargs="+", default=["first:1"], help="KIND:NUMBER of routed groups")
    parser.add_argument("--routing-granularity", nargs="+", default=["head"], choices=["head", "kv_group"])
    parser.add_argument("--fallback", nargs="+", default=["value"], choices=["value", "none"])
    parser.add_argument("--oracle", action="store_true", help="add the oracle rows")
    parser.add_argument("--paper", action="store_true", help="add the paper's layer at each budget")
    add_compute_dtype(parser)
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    return status_of(run, parser.parse_args())


def run(args: argparse.Namespace) -> None:
    device, dtype, computed = device_and_dtype(args)
    base = open_base(args.base)
    tokenizer = AutoTokenizer.from_pretrained(base.folder)
    dense = AutoModelForCausalLM.from_pretrained(base.folder, dtype=dtype).to(device).eval()
    length = min(held_out.WINDOW, base.config.max_position_embeddings)
    texts = held_out.read_texts(args.text, args, tokenizer, length, held_out.BATCH)
    mixture = mixture_from_arguments(args.calibration)
    sources = sample_mixture(mixture, tokenizer, args.calibration_tokens, 0)
    streams, shares = [s.train for s in sources], [s.weight for s in sources]
    batches = fixed_batches(streams, shares, length, args.calibration_tokens, held_out.BATCH)
    read = held_out.ngrams_of_batches(batches)

    candidates: dict[str, LogitsOf] = {}
    for granularity, shared in itertools.product(args.routing_granularity, args.shared):
        kind, number = shared.split(":")
        for fallback in args.fallback:
            plan = PlanOptions(shared=kind, fallback=fallback, routing_granularity=granularity)
            plan = dataclasses.replace(plan, num_shared_heads=int(number) * plan.heads_per_group(base.config))
            started = time.perf_counter()
            calibrated = _calibrate(base, plan, batches, dtype, device)
            print(f"calibrated {granularity}, {shared}, {fallback}: {time.perf_counter() - started:.0f} s", flush=True)
            for budget, budgets in [(b, "uneven") for b in args.budgets] + [(b, "even") for b in args.even]:
                plan = dataclasses.replace(plan, num_active_heads=budget, budgets=budgets)
                label = f"{budget} {budgets}, {granularity}, {shared}, {fallback}"
                try:
                    model = _model(base, dense, plan, calibrated, dtype)
                except UserError as error:
                    print(f"{label} is left out: {error}", flush=True)
                    continue
                candidates[label] = logits_of(model)
                if args.oracle:
                    candidates[f"{label}, oracle"] = by_oracle(model)
                print(f"{label}: {model.config.active_heads_per_layer}", flush=True)
    if args.paper:
        heads = base.config.num_attention_heads
        for budget in args.budgets:
            plan = PlanOptions(preset="paper", num_active_heads=budget, num_shared_heads=min(budget, heads // 2))
            candidates[f"{budget} paper"] = logits_of(_model(base, dense, plan, None, dtype))

    found, columns = {}, {}
    for name, batches in texts.items():
        progress = tqdm(batches, desc=name[-40:], unit="batch")
        found[name] = compare_to_reference(candidates, logits_of(dense), progress)
        some, overlap = next(iter(found[name].values())), held_out.overlap(batches, read)
        columns[name] = {
            "documents": some.documents,
            "tokens": some.tokens,
            "base_perplexity": some.reference_perplexity,
            "overlap": held_out.describe(overlap),
        }
        print(
            f"{name}: {show_documents(some.documents)}, {some.tokens} tokens, base perplexity "
            f"{some.reference_perplexity:.2f}, {overlap.share:.2%} of its 13-grams are in the calibration text",
            flush=True,
        )
    rows = []
    for label in candidates:
        own = [found[name][label] for name in texts]
        mean, kl = (sum(getattr(each, key) for each in own) / len(own) for key in ("perplexity_ratio", "kl"))
        sums = [each.sums for each in own]
        row = {
            "model": label,
            "texts": {name: found[name][label].figures() for name in texts},
            "mean_ratio": mean,
            "mean_ratio_interval": interval(sums, perplexity_ratios),
            "kl": kl,
            "kl_interval": interval(sums, kls),
        }
        rows.append(row)
        ratios = " ".join(show_figure(each.perplexity_ratio, each.ratio_interval, ".4f") for each in own)
        mean, kl = show_figure(mean, row["mean_ratio_interval"], ".4f"), show_figure(kl, row["kl_interval"], ".4f")
        print(f"{label:<42} {ratios}  mean {mean}  KL {kl}")
    print(f"{computed}, {name_device(device)}; peak memory {peak_memory_mib()} MiB")
    if args.json:
        write_json(args.json, {"compute_dtype": computed, "texts": columns, "models": rows})


def _calibrate(
    base: BaseCheckpoint, plan: PlanOptions, batches: list[Batch], dtype: torch.dtype, device: torch.device
) -> list[LayerCalibration]:
    model = LayerwiseModel(base.folder, base.weight_map, base.config, dtype, device)
    with tempfile.TemporaryDirectory() as scratch:
        return calibrate(model, batches, [plan], Path(scratch))[0]


def _model(
    base: BaseCheckpoint,
    dense: PreTrainedModel,
    plan: PlanOptions,
    calibrated: list[LayerCalibration] | None,
    dtype: torch.dtype,
) -> MoHLlamaForCausalLM:
    """The conversion that `convert` would write, in memory."""
    config, fits = plan_layers(plan, base.config, calibrated)
    model = MoHLlamaForCausalLM(config).to(dtype)
    weights = dense.state_dict() | routing_tensors(fits)
    model.load_state_dict(weights)
    return model.to(dense.device).eval()


if __name__ == "__main__":
    sys.exit(main())
