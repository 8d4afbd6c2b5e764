"""Convert a base for long context in several ways, from one calibration.

    python benchmarks/local_plans.py BASE --calibration a.jsonl b.jsonl --output-dir DIR --keys 0.67 0.5 0.33 \
        --routers threshold linear none --granularities head kv_group

writes a folder for each share of keys, router, granularity and window. Each is what `convert.py BASE --fallback local
--keys X --router R --routing-granularity G --local-window W --heldout-tokens 0` writes with the same text, without the
records of a conversion. With `--fallback value --routers linear none` heads that are off read no keys, so that shares
of keys are shares of heads. Three more names for `--routers` give the same heads to all tokens, and make the others
streaming heads, which attend to the first and the last tokens and to nothing else (`baselines/`):

- "streaming": the heads of least estimated KL on the calibration text are dropped;
- "retrieval": those of the lowest retrieval scores, in the manner of Wu et al.;
- "duo": those of the lowest gates, which are trained on passkeys in that text, as DuoAttention's are.

`benchmarks/long_context.py` compares such models with the base.
"""

import argparse
import dataclasses
import itertools
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from baselines.duo import train_gates
from baselines.retrieval_heads import make_prompts, retrieval_scores
from baselines.streaming import StreamingPlan, make_streaming, ranked_fits
from command import add_compute_dtype, device_and_dtype, load_dense, status_of
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from moh_llm.conversion.base import BaseCheckpoint, open_base
from moh_llm.conversion.calibrate import fit_layer, layer_samples, make_fitter
from moh_llm.conversion.checkpoint import write_description, write_weights
from moh_llm.conversion.config import ConversionConfig
from moh_llm.conversion.convert import LONG_CONTEXT, calibration_batches
from moh_llm.conversion.fit import LayerFitter, LayerSample, RoutingFit
from moh_llm.conversion.layers import LayerwiseModel
from moh_llm.conversion.local_fit import LocalFitter
from moh_llm.conversion.plan import PlanOptions, drops_to_fit, plan_layers, routing_tensors, shared_and_active
from moh_llm.data.mixture import Mixture, mixture_from_arguments
from moh_llm.data.sample import sample_mixture
from moh_llm.data.tokenizer import open_tokenizer
from moh_llm.errors import UserError
from moh_llm.files import check_output_folder, new_folder
from moh_llm.metrics import Batch

SCORED = "retrieval", "duo"  # ways to choose heads by a score of each, without a sweep over the calibration text
STREAMING = "streaming", *SCORED


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
    parser.add_argument("--output-dir", type=Path, required=True, help="folder for the models' folders")
    routers = ["threshold", "linear", "none", *STREAMING]
    parser.add_argument("--routers", nargs="+", default=["threshold"], choices=routers)
    parser.add_argument("--fallback", default="local", choices=["local", "value"])
    parser.add_argument("--granularities", nargs="+", default=["head"], choices=["head", "kv_group"])
    parser.add_argument("--gate-steps", type=int, default=100, help="steps that train the gates of duo")
    parser.add_argument("--windows", type=int, nargs="+", help="default: that of convert.py")
    return status_of(run, parser.parse_args())


def calibration_part(
    mixture: Mixture, tokenizer: PreTrainedTokenizerBase, tokens: int, length: int, seed: int
) -> list[Batch]:
    """The calibration text of a seed: as many windows of each source, after those of the seeds before it.

    Raises UserError where a source has too little text.
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
    if {*args.routers} & {*STREAMING} and args.fallback != "local":
        raise UserError(f"--routers {' '.join(STREAMING)}: streaming heads have local fallbacks; drop --fallback")
    base = open_base(args.base)
    windows = args.windows or [PlanOptions(context=args.context).window]
    same = {"fallback": args.fallback, "local_start": args.local_start, "context": args.context}
    plans: dict[str, PlanOptions] = {}
    for keys, name, granularity, window in itertools.product(args.keys, args.routers, args.granularities, windows):
        kind, router = (StreamingPlan, "none") if name in STREAMING else (PlanOptions, name)
        own = {"keys": keys, "router": router, "local_window": window, "routing_granularity": granularity}
        plans[f"{keys:g}-{name}-{granularity}-{window}"] = kind(**same, **own)
    for name, plan in plans.items():
        shared_and_active(plan, base.config)
        check_output_folder(args.output_dir / name, overwrite=False, reads=[args.base])
    if args.context > (positions := base.config.max_position_embeddings):
        raise UserError(f"--context {args.context} is more than the {positions} tokens that {args.base} was made for")
    text, tokenizer = mixture_from_arguments(args.calibration), open_tokenizer(base.folder, base.config.vocab_size)
    batches = calibration_part(text, tokenizer, args.calibration_tokens, args.context, args.seed)
    device, dtype, _ = device_and_dtype(args)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    calibrated: dict[str, list[dict[int, RoutingFit]]] = {}
    for window in windows:  # plans of one window share the sweeps, and the scores
        own = {name: plan for name, plan in plans.items() if plan.window == window}
        for router in (router for router in SCORED if router in args.routers):
            scores = score_heads(router, args, base, batches, window)
            named = [name for name in own if f"-{router}-" in name]
            calibrated |= {name: ranked_fits(scores, own.pop(name), base.config) for name in named}
        if own:
            dense = LayerwiseModel(base.folder, base.weight_map, base.config, dtype, device)
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
        cost = "scores of the others" if name.split("-")[1] in SCORED else "estimated KL"
        cost += f" {sum(fit.cost for fit in fits):.4f}"
        print(f"{name}: {sum(active) / len(active):.3f} heads per layer, {cost}", flush=True)


def score_heads(router: str, args: Any, base: BaseCheckpoint, batches: list[Batch], window: int) -> torch.Tensor:
    """How much each head needs full attention by that of `SCORED`, `[layers, H]`."""
    device, dtype, _ = device_and_dtype(args)
    model, tokenizer = load_dense(base.folder, device, dtype), open_tokenizer(base.folder, base.config.vocab_size)
    text = torch.cat([batch["input_ids"].flatten() for batch in batches])
    if router == "retrieval":
        scores = retrieval_scores(model, make_prompts(text, tokenizer))
    else:
        gates = train_gates(model, text, tokenizer, window, PlanOptions.local_sinks, args.gate_steps, args.seed)
        noise = torch.rand(gates.shape, generator=torch.Generator().manual_seed(args.seed))  # as there, against ties
        scores = (gates + 1e-6 * noise).repeat_interleave(base.config.num_attention_heads // gates.shape[1], 1)
    shown = scores.quantile(torch.linspace(0, 1, 5)).tolist()
    print(f"{router}: least score, quartiles and largest {', '.join(f'{score:.4f}' for score in shown)}", flush=True)
    return scores


def make(plan: PlanOptions, config: PreTrainedConfig, sample: LayerSample) -> LayerFitter | LocalFitter:
    """What fits a layer for that plan."""
    return (make_streaming if isinstance(plan, StreamingPlan) else make_fitter)(plan, config, sample)


def fit_plans(
    plans: Mapping[str, PlanOptions],
    config: PreTrainedConfig,
    sample: LayerSample,
    make: Callable[[Any, PreTrainedConfig, LayerSample], LayerFitter | LocalFitter],
) -> dict[str, dict[int, RoutingFit]]:
    """The fits of one layer by each plan; plans that differ in their budget alone share them."""
    fitted: dict[Any, dict[int, RoutingFit]] = {}
    found = {}
    for name, plan in plans.items():
        key = dataclasses.replace(plan, num_active_heads=None, keys=None), tuple(drops_to_fit(plan, config))
        if key not in fitted:
            fitted[key] = fit_layer(plan, config, make(plan, config, sample))
        found[name] = fitted[key]
    return found


if __name__ == "__main__":
    sys.exit(main())
