"""Ways to choose the heads that are on, with local fallbacks: what each would cost, by calibration's estimate.

    python benchmarks/local_routers.py BASE --calibration a.jsonl b.jsonl --context 8192 --keys 0.67 0.5 0.33

Each way is fitted on three quarters of the calibration text. On the rest, other documents where there are enough, the
table has the mean over tokens of the sum over layers of 1/2 (sum of z_h over the heads that the token has off)^2
(`moh_llm.conversion.local_fit`), with 95 % intervals by bootstrap over blocks of 256 tokens, for as many heads on the
mean. The first three are plans that `convert.py` writes. The others choose among all heads of all layers by the cost
c_h that they predict, and have one threshold for all layers:

- "one threshold": the linear router's predictions;
- "Top-K over all layers": the same ones, as many heads for each token; it needs the last layer's input for the first;
- "and position": log of the number of keys out of sight as one more input;
- "and attention out of sight": the true share of the softmax's weight, which bounds what sums of old keys could tell;
- "small MLP": one hidden layer of 64 numbers, trained on the same predictions with AdamW;
- "oracle": the true cost.
"""

import argparse
import dataclasses
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import local_plans
import numpy as np
import torch
from command import status_of
from torch import nn

from moh_llm.conversion.base import open_base
from moh_llm.conversion.budget import allocate
from moh_llm.conversion.fit import LayerSample, Ridge, group_costs, group_metric
from moh_llm.conversion.local_fit import LocalFitter
from moh_llm.conversion.local_sample import STRIDE
from moh_llm.conversion.plan import PlanOptions, shared_and_active
from moh_llm.conversion.sweeps import layer_samples
from moh_llm.intervals import show_figure

PLANS = {"fixed": "none", "Top-K of each layer": "linear", "threshold": "threshold"}
BLOCK = 256  # tokens that count as one in intervals
STEPS = 300  # of the small MLP's training


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    local_plans.add_arguments(parser)
    parser.add_argument("--window", type=int, help="default: that of convert.py")
    args = parser.parse_args()
    return status_of(run, args)


def run(args: argparse.Namespace) -> None:
    base = open_base(args.base)
    of_all = base.config.num_attention_heads * base.config.num_hidden_layers
    options = PlanOptions(
        fallback="local", local_window=args.window, local_start=args.local_start, context=args.context
    )
    budgets = {keys: shared_and_active(dataclasses.replace(options, keys=keys), base.config)[1] for keys in args.keys}
    dense, batches = local_plans.open_calibration(args, base)
    seen = (options.window, options.local_sinks)
    plans: dict[str, list[dict[int, tuple[float, torch.Tensor]]]] = defaultdict(list)
    effects, predicted = [], defaultdict(list)
    with tempfile.TemporaryDirectory() as scratch:
        for sample, local in layer_samples(dense, batches, [seen], options.all_heads_until, Path(scratch), args.seed):
            sample.local = local[seen]
            compared = (sample.local.far[sample.fitted :, 0].isfinite()).nonzero()[:, 0]
            fitters = {name: LocalFitter(sample, router) for name, router in PLANS.items()}
            for name, fitter in fitters.items():
                fits = [fitter.fit(dropped) for dropped in range(base.config.num_attention_heads + 1)]
                plans[name].append({fit.dropped: (fit.cost, fitter.effect(fit)[compared]) for fit in fits})
            effects.append(fitters["threshold"].effects[compared])
            for name, costs in predictions(sample, fitters["threshold"], compared).items():
                predicted[name].append(costs)
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
            if name == "Top-K over all layers":
                lowest = c.transpose(0, 1).flatten(1).topk(of_all - on, 1, largest=False).indices
                flat = torch.zeros(c.shape[1], of_all, device=c.device).scatter(1, lowest, 1.0)
                off = flat.unflatten(1, (len(z), -1)).transpose(0, 1)
            else:
                off = c <= c.flatten().kthvalue(round((of_all - on) * c.shape[1])).values
            found.append(((z * off).sum(-1).square() / 2).sum(0))
        print_row(name, found)


def predictions(sample: LayerSample, fitter: LocalFitter, compared: torch.Tensor) -> dict[str, torch.Tensor]:
    """Log of the costs of a layer's heads for some held-out tokens `[N, H]`, by each way."""
    fitted = sample.fitted
    costs = group_costs(fitter.residual, group_metric(sample, 1)).clamp_min(1e-24).log() / 2
    assert sample.local is not None
    position = sample.local.hidden.log()[:, None]
    linear = fitter.logits[fitted:][compared]

    def fit(more: torch.Tensor) -> torch.Tensor:
        """By the linear router with more inputs `[tokens, n]`, where these are known."""
        # As wide as a layer's inputs, so that the ridge shrinks them as much.
        rows = more[:fitted].isfinite().all(1).nonzero()[:, 0]
        scale = sample.inputs.std() / more[rows].std(0).clamp_min(1e-6)
        inputs = torch.cat([sample.inputs, (more - more[rows].mean(0)) * scale], dim=1)
        weight, bias = Ridge(inputs[rows])(costs[rows])
        return inputs[fitted:][compared] @ weight.T + bias

    return {
        "one threshold": linear,
        "Top-K over all layers": linear,
        "and position": fit(position),
        "and attention out of sight": fit(sample.local.far - sample.local.near),
        "small MLP": by_mlp(sample.inputs[:fitted], costs[:fitted], sample.inputs[fitted:][compared]),
        "oracle": costs[fitted:][compared],
    }


def by_mlp(inputs: torch.Tensor, targets: torch.Tensor, asked: torch.Tensor) -> torch.Tensor:
    """What a small MLP that is trained on inputs `[N, C]` and targets `[N, H]` says of others."""
    torch.manual_seed(0)
    mean, scale = inputs.mean(0), inputs.std(0).clamp_min(1e-6)
    level, spread = targets.mean(0), targets.std(0).clamp_min(1e-6)
    inputs, targets = (inputs - mean) / scale, (targets - level) / spread
    network = nn.Sequential(nn.Linear(inputs.shape[1], 64), nn.GELU(), nn.Linear(64, targets.shape[1]))
    network.to(inputs.device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for _ in range(STEPS):
        rows = torch.randint(len(inputs), (2048,))
        loss = (network(inputs[rows]) - targets[rows]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        return network((asked - mean) / scale) * spread + level


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
