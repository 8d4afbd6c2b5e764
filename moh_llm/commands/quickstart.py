"""``moh-llm quickstart``: the whole path on one small real model."""

import argparse
import shutil
import time
from pathlib import Path

from moh_llm.flags import as_path
from moh_llm.reading import expand_home
from moh_llm.terminal import console, say

MADE = ("base", "moh", "recovery", "report", "recipe.yaml", "quickstart.json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.add_argument("--base", type=expand_home, help="folder or Hub id of the base (default: SmolLM2-135M)")
    parser.add_argument(
        "--minutes",
        type=float,
        default=5.0,
        metavar="N",
        help="time that all of it may take: how much text is read follows from it (default: 5)",
    )
    parser.add_argument("--output", type=as_path, default=Path("out/quickstart"), help="folder for all that is made")
    parser.add_argument("--overwrite", action="store_true", help="remove what an earlier quick start left there")


def clear(output: Path) -> None:
    """Remove what an earlier quick start made in `output`. Raises UserError if anything else is there."""
    from moh_llm.errors import UserError

    # `.moh.123.tmp` is what a killed quick start leaves of `moh`.
    names = sorted(path.name for path in output.iterdir())
    if foreign := [n for n in names if not any(n == made or n.startswith(f".{made}.") for made in MADE)]:
        raise UserError(f"--output {output} holds {foreign[0]}, which no quick start made; name another folder")
    shutil.rmtree(output)


def run(args: argparse.Namespace) -> int:
    """Carry it out and print the table. `args.main` runs another command, given its arguments."""
    started = time.perf_counter()
    from moh_llm.errors import UserError
    from moh_llm.files import check_output_folder, follow
    from moh_llm.locking import lock_folder

    if not 0 < args.minutes < 1440:
        raise UserError(f"--minutes {args.minutes:g} must be above 0 and below 1,440, a day")
    reads = [args.base] if args.base else []
    check_output_folder(args.output, args.overwrite, reads)
    with lock_folder(args.output):
        check_output_folder(args.output, args.overwrite, reads)  # another one may have ended meanwhile
        args.output = follow(args.output)
        if args.output.exists():
            clear(args.output)
        return _run(args, started)


def _run(args: argparse.Namespace, started: float) -> int:
    from rich.table import Table

    from moh_llm.intervals import show_documents, show_figure
    from moh_llm.quickstart.run import quickstart

    record = quickstart(args.output, args.base, args.minutes, started, command=args.main)
    rows, context = record["held_out"], record["amounts"]["context"]
    documents = show_documents(rows[0]["documents"])
    say("", "The prompt ends with:", *record["prompt"].split("\n"))
    for name, text in record["continued"].items():
        say("", f"{name} goes on:", *text.split("\n"))
    table = Table(title=f"{rows[0]['tokens']} held-out tokens of {documents}, sequences of {context} tokens")
    table.add_column("model")
    for column in ("keys read", "perplexity", "x base (95 %)", "KL to base (95 %)"):
        table.add_column(column, justify="right")
    table.add_row("base", "100 %", f"{rows[0]['base_perplexity']:.2f}", "1.000", "0")
    for row in rows:
        ratio = show_figure(row["perplexity_ratio"], row["ratio_interval"], ".3f", "\n")
        kl = show_figure(row["kl"], row["kl_interval"], ".4f", "\n")
        table.add_row(row["model"], f"{100 * record['keys_read']:.0f} %", f"{row['perplexity']:.2f}", ratio, kl)
    say("")
    console().print(table)
    say(f"tuned on {record['amounts']['tuning']:,} tokens; {record['seconds']:.0f} s in all")
    say(f"report: {Path(record['report']).resolve().as_uri()}")
    return 0
