"""``moh-llm quickstart``: the whole path on one small real model."""

import argparse
import shutil
from pathlib import Path

from moh_llm.flags import as_path
from moh_llm.reading import expand_home

MADE = ("base", "moh", "recovery", "report", "heads.html")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base", type=expand_home, help="folder or Hub id of the base (default: SmolLM2-135M)")
    parser.add_argument(
        "--output-dir", type=as_path, default=Path("out/quickstart"), help="folder for all that is made"
    )
    parser.add_argument("--overwrite", action="store_true", help="remove what an earlier quick start left there")


def clear(output: Path) -> None:
    """Remove what an earlier quick start made in `output`. Raises UserError if anything else is there."""
    from moh_llm.errors import UserError

    # `.moh.123.tmp` is what a killed quick start leaves of `moh`.
    names = sorted(path.name for path in output.iterdir())
    if foreign := [n for n in names if not any(n == made or n.startswith(f".{made}.") for made in MADE)]:
        raise UserError(f"--output-dir {output} holds {foreign[0]}, which no quick start made; name another folder")
    shutil.rmtree(output)


def run(args: argparse.Namespace) -> None:
    """Carry it out and print the results. `args.main` runs another command, given its arguments."""
    from moh_llm.files import check_output_folder
    from moh_llm.locking import lock_folder

    with lock_folder(args.output_dir):
        check_output_folder(args.output_dir, args.overwrite, [args.base] if args.base else [])
        output = args.output_dir.resolve()
        if output.exists():
            clear(output)
        from moh_llm.quickstart import quickstart

        quickstart(output, args.base, command=args.main)
