"""What pays in training threshold routers with local fallbacks: which weights, annealing, and what a router may see.

    python benchmarks/routers.py out/moh --train mixture.yaml --text "$CORPORA/redpajama_c4/validation*" \\
        --documents 16 --tokens-per-document 512 --seeds 0 1 2 --output-dir out/routers

Each of `VARIANTS` is trained with the parts of `moh-llm train`; then one shift of its scores is found on training text,
by which it reads the keys that the conversion asked for. What a router sees in addition is a linear term of its scores
that starts at 0. KL, of the base to the model on held-out documents, is in nats per token, with 95 % intervals by
bootstrap over documents and seeds. OUTPUT/routers.json has all sums; the same command resumes.
"""

import argparse
import functools
import sys
from pathlib import Path
from typing import Any

import held_out
import numpy as np
import torch
from command import difference_interval, keep_settings, status_of
from torch import Tensor, nn

from moh_llm.data import mixture, sample
from moh_llm.data.shards import TokenizedSource
from moh_llm.data.stream import SequenceStream
from moh_llm.files import write_json
from moh_llm.flops import distant_keys, share_of_keys
from moh_llm.intervals import show_figure
from moh_llm.metrics import Batch, sums_by_document
from moh_llm.modeling import MoHLlamaForCausalLM, MoHRouter
from moh_llm.modeling.attention_moh import MoHLlamaAttention, _rotate
from moh_llm.reading import read_json
from moh_llm.training import networks, parallel, reference, sharding
from moh_llm.training.budget import distant_keys_read, make_budget, measure_thresholds, planned_share
from moh_llm.training.config import DataConfig, OptimizerConfig, ScheduleConfig, TrainConfig
from moh_llm.training.losses import IGNORED, next_token_targets
from moh_llm.training.step import TrainingStep, accumulate_gradients, seed_step, set_learning_rates

UNTRAINED, DEFAULT, ANNEALED = "untrained, thresholds set", "routers and fallbacks", "annealed from all keys"
ALL, FROZEN = "all weights", "all weights, routers frozen"
QUERY, DISTANT, GATES, MLP = "query's norm", "distant token's share", "gates of the layer below", "rank-16 MLP"
VARIANTS = [DEFAULT, FROZEN, ALL, ANNEALED, QUERY, DISTANT, GATES, MLP]
LENGTH, BATCH, CALIBRATED, RANK = 512, 4, 32, 16  # CALIBRATED: sequences of the training text that set thresholds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder with threshold routers and local fallbacks")
    parser.add_argument("--train", nargs="+", required=True, help="text files or a mixture, as for convert")
    parser.add_argument("--text", nargs="+", required=True, help="held-out text files or globs")
    held_out.add_arguments(parser)
    parser.add_argument("--output-dir", type=Path, required=True, help="folder of the figures")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS, metavar="NAME")
    parser.add_argument("--also", nargs="+", default=[], metavar="MODEL", help="trained models, scored as they are")
    parser.add_argument("--steps", type=int, default=60, help=f"steps of {BATCH} sequences")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    return status_of(run, parser.parse_args())


def run(args: argparse.Namespace) -> None:
    tokenizer = networks.load_tokenizer(Path(args.model))
    texts = held_out.read_texts(args.text, args, tokenizer, LENGTH, held_out.BATCH)
    keep_settings(args.output_dir, {name: getattr(args, name) for name in ("model", "train", "text", "steps")})
    file, text = args.output_dir / "routers.json", mixture.mixture_from_arguments(args.train)
    found: dict[str, dict[str, Any]] = read_json(file) if file.exists() else {}
    sources = sample.sample_mixture(text, tokenizer, 8 * args.steps * BATCH * LENGTH)
    scored = [args.model, *args.also, UNTRAINED]
    for name, seed in [(name, 0) for name in scored] + [(name, seed) for seed in args.seeds for name in args.variants]:
        if str(seed) not in found.setdefault(name, {}):
            step, macs = train(args, name, seed, sources)
            found[name][str(seed)] = {"flops": 2 * macs} | score(step, texts)
            write_json(file, found)
            print(f"{name}, seed {seed}: keys {found[name][str(seed)]['keys']:.4f}", file=sys.stderr, flush=True)
    show(found, scored + args.variants, args.seeds)


def train(args: argparse.Namespace, name: str, seed: int, sources: list[TokenizedSource]) -> tuple[TrainingStep, float]:
    """A variant, trained and with thresholds set, and the multiply-adds per token of its routers' further input."""
    config = TrainConfig(
        **{"model": name if name in args.also else args.model, "output_dir": str(args.output_dir), "seed": seed},
        **{"max_steps": args.steps, "freeze_base": name not in (FROZEN, ALL), "mixed_precision": "no", "report_to": ()},
        data=DataConfig(sequence_length=LENGTH, batch_size=BATCH, micro_batch_size=BATCH),
        optimizer=OptimizerConfig(learning_rate=1e-4, router_learning_rate=1e-2),
        schedule=ScheduleConfig(warmup_steps=args.steps // 20, final_learning_rate=0),
    )
    torch.manual_seed(seed)
    network = networks.make_student(config)
    if name == FROZEN:
        nn.ModuleList(network.routers).requires_grad_(False)
    macs = see_more(network, name) if name in (QUERY, DISTANT, GATES, MLP) else 0.0
    base = reference.find_starting_point(config).reference
    step = TrainingStep(network, networks.make_teacher(config, base, torch.device("cpu")), config.objective, base)
    if name not in (*VARIANTS, UNTRAINED):
        return step, macs
    accelerator, stream = parallel.make_accelerator(config), SequenceStream(sources, LENGTH, seed)
    model, optimizer = sharding.distribute(accelerator, step.train(), config)
    budget, target = make_budget(config, network, accelerator.device), planned_share(network.config)
    for number in range(0 if name == UNTRAINED else config.max_steps):
        seed_step(config, number + 1, 0)
        set_learning_rates(optimizer, config, number)
        losses, _ = accumulate_gradients(accelerator, model, stream.batch(number * BATCH, BATCH), config, 0.0, budget)
        optimizer.step()
        optimizer.zero_grad()
        if budget:
            share = 1 - 2 * (1 - target) * number / config.max_steps  # from all keys, over half of the steps
            budget.target = max(target, share) if name == ANNEALED else target
            budget.update(losses.distant_read, losses.distant_slope)
    batches = [stream.batch(first, BATCH) for first in range(0, CALIBRATED, BATCH)]
    found = measure_thresholds(accelerator, model, batches, target)
    for router in (router for router in network.routers if router.num_routed):
        router.routed.bias.data += found.shift
    return step, macs


@torch.no_grad()
def score(step: TrainingStep, texts: dict[str, list[Batch]]) -> dict[str, Any]:
    """Sums by document of each text (`moh_llm.intervals.SUMMED`), and the share of keys read."""
    step.eval()
    plan, sums, read = step.network.config, {}, np.zeros(2)
    for name, batches in texts.items():
        values, documents = [], []
        for batch in batches:
            targets = next_token_targets(batch["labels"])
            own, logits = step(batch["input_ids"], batch["position_ids"], targets, compare=True)
            values.append(own)
            documents.append(batch["documents"][targets != IGNORED])
            distant = distant_keys(plan, batch["position_ids"]).flatten()
            read += float(distant_keys_read(logits, step.network.routers, distant)[0]), float(distant.sum())
        sums[name] = sums_by_document(torch.cat(values), documents).tolist()
    return {"keys": share_of_keys(plan, read[0] / read[1], batch["input_ids"].shape[1]), "sums": sums}


def see_more(network: MoHLlamaForCausalLM, kind: str) -> float:
    """Give routers a further input; the multiply-adds that it takes per token."""
    macs, below, plan = 0.0, None, network.config
    for attention in (layer.self_attn for layer in network.model.layers if layer.self_attn.router.num_routed):
        router, gates_of, below = attention.router, below, attention.router
        router.register_forward_hook(lambda module, inputs, output: setattr(module, "gate", output[1].detach()))
        if kind == GATES and gates_of is None:
            continue
        width, groups, gates = plan.hidden_size, router.routed_groups, gates_of.num_routed if gates_of else 1
        keys = planned_share(plan) * (plan.local_window + plan.local_sinks)  # heads that are off read theirs anyway
        last, cost = {
            QUERY: (nn.BatchNorm1d(groups), groups * (1 + plan.head_dim)),
            DISTANT: (nn.BatchNorm1d(groups), groups * (1 + keys * plan.head_dim)),
            GATES: (nn.Linear(gates, groups, bias=False), groups * gates),
            MLP: (nn.Linear(RANK, groups, bias=False), RANK * (width + groups)),
        }[kind]
        nn.init.zeros_(last.weight)
        router.more = nn.Sequential(nn.Linear(width, RANK), nn.GELU(), last) if kind == MLP else last
        attention.register_forward_pre_hook(lambda own, _, given: setattr(own, "given", given), with_kwargs=True)
        router.routed.register_forward_hook(functools.partial(add_input, kind, attention, gates_of))
        macs += cost
    return macs


def add_input(kind: str, attention: MoHLlamaAttention, below: MoHRouter | None, *call: Any) -> Tensor:
    """The scores `[B, T, U]` of a layer's router with what its further input adds."""
    own, seen = attention.given["hidden_states"], attention.given["seen"]
    if kind == GATES:
        own = below.gate[..., below.routed_heads]
    elif kind != MLP:
        query, key, *_ = attention._project(own.detach())
        own = query.norm(dim=-1) if kind == QUERY or seen is None else odds(attention, query, key)
        own = own.detach()[..., attention.router.routed_heads]
    return call[-1] + attention.router.more(own.flatten(0, 1)).view_as(call[-1])


@torch.no_grad()
def odds(attention: MoHLlamaAttention, query: Tensor, key: Tensor) -> Tensor:
    """Log odds of the distant token's weight in the softmax of heads that are off, `[B, T, H]`."""
    given, seen = attention.given, attention.given["seen"]
    query, key = _rotate(query.transpose(1, 2), key.transpose(1, 2), *given["position_embeddings"])
    places, key = torch.arange(key.shape[2]), key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    shows = (places <= seen.last) & ((places >= seen.near) | ((places >= seen.start) & (places < seen.sink_end)))
    near = (query @ key.transpose(2, 3) * attention.scaling).masked_fill(~shows[:, None], -torch.inf).logsumexp(-1)
    return attention.fallback(given["hidden_states"])[0] + seen.hidden.clamp_min(1).log() - near.transpose(1, 2)


def show(found: dict[str, dict[str, Any]], names: list[str], seeds: list[int]) -> None:
    """Print the table: a row for each model, and its difference to the default on the same documents and seeds."""
    texts = {text: len(rows) for text, rows in found[UNTRAINED]["0"]["sums"].items()}
    print(f"{sum(texts.values())} documents: {', '.join(f'{number} of {text}' for text, number in texts.items())}")
    print("model | KL | less the default's | keys read | FLOPs added | KL by text")
    sums = {}
    for name in dict.fromkeys([DEFAULT, *names]):
        rows = [found[name].get(str(seed), found[name]["0"]) for seed in seeds]  # without seeds: the same for each
        sums[name] = np.array([np.concatenate([row["sums"][text] for text in texts]) for row in rows])[..., [0, 3]]
        tokens, figures = sums[name][0, :, 0], []
        for own, other in ((sums[name], sums[name] * 0), (sums[name], sums[DEFAULT])):
            mean = (own - other)[..., 1].mean(0).sum() / tokens.sum()
            figures.append(show_figure(mean, difference_interval(tokens, own[..., 1], other[..., 1]), ".4f"))
        parts = (part.sum(0) for part in np.split(sums[name].mean(0), np.cumsum(list(texts.values()))[:-1]))
        figures += [f"{np.mean([row['keys'] for row in rows]):.4f}", f"{rows[0]['flops']:.0f}"]
        print(name[-40:], *figures, " ".join(f"{kl / tokens:.4f}" for tokens, kl in parts), sep=" | ")


if __name__ == "__main__":
    sys.exit(main())
