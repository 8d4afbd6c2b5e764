"""``moh-llm doctor RECIPE --option value ...``: check a training job before it is started.

It makes the checks of `moh-llm train` without loading a model, and prints the job's memory, disk and tokens. Status 1:
something would stop the run.
"""

import argparse

from moh_llm.errors import UserError
from moh_llm.flags import OptionParser
from moh_llm.terminal import say


def add_arguments(parser: OptionParser) -> None:
    from moh_llm.training.config import TrainConfig

    parser.usage = "%(prog)s [-h] RECIPE [--processes N] [--OPTION VALUE ...]"
    parser.epilog = "The other options are those of moh-llm train, whose --help lists them."
    parser.add_argument("recipe", metavar="RECIPE", help="YAML file, for example recipes/smollm2_recovery.yaml")
    parser.add_argument("--processes", type=_count, default=1, metavar="N", help="processes, that is GPUs (default: 1)")
    parser.add_options(TrainConfig, joint="_", described=False)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Check and print. Returns 1 if there is a fault, else 0; raises `UserError` for bad input."""
    from moh_llm.hub.publish import check_hub
    from moh_llm.recipe import read_options, recipe_values
    from moh_llm.training.config import TrainConfig
    from moh_llm.training.preflight import Finding, diagnose

    config = read_options(TrainConfig, [*recipe_values(args.recipe), *args.given])
    if config.images is not None:
        raise UserError(f"{args.recipe} trains on images, and moh-llm doctor checks recipes of language models")
    findings = list(diagnose(config, args.processes))
    if config.hub is not None:
        try:
            check_hub(config)
            findings.append(
                Finding("ok", "hub", f"a token, a licence and a name that it allows for {config.hub.repo_id}")
            )
        except UserError as error:
            findings.append(Finding("fault", "hub", str(error)))
    for state, check, text in findings:
        say(f"{state:7}  {check:8}  {text}")
    return int(any(finding.state == "fault" for finding in findings))
