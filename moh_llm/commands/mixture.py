"""``moh-llm mixture show MIXTURE``: planned shares, available tokens, and epochs for a budget."""

import argparse
import re
from typing import TYPE_CHECKING, Any

from moh_llm.errors import UserError, printable
from moh_llm.reading import expand_home
from moh_llm.terminal import console, say

if TYPE_CHECKING:
    from moh_llm.data.mixture import Source

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    show = actions.add_parser("show", help="a table of the sources", description=__doc__)
    show.add_argument(
        "mixture",
        metavar="MIXTURE",
        type=expand_home,
        help="YAML file, 'embedded', or folder of moh-llm tokenize",
    )
    show.add_argument("--tokens", default="100B", help="budget, for instance 40M or 100B (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Print the table. Returns the exit status; raises `UserError` for bad input."""
    from pathlib import Path

    from rich.table import Table

    from moh_llm.data.mixture import load_mixture
    from moh_llm.data.shards import open_tokens

    budget, notes = parse_tokens(args.tokens), []
    if exact := Path(args.mixture).is_dir():
        tokenized = open_tokens(Path(args.mixture))
        sources: list[Any] = list(tokenized)
        available: dict[str, int | None] = {source.name: len(source.train) for source in tokenized}
    else:
        mixture = load_mixture(args.mixture)
        sources = list(mixture.sources)
        available = {}
        for source in mixture.sources:
            try:
                available[source.name] = _estimate(source, mixture.validation_share)
            except UserError as error:
                notes.append(str(error))
    say(f"tokens of each source for a budget of {budget:,}, and those for training:")
    table = Table("source", box=None)
    for header in ("share", "budget", "available", "epochs", "max epochs"):
        table.add_column(header, justify="right")
    for source in sources:
        tokens = available.get(source.name)
        wanted = budget * source.weight
        epochs = "?" if not tokens else f"{wanted / tokens:,.2f}"
        if tokens and source.max_epochs is not None and wanted > source.max_epochs * tokens:
            epochs += " !"
            notes.append(
                f"{source.name}: the budget exceeds max_epochs={source.max_epochs:g}; training would refuse it"
            )
        table.add_row(
            printable(source.name),
            f"{source.weight:.2%}",
            f"{wanted:,.0f}",
            "?" if tokens is None else f"{'' if exact else '~'}{tokens:,}",
            epochs,
            "" if source.max_epochs is None else f"{source.max_epochs:g}",
        )
    console().print(table)
    for note in notes:
        say(note)
    return 0


def parse_tokens(text: str) -> int:
    """``100B`` and the like as a number of tokens. Raises UserError for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBT]?)", text.strip().upper())
    if found is None or float(found[1]) == 0:
        raise UserError(f"--tokens {text} must be a number of tokens such as 500000, 40M or 100B")
    return round(float(found[1]) * _UNITS[found[2]])


def _estimate(source: "Source", validation_share: float) -> int | None:
    """Training tokens of a source of local files, by their sizes; None of another one."""
    from moh_llm.data.locate import locate

    if not source.files:
        return None
    # About 4 bytes of English a token, and compressed files hold about 3 times their size.
    packed = (".gz", ".zst", ".zstd", ".parquet")
    size = sum((file.size or 0) * (3 if file.path.endswith(packed) else 1) for file in locate(source))
    return round(size / 4 * (1 - validation_share))
