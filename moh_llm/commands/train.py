"""``moh-llm train RECIPE --option value ...``: continue-tune a converted model.

A run that was interrupted goes on where it stopped when the same command is given again.
"""

import argparse

from moh_llm.flags import OptionParser


def add_arguments(parser: OptionParser) -> None:
    """Declare the command's arguments."""
    from moh_llm.training.config import TrainConfig

    parser.usage = "%(prog)s [-h] RECIPE [--overwrite] [--OPTION VALUE ...]"
    parser.epilog = "The options are those of recipes; docs/reference.md describes them."
    parser.add_argument("recipe", metavar="RECIPE", help="YAML file, for example recipes/smollm2_recovery.yaml")
    parser.add_argument("--overwrite", action="store_true", help="start anew where the output holds a run")
    parser.add_options(TrainConfig, joint="_")


def run(args: argparse.Namespace) -> int:
    """Train. Returns the exit status; raises `UserError` for bad input."""
    import moh_llm
    from moh_llm.recipe import read_options, recipe_values
    from moh_llm.training.config import TrainConfig

    config = read_options(TrainConfig, [*recipe_values(args.recipe), *args.given])
    moh_llm.train(config, overwrite=args.overwrite)
    return 0
