"""``moh-llm checkpoint export OUTPUT/checkpoints/step-N --output-dir DIR``: a model of a run's checkpoint."""

import argparse

from moh_llm.flags import as_path
from moh_llm.terminal import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    export = actions.add_parser("export", help="make a model folder of a checkpoint", description=__doc__)
    export.add_argument("checkpoint", metavar="CHECKPOINT", type=as_path, help="folder checkpoints/step-N of a run")
    export.add_argument("--output-dir", required=True, type=as_path, help="folder to make")
    export.add_argument("--overwrite", action="store_true", help="replace the output folder if it is not empty")


def run(args: argparse.Namespace) -> None:
    """Export. Raises `UserError` for bad input."""
    from moh_llm.training.saving import export_checkpoint

    record = export_checkpoint(args.checkpoint, args.output_dir, args.overwrite)
    say(f"{args.output_dir} holds the model after step {record.step}")
    if record.budget is not None:
        say("thresholds are those of the step, and the plan that of the run's start: only the end of a run sets both")
