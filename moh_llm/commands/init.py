"""``moh-llm init ARCHITECTURE --tokenizer TOKENIZER --output DIR``: random weights, to train from scratch."""

import argparse

from moh_llm.flags import as_path
from moh_llm.reading import expand_home
from moh_llm.terminal import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "architecture",
        metavar="ARCHITECTURE",
        type=as_path,
        help="YAML file of sizes and head plan, for example recipes/architectures/moh_llm_s.yaml",
    )
    parser.add_argument("--tokenizer", required=True, type=expand_home, help="folder or Hub id of the tokenizer")
    parser.add_argument("--output", required=True, type=as_path, help="folder to make")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights (default: 0)")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="float32", help="of the weights (default: float32)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the output folder if it is not empty")


def run(args: argparse.Namespace) -> int:
    """Initialise, and print what was made. Returns the exit status; raises `UserError` for bad input."""
    import torch

    from moh_llm.errors import UserError
    from moh_llm.records.tensors import is_routing_weight
    from moh_llm.training.from_scratch import initialise

    if not 0 <= args.seed < 2**32:
        raise UserError(f"--seed {args.seed} must lie in [0, 2**32)")
    dtype = getattr(torch, args.dtype)
    model = initialise(args.architecture, args.tokenizer, args.output, args.seed, dtype, args.overwrite)
    config, counts = model.config, {name: weight.numel() for name, weight in model.named_parameters()}
    total = sum(counts.values())
    embedding = sum(number for name, number in counts.items() if "embed_tokens" in name or "lm_head" in name)
    routing = sum(number for name, number in counts.items() if is_routing_weight(name))
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    active, shared = sum(config.active_heads_per_layer), sum(map(len, config.shared_heads_per_layer))
    say(
        f"{args.architecture.stem}: {total:,} parameters ({total / 1e6:.0f}M), "
        f"{embedding:,} of them in embeddings and {routing:,} in routers"
    )
    if shared == heads * layers:
        say(f"{layers} layers of {heads} heads, all of them always on: a dense LLaMA")
    else:
        say(
            f"{layers} layers of {heads} heads -> {active / layers:.4g} active, {shared / layers:.4g} shared, "
            f"router {config.router_type}, scores {config.router_score}, "
            f"routing granularity {config.routing_granularity}"
        )
    say(f"written to {args.output} in {args.dtype}, seed {args.seed}")
    return 0
