"""What training costs, as ratios to peers in the same run, on a CPU or, where there is one, on an accelerator.

    python benchmarks/training.py --rounds 5                  # a model of SmolLM2-135M's shape, random weights
    python benchmarks/training.py --only step --fallback local --length 4096 --blocks 1

- step: a step of cross-entropy of the MoH model (value fallbacks, three quarters of the heads by a linear router; or
  local ones, half of them by a threshold; in both all heads are computed and masked; or local ones and the same five
  of nine heads for all tokens, "fixed", where full attention of the others is left out) against the dense model with
  the same loop, each in its own process. The dense model's attention is one call of SDPA, as in transformers.
- loop: a step of our loop against one of `transformers.Trainer`, both on the dense LLaMA with the same batch, dtype,
  optimiser and clipping; at most 1.05 is asked.

Peers take turns within a round, and figures are medians over rounds.
"""

import argparse
import multiprocessing
import statistics
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from clock import now
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from moh_llm.attention import choose_for
from moh_llm.conversion.plan import PlanOptions
from moh_llm.devices import choose_device, name_device
from moh_llm.modeling import MoHLlamaConfig, MoHLlamaForCausalLM
from moh_llm.training import networks
from moh_llm.training.config import DataConfig, ObjectiveConfig, TrainConfig
from moh_llm.training.parallel import make_accelerator
from moh_llm.training.precision import decide_precision
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
Step = Callable[[], None]
step: Step  # of a peer's process


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="steps of each peer")
    parser.add_argument("--length", type=int, default=512, help="tokens of a block")
    parser.add_argument("--blocks", type=int, default=2, help="blocks of a step, in one pass")
    parser.add_argument("--fallback", choices=FALLBACKS, default="value")
    parser.add_argument("--gradient-checkpointing", action="store_true", help="in --only step")
    parser.add_argument("--mixed-precision", choices=["auto", "no", "bf16"], default="auto", help="as in recipes")
    parser.add_argument("--only", nargs="+", choices=["step", "loop"], help="not both")
    args = parser.parse_args()
    wanted = args.only or ["step", "loop"]
    if args.gradient_checkpointing and "loop" in wanted:
        parser.error("--gradient-checkpointing goes with --only step")
    device = choose_device()
    with tempfile.TemporaryDirectory() as scratch:
        config = decide_precision(recipe(args, Path(scratch)))
        args.mixed_precision = config.mixed_precision
        dtype = torch.bfloat16 if args.mixed_precision == "bf16" else torch.float32
        backend = choose_for(device, dtype, SHAPE["hidden_size"] // SHAPE["num_attention_heads"]).name
        print(f"{args.blocks} x {args.length} tokens a step, mixed precision {args.mixed_precision}", end=", ")
        print(f"{name_device(device)}, attention by {backend}")
        if "step" in wanted:
            against_dense(config, args)
        if "loop" in wanted:
            against_trainer(config, args, scratch)
    return 0


def recipe(args: argparse.Namespace, scratch: Path) -> TrainConfig:
    """The recipe of a step: cross-entropy, every weight trained."""
    data = DataConfig(sequence_length=args.length, batch_size=args.blocks, micro_batch_size=args.blocks)
    more = {"data": data, "objective": ObjectiveConfig(kind="cross_entropy"), "report_to": ()}
    return TrainConfig("none", str(scratch / "run"), 100, mixed_precision=args.mixed_precision, **more)


def moh_model(args: argparse.Namespace, dense: bool) -> MoHLlamaForCausalLM:
    """A random model: MoH with the plan of `FALLBACKS`, or its dense twin, whose attention is one call of SDPA."""
    torch.manual_seed(0)
    heads = {"num_shared_heads": 9, "num_active_heads": 9} if dense else FALLBACKS[args.fallback]
    start = PlanOptions(context=args.length, fallback="local").start  # that of a default conversion
    more = {"max_position_embeddings": max(2048, args.length), "local_start": start}
    model = MoHLlamaForCausalLM(MoHLlamaConfig(**SHAPE, **heads, **more))
    if args.gradient_checkpointing:
        networks.recompute(model)
    return model


def batch_of(args: argparse.Namespace) -> dict[str, torch.Tensor]:
    """One process's blocks of a step: random tokens, one document a block."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(0, SHAPE["vocab_size"], (args.blocks, args.length), generator=draw)
    return {"input_ids": ids, "labels": ids.clone(), "position_ids": torch.arange(args.length).expand(args.blocks, -1)}


def our_step(config: TrainConfig, args: argparse.Namespace, model: MoHLlamaForCausalLM) -> Step:
    """A step of the training loop: gradients, clipping, AdamW."""
    accelerator: Accelerator = make_accelerator(config)
    optimizer = make_optimizer(model, config)
    step, optimizer = accelerator.prepare(TrainingStep(model, None, config.objective), optimizer)
    step.train()
    batch = batch_of(args)

    def run() -> None:
        seed_step(config, 10, accelerator.process_index)
        set_learning_rates(optimizer, config, 10)
        accumulate_gradients(accelerator, step, batch, config, 0.01)
        optimizer.step()
        optimizer.zero_grad()

    return run


def against_trainer(config: TrainConfig, args: argparse.Namespace, scratch: str) -> None:
    """Our step and `transformers.Trainer`'s in turn: its own loop runs, and ours steps in between."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, max_position_embeddings=max(2048, args.length)))
    ours, seconds = our_step(config, args, moh_model(args, dense=True)), {"our loop": [], "Trainer": []}
    ours()

    class Turns(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began = now()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds["Trainer"].append(now() - self.began)
            seconds["our loop"].append(timed(ours))

    silent = {"report_to": [], "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}
    arguments = TrainingArguments(
        scratch,
        bf16=args.mixed_precision == "bf16",
        use_cpu=not torch.accelerator.is_available(),
        per_device_train_batch_size=args.blocks,
        max_steps=args.rounds + 1,
        remove_unused_columns=False,
        **{"weight_decay": 0.1, "adam_beta2": 0.95, "max_grad_norm": 1.0},
        **silent,
    )
    batch = batch_of(args)
    rows = [{name: tensor[row] for name, tensor in batch.items()} for row in range(args.blocks)] * (args.rounds + 1)
    Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[Turns()]).train()
    show({name: times[1:] for name, times in seconds.items()}, args)


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
    show(seconds, args)


def prepare(config: TrainConfig, args: argparse.Namespace, name: str) -> None:
    """Begin a peer's process."""
    global step
    step = our_step(config, args, moh_model(args, dense=name == "dense"))


def take_turn() -> float:
    """Seconds of a step in a peer's process."""
    return timed(step)


def show(seconds: dict[str, list[float]], args: argparse.Namespace) -> None:
    """Print medians, and the median over rounds of the first peer's time over the second's."""
    (first, mine), (second, theirs) = seconds.items()
    ratios = [a / b for a, b in zip(mine, theirs, strict=True)]
    ratio = statistics.median(ratios)
    tokens = args.blocks * args.length
    print(
        f"{first}: {statistics.median(mine):.3f} s a step, {tokens / statistics.median(mine):.0f} tokens/s; "
        f"{second}: {statistics.median(theirs):.3f} s; ratio {ratio:.3f} "
        f"({min(ratios):.3f} to {max(ratios):.3f}) over {len(mine)} rounds",
        flush=True,
    )


def timed(step: Step) -> float:
    """Seconds that a step takes."""
    began = now()
    step()
    return now() - began


if __name__ == "__main__":
    sys.exit(main())
