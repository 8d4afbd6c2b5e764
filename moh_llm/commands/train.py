"""``moh-llm train RECIPE --key value ...``: continue-tune a converted model."""

import argparse
import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moh_llm.errors import UserError
from moh_llm.training.config import HubConfig, TrainConfig
from moh_llm.training.recipe import describe_keys, load_config

if TYPE_CHECKING:
    from moh_llm.hub.pushes import MilestonePushes


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
    # argparse hands over all that follows the recipe unread, its own flags too.
    overrides = [argument for argument in args.overrides if argument != "--overwrite"]
    overwrite = args.overwrite or len(overrides) < len(args.overrides)
    if {"-h", "--help"} & set(overrides):
        args.print_help()
        return 0
    config = load_config(args.recipe, overrides)

    from moh_llm.training.loop import train

    # Of several processes the first one publishes.
    if config.hub is None or os.environ.get("RANK", "0") != "0":
        train(config, overwrite, on_finish=lambda record: _write_card(config))
    else:
        _train_and_publish(config, config.hub, overwrite)
    return 0


def _write_card(config: TrainConfig) -> None:
    """Give the tuned model of a finished run its README.md, unless it has one; without one the run is as good."""
    from moh_llm.hub.card import write_local_card
    from moh_llm.hub.checks import CARD

    model = Path(config.output_dir) / "model"
    if not (model / CARD).exists():
        try:
            write_local_card(model)
        except UserError as error:
            print(f"{model / CARD} was not written: {error}")


def _train_and_publish(config: TrainConfig, hub: HubConfig, overwrite: bool) -> None:
    """Train, and publish milestones on the way and the tuned model at the end, also of a run that was finished before.

    Raises:
        UserError: something would keep the model from being published, and nothing was done; or training failed; or
            publishing did, in spite of which all the rest was done.
    """
    from moh_llm.hub.pushes import MilestonePushes, check_hub
    from moh_llm.training.loop import train

    check_hub(config)
    with contextlib.closing(MilestonePushes(hub)) as pushes:

        def publish(record: dict[str, Any]) -> None:
            _write_card(config)
            _publish(hub, Path(config.output_dir), pushes)

        train(config, overwrite, on_milestone=pushes.add, on_finish=publish)


def _publish(hub: HubConfig, run: Path, pushes: "MilestonePushes") -> None:
    from moh_llm.hub.publish import publish
    from moh_llm.hub.pushes import command_line, run_options

    options, failure = run_options(hub, run), None
    try:
        publish(options)
    except UserError as error:
        failure = str(error)
    lost = pushes.wait()
    trained = f"training is finished, its model is {options.folder}"
    milestones = f"{', '.join(lost)} {'is' if len(lost) == 1 else 'are'} not published, see above" if lost else ""
    if failure is not None:
        raise UserError(
            f"{trained}; publishing it failed: {failure}; try again with `{command_line(options)}`, or give the same "
            f"command again{f'; {milestones}' if lost else ''}"
        )
    if lost:
        raise UserError(f"{trained} and is published, but {milestones}; give the same command again")
