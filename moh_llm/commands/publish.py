"""``moh-llm publish DIR --repo-id ORG/NAME``: check a model, prove that it loads anywhere, upload it with its card."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from moh_llm.errors import UserError

if TYPE_CHECKING:
    from moh_llm.hub.publish import Publication, PublishOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.add_argument("folder", type=Path, metavar="DIR", help="model made by moh-llm convert or moh-llm train")
    parser.add_argument("--repo-id", required=True, metavar="ORG/NAME", help="repository on the Hub, made if absent")
    parser.add_argument("--private", action="store_true", help="make the repository private")
    parser.add_argument("--revision", metavar="BRANCH", help="branch to upload to, made if absent (default: main)")
    parser.add_argument("--run", type=Path, metavar="RUN", dest="training_run", help="training run, for the card")
    parser.add_argument("--evaluation", type=Path, metavar="DIR", help="folder of moh-llm evaluate, for the card")
    parser.add_argument("--licence", metavar="ID", help="the Hub's id of the licence (default: the base's)")
    parser.add_argument("--dry-run", action="store_true", help="do everything but send, and show what would be sent")
    parser.add_argument(
        "--force",
        action="store_true",
        help="publish in spite of failed checks or proof, and say so in the card; secrets never leave",
    )
    parser.add_argument(
        "--allow-other-code",
        action="store_true",
        help="run and publish Python files that are not this version's own, and say so in the card; read them first",
    )


def run(args: argparse.Namespace) -> int:
    """Publish the folder. Raises UserError where something keeps it from that."""
    from moh_llm.hub.publish import PublishOptions

    publish_and_print(
        PublishOptions(
            folder=args.folder,
            repo_id=args.repo_id,
            private=args.private,
            revision=args.revision,
            dry_run=args.dry_run,
            force=args.force,
            run=args.training_run,
            evaluation=args.evaluation,
            licence=args.licence,
            allow_other_code=args.allow_other_code,
        )
    )
    return 0


def publish_and_print(options: "PublishOptions") -> None:
    """Publish, and print what was done. Raises UserError where something keeps the model from being published."""
    from transformers.utils import logging

    from moh_llm.hub.publish import publish

    logging.disable_progress_bar()  # of loading for the proof
    publication = publish(options)
    _print(publication)
    if publication.stopped:
        verb = "would not be" if options.dry_run else "is not"
        raise UserError(f"{options.folder} {verb} published: {publication.stopped}")
    print(f"published: {publication.url}" if publication.url else f"nothing was sent; the card is {publication.card}")


def _print(publication: "Publication") -> None:
    """Show the files, and what checks and proof found."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="files", title_justify="left")
    for column in ("file", "bytes", "SHA-256"):
        table.add_column(column, justify="right" if column == "bytes" else "left")
    for file in publication.files:
        table.add_row(file.name, f"{file.size:,}", file.sha256[:12])
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(table)
    if publication.scrubbed:
        console.print(f"local paths cut to their last component: {', '.join(publication.scrubbed)}")
    console.print(f"checks: {'passed' if not publication.problems else f'{len(publication.problems)} failed'}")
    for problem in publication.problems:
        console.print(f"  {problem}")
    proof = publication.proof
    if proof is None:
        console.print("proof: not tried, the checks failed")
    elif proof.failure:
        console.print(f"proof: FAILED, {proof.failure}")
    else:
        seen = proof.record
        console.print(
            f"proof: by its own code in a clean process, logits of {seen['texts']} texts, {seen['tokens']} tokens, "
            f"and generation equal the local model's bit for bit ({seen['dtype']}, transformers "
            f"{seen['versions']['transformers']}, {seen['seconds']} s)"
        )
        console.print(f"  it goes on: {seen['generated'][0]!r}")
