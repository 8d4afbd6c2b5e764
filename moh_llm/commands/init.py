"""``moh-llm init ARCHITECTURE --tokenizer TOKENIZER --output-dir DIR``: random weights, to train from scratch."""

import argparse

from moh_llm.flags import as_path
from moh_llm.reading import expand_home, read_yaml
from moh_llm.recipe import shipped
from moh_llm.terminal import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "architecture",
        metavar="ARCHITECTURE",
        type=as_path,
        help="YAML file of sizes and head plan, for example recipes/architectures/moh_llm_s.yaml",
    )
    parser.add_argument("--tokenizer", type=expand_home, help="folder or Hub id of a language model's tokenizer")
    parser.add_argument("--output-dir", required=True, type=as_path, help="folder to make")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights (default: 0)")
    parser.add_argument("--overwrite", action="store_true", help="replace the output folder if it is not empty")


def run(args: argparse.Namespace) -> None:
    """Initialise, and print what was made. Raises `UserError` for bad input."""
    from moh_llm.errors import UserError
    from moh_llm.training.from_scratch import initialise, initialise_images

    if not 0 <= args.seed < 2**32:
        raise UserError(f"--seed {args.seed} must lie in [0, 2**32)")
    args.architecture = shipped(args.architecture)
    values = read_yaml(args.architecture)
    if isinstance(values, dict) and ("model_type" in values or "sample_size" in values):
        model = initialise_images(args.architecture, args.output_dir, args.seed, args.overwrite)
    elif args.tokenizer is None:
        raise UserError("a language model needs a tokenizer: add --tokenizer")
    else:
        model = initialise(args.architecture, args.tokenizer, args.output_dir, args.seed, args.overwrite)
    config, total = getattr(model, "plan", model.config), sum(weight.numel() for weight in model.parameters())
    layers, plan = config.num_hidden_layers, ", dense"
    if hasattr(config, "router_type"):
        plan = f" -> {sum(config.active_heads_per_layer) / layers:.4g} active, router {config.router_type}"
    say(
        f"{args.architecture.stem}: {total:,} parameters, {layers} layers of {config.num_attention_heads} heads{plan}",
        f"written to {args.output_dir} in float32, seed {args.seed}",
    )
