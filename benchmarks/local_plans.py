"""Convert a base for long context in several ways, from one calibration.

    python benchmarks/local_plans.py BASE --calibration a.jsonl b.jsonl --output-dir DIR --keys 0.67 0.5 0.33 \
        --routers threshold linear none --granularities head kv_group

writes a folder for each share of keys, router, granularity and window. Each is what `convert.py BASE --fallback local
--keys X --router R --routing-granularity G --local-window W --heldout-tokens 0` writes with the same text, without the
records of a conversion. With `--fallback value --routers linear none` heads that are off read no keys, so that shares
of keys are shares of heads. With `--streaming --routers none` it is a plan in the manner of DuoAttention: fixed heads,
and the others attend to the first and the last tokens and to nothing else (`baselines/streaming.py`).
`benchmarks/long_context.py` compares such models with the base.

With `--estimate` no model is written: the table has what ways to choose heads would cost, with local fallbacks, by
calibration's estimate. Each way is fitted on three quarters of the calibration text. On the rest, other documents where
there are enough, the table has the mean over tokens of the sum over layers of 1/2 (sum of z_h over the heads that the
token has off)^2 (`moh_llm.conversion.local_fit`), with 95 % intervals by bootstrap over blocks of 256 tokens, for as
many heads on the mean. The first three are plans that `convert.py` writes. The others choose among all heads of all
layers by the cost c_h that they predict, and have one threshold for all layers:

- "one threshold": the linear router's predictions;
- "oracle": the true cost.
"""

import argparse
import dataclasses
import itertools
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from baselines.streaming import make_streaming
from command import add_compute_dtype, device_and_dtype, status_of
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from moh_llm.conversion.base import BaseCheckpoint, open_base
from moh_llm.conversion.calibrate import fit_layer, layer_samples, make_fitter
from moh_llm.conversion.checkpoint import write_description, write_weights
from moh_llm.conversion.config import ConversionConfig
from moh_llm.conversion.convert import LONG_CONTEXT, calibration_batches
from moh_llm.conversion.fit import LayerFitter, LayerSample, RoutingFit, group_costs, group_metric
from moh_llm.conversion.layers import LayerwiseModel
from moh_llm.conversion.local_fit import STRIDE, LocalFitter
from moh_llm.conversion.plan import PlanOptions, allocate, drops_to_fit, plan_layers, routing_tensors, shared_and_active
from moh_llm.data.mixture import Mixture, mixture_from_arguments
from moh_llm.data.sample import sample_mixture
from moh_llm.data.tokenizer import open_tokenizer
from moh_llm.errors import UserError
from moh_llm.files import check_output_folder, new_folder
from moh_llm.intervals import show_figure
from moh_llm.metrics import Batch

PLANS = {"fixed": "none", "Top-K of each layer": "linear", "threshold": "threshold"}
BLOCK = 256  # tokens that count as one in intervals


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base")
    parser.add_argument("--calibration", nargs="+", required=True, help="text files, or one mixture (.yaml)")
    parser.add_argument("--keys", type=float, nargs="+", default=[0.67, 0.5, 0.33])
    parser.add_argument("--context", type=int, default=ConversionConfig.context)
    parser.add_argument("--local-start", type=int, help="default: that of convert.py")
    parser.add_argument("--calibration-tokens", type=int, default=ConversionConfig.calibration_tokens)
    parser.add_argument("--seed", type=int, default=0, help="another one takes text after that of the seeds before it")
    add_compute_dtype(parser)
    jobs = parser.add_mutually_exclusive_group(required=True)
    jobs.add_argument("--output-dir", type=Path, help="folder for the models' folders")
    jobs.add_argument("--estimate", action="store_true", help="compare ways to choose heads instead")
    parser.add_argument("--routers", nargs="+", default=["threshold"], choices=["threshold", "linear", "none"])
    parser.add_argument("--fallback", default="local", choices=["local", "value"])
    parser.add_argument("--granularities", nargs="+", default=["head"], choices=["head", "kv_group"])
    parser.add_argument("--streaming", action="store_true", help="fallbacks without a token for what is out of sight")
    parser.add_argument("--windows", type=int, nargs="+", help="default: that of convert.py")
    args = parser.parse_args()
    return status_of(estimate if args.estimate else run, args)


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
    sources = sample_mixture(mixture, tokenizer, wanted, 1, length if length >= LONG_CONTEXT else None)
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
    windows = args.windows or [PlanOptions(context=args.context).window]
    plans = {
        f"{share:g}-{router}-{granularity}-{window}": PlanOptions(
            keys=share,
            router=router,
            fallback=args.fallback,
            local_window=window,
            local_start=args.local_start,
            context=args.context,
            routing_granularity=granularity,
        )
        for share, router, granularity, window in itertools.product(
            args.keys, args.routers, args.granularities, windows
        )
    }
    for name, plan in plans.items():
        shared_and_active(plan, base.config)
        check_output_folder(args.output_dir / name, overwrite=False, reads=[args.base])
    dense, batches = open_calibration(args, base)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    make = make_streaming if args.streaming else make_fitter
    calibrated: dict[str, list[dict[int, RoutingFit]]] = {}
    for window in windows:  # plans of one window share the sweeps
        own = {name: plan for name, plan in plans.items() if plan.window == window}
        with tempfile.TemporaryDirectory(dir=args.output_dir) as scratch:
            samples = layer_samples(dense, batches, next(iter(own.values())), Path(scratch), args.seed)
            layers = [fit_plans(own, base.config, sample, make) for sample in samples][::-1]  # last layer first
        calibrated |= {name: [fitted[name] for fitted in layers] for name in own}
    for name, plan in plans.items():
        config, fits = plan_layers(plan, base.config, calibrated[name])
        config.dtype = base.dtype
        routing = {key: tensor.to(base.dtype) for key, tensor in routing_tensors(fits).items()}
        with new_folder(args.output_dir / name) as folder:
            write_description(folder, base, config, write_weights(folder, base, routing))
        active = config.active_heads_per_layer
        cost = sum(fit.cost for fit in fits)
        print(f"{name}: {sum(active) / len(active):.3f} heads per layer, estimated KL {cost:.4f}", flush=True)


def fit_plans(
    plans: Mapping[str, PlanOptions],
    config: PreTrainedConfig,
    sample: LayerSample,
    make: Callable[[Any, PreTrainedConfig, LayerSample], LayerFitter | LocalFitter],
) -> dict[str, dict[int, RoutingFit]]:
    """The fits of one layer by each plan; plans that differ in their budget alone share them."""
    fitted: dict[Any, dict[int, RoutingFit]] = {}
    keys = {}
    for name, plan in plans.items():
        without_budget = dataclasses.replace(plan, num_active_heads=None, keys=None)
        keys[name] = without_budget, tuple(drops_to_fit(plan, config))
        if keys[name] not in fitted:
            fitted[keys[name]] = fit_layer(plan, config, make(plan, config, sample))
    return {name: fitted[key] for name, key in keys.items()}


def estimate(args: argparse.Namespace) -> None:
    """Print what each way to choose heads would cost."""
    base = open_base(args.base)
    of_all = base.config.num_attention_heads * base.config.num_hidden_layers
    window = args.windows[0] if args.windows else None
    options = PlanOptions(fallback="local", local_window=window, local_start=args.local_start, context=args.context)
    budgets = {keys: shared_and_active(dataclasses.replace(options, keys=keys), base.config)[1] for keys in args.keys}
    dense, batches = open_calibration(args, base)
    plans: dict[str, list[dict[int, tuple[float, torch.Tensor]]]] = defaultdict(list)
    effects, predicted = [], defaultdict(list)
    with tempfile.TemporaryDirectory() as scratch:
        for sample in layer_samples(dense, batches, options, Path(scratch), args.seed):
            compared = (sample.local.far[sample.fitted :, 0].isfinite()).nonzero()[:, 0]
            fitters = {name: LocalFitter(sample, router) for name, router in PLANS.items()}
            for name, fitter in fitters.items():
                fits = [fitter.fit(dropped) for dropped in range(base.config.num_attention_heads + 1)]
                plans[name].append({fit.dropped: (fit.cost, fitter.effect(fit)[compared]) for fit in fits})
            effects.append(fitters["threshold"].effects[compared])
            by_threshold = fitters["threshold"]
            costs = group_costs(by_threshold.residual, group_metric(sample, 1)).clamp_min(1e-24).log() / 2
            for name, log_costs in (("one threshold", by_threshold.logits), ("oracle", costs)):
                predicted[name].append(log_costs[sample.fitted :][compared])
    print(f"{len(effects[0])} held-out tokens; KL in nats per token, estimated (95 % over blocks of {BLOCK} tokens)")
    print(f"{'keys read':<36}" + "".join(f"{keys:>28}" for keys in budgets))
    print(f"{'heads on':<36}" + "".join(f"{on / of_all:>28.3f}" for on in budgets.values()))
    for name, layers in plans.items():
        found = []
        for on in budgets.values():
            drops = allocate([{dropped: cost for dropped, (cost, _) in layer.items()} for layer in layers], of_all - on)
            found.append(sum(layer[dropped][1].square() / 2 for layer, dropped in zip(layers, drops, strict=True)))
        print_row(name, found)
    z = torch.stack(effects)  # [layers, N, H]
    for name, costs in predicted.items():
        c = torch.stack(costs)
        found = []
        for on in budgets.values():
            off = c <= c.flatten().kthvalue(round((of_all - on) * c.shape[1])).values
            found.append(((z * off).sum(-1).square() / 2).sum(0))
        print_row(name, found)


def print_row(name: str, found: Sequence[torch.Tensor]) -> None:
    """Means over tokens of each `[N]`, with intervals."""
    cells = []
    for values in found:
        blocks = [block.mean().item() for block in values.split(BLOCK // STRIDE)]
        draws = np.random.default_rng(0).choice(blocks, (2000, len(blocks))).mean(1)
        cells.append(show_figure(values.mean().item(), np.percentile(draws, (2.5, 97.5)).tolist(), ".4f"))
    print(f"{name:<36}" + "".join(f"{cell:>28}" for cell in cells), flush=True)


if __name__ == "__main__":
    sys.exit(main())
