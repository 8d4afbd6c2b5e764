"""Publishing with what was checked and uploaded printed."""

from rich.console import Console
from rich.table import Table
from transformers.utils import logging

from moh_llm.errors import UserError
from moh_llm.hub.publish import Publication, PublishOptions, publish


def publish_and_show(options: PublishOptions) -> Publication:
    """Publish, and print what was done. Raises UserError where something keeps the model from being published."""
    logging.disable_progress_bar()  # of loading for the check
    publication = publish(options)
    _print(publication)
    if publication.stopped:
        verb = "would not be" if options.dry_run else "is not"
        raise UserError(f"{options.folder} {verb} published: {publication.stopped}")
    print(f"published: {publication.url}" if publication.url else f"nothing was sent; the card is {publication.card}")
    return publication


def _print(publication: Publication) -> None:
    """Show the files, and what checks and proof found."""
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
