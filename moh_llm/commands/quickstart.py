"""``moh-llm quickstart``: the whole path on one small real model."""

import argparse
import shutil
from pathlib import Path

MADE = ("base", "moh", "recovery", "report", "recipe.yaml", "quickstart.json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.add_argument("--base", help="folder or Hub id of a LLaMA checkpoint (default: SmolLM2-135M)")
    parser.add_argument("--steps", type=int, default=16, help="steps of self-distillation, 2048 tokens each")
    parser.add_argument("--output", type=Path, default=Path("out/quickstart"), help="folder for all that is made")
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
    from moh_llm.errors import UserError
    from moh_llm.files import check_output_folder
    from moh_llm.locking import lock_folder

    if args.steps < 1:
        raise UserError(f"--steps {args.steps} must be at least 1")
    reads = [args.base] if args.base else []
    check_output_folder(args.output, args.overwrite, reads)
    with lock_folder(args.output):
        check_output_folder(args.output, args.overwrite, reads)  # another one may have ended meanwhile
        if args.output.exists():
            clear(args.output)
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    from moh_llm.intervals import show_documents, show_figure
    from moh_llm.quickstart.run import quickstart

    record = quickstart(args.output, args.base, args.steps, command=args.main)
    rows = record["held_out"]
    documents = show_documents(rows[0]["documents"])
    table = Table(title=f"{record['base']} on {rows[0]['tokens']} held-out tokens of {documents}")
    table.add_column("model")
    for column in ("active heads", "perplexity", "x dense (95 %)", "KL to dense (95 %)"):
        table.add_column(column, justify="right")
    for row in rows:
        heads = f"{row['active_heads']:g} of {row['heads']}"
        ratio, kl = (
            show_figure(row[key], row[f"{key}_interval"] if row["model"] != "dense" else None, form, "\n")
            for key, form in (("ratio", ".3f"), ("kl", ".4f"))
        )
        table.add_row(row["model"], heads, f"{row['perplexity']:.2f}", ratio, kl)
    Console().print(table)
    print(f"tuned on {record['tuning_tokens']} tokens; {record['seconds']:.0f} s in all")
    print(f"benchmark report: {record['report']}")
    return 0
