"""``moh-llm inspect MODEL``: pictures of the heads that are on for the tokens of a text, and of the keys they read."""

import argparse
from pathlib import Path

from moh_llm.errors import UserError
from moh_llm.flags import as_path
from moh_llm.reading import expand_home
from moh_llm.terminal import say

TEXT_BYTES = 1 << 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", type=expand_home, help="folder or Hub id of an MoH model")
    parser.add_argument("--text", type=as_path, help="UTF-8 file to read (default: text that Python itself ships)")
    parser.add_argument(
        "--output",
        type=as_path,
        default=Path("heads.html"),
        help="page to write; with .png each picture, its name behind the file's (default: heads.html)",
    )


def run(args: argparse.Namespace) -> None:
    """Inspect, and write the pictures. Raises `UserError` for bad input."""
    from moh_llm.evaluation.inspection import inspect_model
    from moh_llm.files import write_bytes, write_text
    from moh_llm.reading import read_text

    if args.output.suffix not in (".html", ".png"):
        raise UserError(f"--output {args.output} must end in .html or .png")
    if not args.output.absolute().parent.is_dir():  # the analysis takes a while
        raise UserError(f"--output {args.output}: there is no folder {args.output.parent}; make it first")
    found = inspect_model(args.model, None if args.text is None else read_text(args.text, TEXT_BYTES))
    say(*(f"{name}: {value}" for name, value in found.table.rows))
    if args.output.suffix == ".html":
        write_text(args.output, found.page)
        say(f"picture: {args.output.resolve().as_uri()}")
        return
    for chart in found.charts:
        place = args.output.with_name(f"{args.output.stem}-{chart.name}.png")
        write_bytes(place, chart.png)
        say(f"picture: {place}")
