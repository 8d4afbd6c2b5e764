"""``moh-llm publish DIR --repo-id ORG/NAME``: check a model, load it in a clean process, upload it with its card."""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags, named after the fields of `moh_llm.hub.publish.PublishOptions`."""
    parser.add_argument("folder", type=Path, metavar="DIR", help="model made by moh-llm convert or moh-llm train")
    parser.add_argument("--repo-id", required=True, metavar="ORG/NAME", help="repository on the Hub, made if absent")
    parser.add_argument("--private", action="store_true", help="make the repository private")
    parser.add_argument("--revision", metavar="BRANCH", help="branch to upload to, made if absent (default: main)")
    parser.add_argument("--run", type=Path, metavar="RUN", dest="training_run", help="training run, for the card")
    parser.add_argument("--evaluation", type=Path, metavar="DIR", help="folder of moh-llm evaluate, for the card")
    parser.add_argument("--licence", metavar="ID", help="the Hub's id of the licence (default: the base's)")
    parser.add_argument("--dry-run", action="store_true", help="do everything except the upload")
    parser.add_argument(
        "--force",
        action="store_true",
        help="publish although a check or the proof fails, and say so in the card; secrets are never published",
    )
    parser.add_argument(
        "--allow-other-code",
        action="store_true",
        help="run and publish Python files that are not this version's own, and say so in the card; read them first",
    )
    parser.add_argument(
        "--drop-records",
        action="store_true",
        help="publish a model that is not what its records describe, without their figures, and say so in the card",
    )


def run(args: argparse.Namespace) -> int:
    """Publish the folder. Raises UserError where something keeps it from that."""
    import moh_llm

    given = vars(args) | {"run": args.training_run}
    others = ("command", "main", "command_line", "training_run")
    moh_llm.publish(**{name: value for name, value in given.items() if name not in others})
    return 0
