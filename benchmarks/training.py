"""What a step of training costs, as a ratio to the dense model's, on a CPU or, where there is one, on an accelerator.

    python benchmarks/training.py --rounds 5                  # a model of SmolLM2-135M's shape, random weights
    python benchmarks/training.py --fallback local --length 4096 --blocks 1

A step of cross-entropy of the MoH model (value fallbacks, three quarters of the heads by a linear router; or local
ones, half of them by a threshold; in both all heads are computed and masked; or local ones and the same five of nine
heads for all tokens, "fixed", where full attention of the others is left out) against the dense model with the same
loop, each in its own process. The dense model's attention is one call of SDPA, as in transformers. Peers take turns
within a round, and figures are medians over rounds.
"""

import argparse
import multiprocessing
import statistics
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import torch
from command import now

from moh_llm.attention import choose_for
from moh_llm.conversion.plan import PlanOptions
from moh_llm.devices import choose_device, name_device
from moh_llm.modeling import MoHLlamaConfig, MoHLlamaForCausalLM
from moh_llm.training.config import DataConfig, ObjectiveConfig, TrainConfig
from moh_llm.training.parallel import make_accelerator
from moh_llm.training.preflight import decide_precision
from moh_llm.training.step import TrainingStep, accumulate_gradients, make_optimizer, seed_step, set_learning_rates

SHAPE = {  # SmolLM2-135M's
    **{"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152},
    **{"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True},
}
FALLBACKS = {
    "value": {"num_shared_heads": 1, "num_active_heads": 7, "router_type": "linear", "head_fallback": "value"},
    "local": {"num_shared_heads": 1, "num_active_heads": 5, "router_type": "threshold", "head_fallback": "local"},
    "fixed": {"num_shared_heads": 5, "num_active_heads": 5, "router_type": "none", "head_fallback": "local"},
}
SPAWN = multiprocessing.get_context("spawn")
step: Callable[[], None]  # of a peer's process


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="steps of each peer")
    parser.add_argument("--length", type=int, default=512, help="tokens of a block")
    parser.add_argument("--blocks", type=int, default=2, help="blocks of a step, in one pass")
    parser.add_argument("--fallback", choices=FALLBACKS, default="value")
    parser.add_argument("--gradient-checkpointing", action="store_true", help="recompute layers in the backward pass")
    args = parser.parse_args()
    device = choose_device()
    with tempfile.TemporaryDirectory() as scratch:
        data = DataConfig(sequence_length=args.length, batch_size=args.blocks, micro_batch_size=args.blocks)
        more = {"data": data, "objective": ObjectiveConfig(kind="cross_entropy"), "report_to": ()}
        config = decide_precision(TrainConfig("none", f"{scratch}/run", 100, **more))
        dtype = torch.bfloat16 if config.mixed_precision == "bf16" else torch.float32
        backend = choose_for(device, dtype, SHAPE["hidden_size"] // SHAPE["num_attention_heads"]).name
        print(f"{args.blocks} x {args.length} tokens a step, mixed precision {config.mixed_precision}", end=", ")
        print(f"{name_device(device)}, attention by {backend}")
        against_dense(config, args)
    return 0


def moh_model(args: argparse.Namespace, dense: bool) -> MoHLlamaForCausalLM:
    """A random model: MoH with the plan of `FALLBACKS`, or its dense twin, whose attention is one call of SDPA."""
    torch.manual_seed(0)
    heads = {"num_shared_heads": 9, "num_active_heads": 9} if dense else FALLBACKS[args.fallback]
    start = PlanOptions(context=args.length, fallback="local").start  # that of a default conversion
    more = {"max_position_embeddings": max(2048, args.length), "local_start": start}
    model = MoHLlamaForCausalLM(MoHLlamaConfig(**SHAPE, **heads, **more))
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # as `train` does
    return model


def against_dense(config: TrainConfig, args: argparse.Namespace) -> None:
    """Steps of the MoH model and of its peer in turn, each in a process of its own.

    In one process they would share a heap, and the smaller of the two would find the memory it needs already mapped
    where the other has to ask for more: a difference that nobody who trains one model meets.
    """
    peers = {name: ProcessPoolExecutor(1, SPAWN, prepare, (config, args, name)) for name in ("MoH", "dense")}
    for peer in peers.values():
        peer.submit(take_turn).result()  # warms up
    seconds: dict[str, list[float]] = {name: [] for name in peers}
    for _ in range(args.rounds):
        for name, peer in peers.items():
            seconds[name].append(peer.submit(take_turn).result())
    mine, theirs = (statistics.median(times) for times in seconds.values())
    ratios = [a / b for a, b in zip(*seconds.values(), strict=True)]
    print(f"MoH: {mine:.3f} s a step, {args.blocks * args.length / mine:.0f} tokens/s; dense: {theirs:.3f} s; ", end="")
    print(f"ratio {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}) over {args.rounds} rounds")


def prepare(config: TrainConfig, args: argparse.Namespace, name: str) -> None:
    """Begin a peer's process, whose `step` is one of the training loop: gradients, clipping, AdamW."""
    global step
    model, accelerator = moh_model(args, dense=name == "dense"), make_accelerator(config)
    module, optimizer = TrainingStep(model, None, config.objective), make_optimizer(model, config)
    module, optimizer = accelerator.prepare(module, optimizer)
    module.train()
    draw, shape = torch.Generator().manual_seed(1), (args.blocks, args.length)  # random tokens, one document a block
    ids = torch.randint(0, SHAPE["vocab_size"], shape, generator=draw)
    batch = {"input_ids": ids, "labels": ids.clone(), "position_ids": torch.arange(args.length).expand(shape)}

    def step() -> None:
        seed_step(config, 10, accelerator.process_index)
        set_learning_rates(optimizer, config, 10)
        accumulate_gradients(accelerator, module, batch, config, 0.01)
        optimizer.step()
        optimizer.zero_grad()


def take_turn() -> float:
    """Seconds of a step in a peer's process."""
    began = now()
    step()
    return now() - began


if __name__ == "__main__":
    sys.exit(main())
