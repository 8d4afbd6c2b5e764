"""``moh-llm mixture show MIXTURE``: planned shares, and for token shards the epochs that a budget takes."""

import argparse
import re
from pathlib import Path

from moh_llm.errors import UserError, printable
from moh_llm.reading import expand_home
from moh_llm.terminal import say, say_table

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    show = actions.add_parser("show", help="a table of the sources", description=__doc__)
    words = "YAML file, 'embedded', or folder of moh-llm tokenize"
    show.add_argument("mixture", metavar="MIXTURE", type=expand_home, help=words)
    show.add_argument("--tokens", default="100B", help="budget, for instance 40M or 100B (default: %(default)s)")


def run(args: argparse.Namespace) -> None:
    """Print the table. Raises `UserError` for bad input."""
    from moh_llm.data.mixture import load_mixture
    from moh_llm.data.shards import open_tokens

    budget = parse_tokens(args.tokens)
    available: dict[str, int] = {}
    if Path(args.mixture).is_dir():
        sources = open_tokens(Path(args.mixture))
        available = {source.name: len(source.train) for source in sources}
    else:
        sources = load_mixture(args.mixture).sources

    say(f"tokens of each source for a budget of {budget:,}, and those for training:")
    rows = [("source", "share", "budget", "available", "epochs")]
    for source in sources:
        wanted, tokens = budget * source.weight, available.get(source.name)
        counted = (f"{tokens:,}", f"{wanted / tokens:,.2f}") if tokens else ("?", "?")
        rows.append((printable(source.name), f"{source.weight:.2%}", f"{wanted:,.0f}", *counted))
    say_table(*rows)
    if not available:
        say("moh-llm tokenize counts the tokens of each source; name its folder to see the epochs")


def parse_tokens(text: str) -> int:
    """``100B`` and the like as a number of tokens. Raises UserError for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBT]?)", text.strip().upper())
    if found is None or float(found[1]) == 0:
        raise UserError(f"--tokens {text} must be a number of tokens such as 500000, 40M or 100B")
    return round(float(found[1]) * _UNITS[found[2]])
