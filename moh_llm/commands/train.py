"""``moh-llm train RECIPE --option value ...``: continue-tune a converted model.

A run that was interrupted goes on where it stopped when the same command is given again.
"""

import argparse
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from moh_llm.flags import OptionParser
from moh_llm.terminal import say

if TYPE_CHECKING:
    from moh_llm.records.run import RunRecord
    from moh_llm.training.config import TrainConfig


def add_arguments(parser: OptionParser) -> None:
    from moh_llm.training.config import TrainConfig

    parser.usage = "%(prog)s [-h] RECIPE [--overwrite] [--OPTION VALUE ...]"
    parser.epilog = "The options are those of recipes; docs/reference.md describes them."
    parser.add_argument("recipe", metavar="RECIPE", help="YAML file, for example recipes/smollm2_recovery.yaml")
    parser.add_argument("--overwrite", action="store_true", help="start anew where the output holds a run")
    parser.add_options(TrainConfig, joint="_")


def run(args: argparse.Namespace) -> None:
    """Train. Raises `UserError` for bad input."""
    import moh_llm
    from moh_llm.recipe import read_options, recipe_values
    from moh_llm.training.config import TrainConfig

    config = read_options(TrainConfig, [*recipe_values(args.recipe), *args.given])
    record = moh_llm.train(config, overwrite=args.overwrite)
    if record.status == "finished" and os.environ.get("RANK", "0") == "0":
        print_next(config, record)


def print_next(config: "TrainConfig", record: "RunRecord") -> None:
    """Print what a finished run read, and the command that scores its model."""
    from moh_llm.records.conversion import read_conversion

    run, (size, unit) = Path(config.output_dir), config.step_size
    conversion = read_conversion(run / "model")
    base = config.base or (conversion.base.name if conversion else None)  # which may have moved since
    words = ["moh-llm", "evaluate", str(run / "model"), *(["--base", base] if base else [])]
    words += ["--data-dir", config.images.held_out or config.images.train] if config.images else ["--suite", "smoke"]
    say(f"trained on {config.max_steps * size:,} {unit} in {record.seconds or 0:.0f} s")
    say(f"next: {shlex.join([*words, '--output-dir', str(run / 'report')])}")
