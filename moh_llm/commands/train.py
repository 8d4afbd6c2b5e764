"""``moh-llm train RECIPE --key value ...``: continue-tune a converted model."""

import argparse

import moh_llm
from moh_llm.training.config import TrainConfig
from moh_llm.training.recipe import describe_keys, load_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments; recipe keys are listed in its help."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = "%(prog)s [-h] RECIPE [--overwrite] [--KEY VALUE ...]"
    parser.description = (
        "Continue-tune a converted model as a YAML recipe says. A run that was interrupted goes on\n"
        "where it stopped when the same command is given again."
    )
    parser.epilog = "recipe keys, each of which --KEY VALUE overrides:\n" + describe_keys()
    parser.add_argument("recipe", metavar="RECIPE", help="YAML file, for example recipes/smollm2_recovery.yaml")
    parser.add_argument("--overwrite", action="store_true", help="start anew where the output holds a run")
    parser.add_argument("overrides", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(print_help=parser.print_help)


def run(args: argparse.Namespace) -> int:
    """Train. Returns the exit status; raises `UserError` for bad input."""
    config = read_recipe(args)  # the YAML file, with the command line's values; unknown keys are refused
    moh_llm.train(config, overwrite=args.overwrite)
    return 0


def read_recipe(args: argparse.Namespace) -> TrainConfig:
    """The recipe with the command line's values. Prints the help and exits where they ask for it."""
    # argparse leaves all that follows the recipe unread, its own flags too.
    overrides = [argument for argument in args.overrides if argument != "--overwrite"]
    args.overwrite = args.overwrite or len(overrides) < len(args.overrides)
    if {"-h", "--help"} & set(overrides):
        args.print_help()
        raise SystemExit(0)
    return load_config(args.recipe, overrides)
