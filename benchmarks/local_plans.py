"""Convert a base for long context in several ways, from one calibration.

    python benchmarks/local_plans.py BASE --calibration a.jsonl b.jsonl --output DIR --keys 0.67 0.5 0.33 \
        --routers threshold linear none --granularities head kv_group

writes a folder for each share of keys, router, granularity and window; `--attention-times` adds plans whose budget is a
share of the time of the base's attention, as it is measured here. Each is what `convert.py BASE --fallback local
--keys X --router R --routing-granularity G --local-window W --verify none` writes with the same text, without the
records of a conversion; with several windows documents' first tokens up to the longest are left out of all fits. With
`--fallback value --routers linear none` heads that are off read no keys, so that shares of keys are shares of heads.
With `--streaming --routers none` it is a plan in the manner of DuoAttention: fixed heads, and the others attend to the
first and the last tokens and to nothing else (`baselines/streaming.py`).
`benchmarks/long_context.py` compares such models with the base.
"""

import argparse
import dataclasses
import itertools
import sys
import tempfile
from pathlib import Path

from baselines.streaming import make_streaming
from command import add_compute_dtype, device_and_dtype, status_of
from transformers import PreTrainedTokenizerBase

from moh_llm.conversion.attention_time import AttentionTimes, measure_attention
from moh_llm.conversion.base import BaseCheckpoint, open_base
from moh_llm.conversion.budget import plan_layers, routing_tensors
from moh_llm.conversion.calibrate import calibrate, make_fitter
from moh_llm.conversion.checkpoint import write_description, write_weights
from moh_llm.conversion.convert import ConversionOptions, calibration_batches
from moh_llm.conversion.layers import LayerwiseModel
from moh_llm.conversion.plan import LONG, PlanOptions, shared_and_active
from moh_llm.data.mixture import Mixture, mixture_from_arguments
from moh_llm.data.sample import sample_mixture
from moh_llm.data.tokenizer import open_tokenizer
from moh_llm.errors import UserError
from moh_llm.files import check_output_folder, new_folder
from moh_llm.metrics import Batch

DEFAULT = ConversionOptions("", Path())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--output", type=Path, required=True, help="folder for the models' folders")
    parser.add_argument("--routers", nargs="+", default=["threshold"], choices=["threshold", "linear", "none"])
    parser.add_argument("--fallback", default="local", choices=["local", "value"])
    parser.add_argument("--granularities", nargs="+", default=["head"], choices=["head", "kv_group"])
    parser.add_argument("--attention-times", type=float, nargs="*", default=[])
    parser.add_argument("--streaming", action="store_true", help="fallbacks without a token for what is out of sight")
    parser.add_argument("--windows", type=int, nargs="+", help="default: that of convert.py")
    args = parser.parse_args()
    return status_of(run, args)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `open_calibration` reads, and shares of keys."""
    parser.add_argument("base")
    parser.add_argument("--calibration", nargs="+", required=True, help="text files, or one mixture (.yaml)")
    parser.add_argument("--keys", type=float, nargs="+", default=[0.67, 0.5, 0.33])
    parser.add_argument("--context", type=int, default=DEFAULT.context)
    parser.add_argument("--local-start", type=int, help="default: that of convert.py")
    parser.add_argument("--calibration-tokens", type=int, default=DEFAULT.calibration_tokens)
    parser.add_argument("--seed", type=int, default=0, help="another one takes text after that of the seeds before it")
    add_compute_dtype(parser)


def open_calibration(args: argparse.Namespace, base: BaseCheckpoint) -> tuple[LayerwiseModel, list[Batch]]:
    """The dense model layer by layer, and the calibration text that `convert.py` would take, or another seed's."""
    if args.context > (positions := base.config.max_position_embeddings):
        raise UserError(f"--context {args.context} is more than the {positions} tokens that {args.base} was made for")
    tokenizer = open_tokenizer(base.folder, base.config.vocab_size)
    text = mixture_from_arguments(args.calibration)
    batches = calibration_part(text, tokenizer, args.calibration_tokens, args.context, args.seed)
    device, dtype, _ = device_and_dtype(args)
    return LayerwiseModel(base.folder, base.weight_map, base.config, dtype, device), batches


def calibration_part(
    mixture: Mixture, tokenizer: PreTrainedTokenizerBase, tokens: int, length: int, seed: int
) -> list[Batch]:
    """The calibration text of a seed: as many windows of each source, after those of the seeds before it.

    Raises:
        UserError: a source has too little text.
    """
    wanted = (seed + 1) * (tokens + len(mixture.sources) * length) if seed else tokens
    sources = sample_mixture(mixture, tokenizer, wanted, 1, length if length >= LONG else None)
    for number, source in enumerate(sources if seed else []):
        width = max(1, round(tokens * source.weight / length)) * length  # as `calibration_batches` counts
        if (seed + 1) * width > len(source.train):
            raise UserError(
                f"source {source.name} has {len(source.train)} tokens, too few for seed {seed} with {width} for each; "
                "give more text, or fewer seeds or --calibration-tokens"
            )
        sources[number] = dataclasses.replace(source, train=source.train.part(seed * width, (seed + 1) * width))
    return calibration_batches(sources, length, tokens)


def run(args: argparse.Namespace) -> None:
    if args.streaming and args.fallback != "local":
        raise UserError("--streaming plans have local fallbacks; drop --fallback")
    base = open_base(args.base)
    budgets = {f"{share:g}": {"keys": share} for share in args.keys}
    budgets |= {f"time-{share:g}": {"attention_time": share} for share in args.attention_times}
    windows = args.windows or [PlanOptions(context=args.context).window]
    plans = {
        f"{budget}-{router}-{granularity}-{window}": PlanOptions(
            router=router,
            fallback=args.fallback,
            local_window=window,
            local_start=args.local_start,
            context=args.context,
            routing_granularity=granularity,
            **budgets[budget],
        )
        for budget, router, granularity, window in itertools.product(budgets, args.routers, args.granularities, windows)
    }
    for name, plan in plans.items():
        shared_and_active(plan, base.config)
        check_output_folder(args.output / name, overwrite=False, reads=[args.base])
    dense, batches = open_calibration(args, base)
    args.output.mkdir(parents=True, exist_ok=True)
    measured: dict[PlanOptions, AttentionTimes] = {}
    for plan in plans.values():
        alike = dataclasses.replace(plan, keys=None, attention_time=None)
        if plan.attention_time is not None and alike not in measured:
            measured[alike] = measure_attention(base.config, plan, dense.dtype, dense.device)
            print(f"{plan.router_type}, {plan.routing_granularity}, window {plan.local_window}: {measured[alike]}")
    times = [
        measured[dataclasses.replace(plan, attention_time=None)] if plan.attention_time is not None else None
        for plan in plans.values()
    ]
    make = make_streaming if args.streaming else make_fitter
    with tempfile.TemporaryDirectory(dir=args.output) as scratch:
        calibrated = calibrate(dense, batches, [*plans.values()], Path(scratch), args.seed, times, make)
    for (name, plan), layers in zip(plans.items(), calibrated, strict=True):
        config, fits = plan_layers(plan, base.config, layers)
        config.dtype = base.dtype
        routing = {key: tensor.to(base.dtype) for key, tensor in routing_tensors(fits).items()}
        with new_folder(args.output / name) as folder:
            write_description(folder, base, config, write_weights(folder, base, routing, link=True))
        active = config.active_heads_per_layer
        cost = sum(fit.cost for fit in fits)
        print(f"{name}: {sum(active) / len(active):.3f} heads per layer, estimated KL {cost:.4f}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
