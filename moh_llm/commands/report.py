"""``moh-llm report RUN ...``: the curves and figures of training runs, as a page with pictures."""

import argparse
from pathlib import Path

from moh_llm.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run of moh-llm train")
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder to make (default, for one RUN: RUN/report)")
    parser.add_argument("--overwrite", action="store_true", help="replace the output folder if it is not empty")


def run(args: argparse.Namespace) -> int:
    """Write the report. Returns the exit status; raises `UserError` for bad input."""
    from moh_llm.files import check_output_folder, new_folder
    from moh_llm.reporting.runs import read_runs

    if args.output is None and len(args.runs) > 1:
        raise UserError(f"{len(args.runs)} runs have no common folder for the report; name one with --output")
    output = args.output or args.runs[0] / "report"
    runs = read_runs(args.runs)
    # A run that goes on gets many reports in its own folder.
    overwrite = args.overwrite or (args.output is None and _is_ours(output))
    kept = [folder / name for folder in args.runs for name in ("run.json", "log.jsonl", "model", "checkpoints")]
    check_output_folder(output, overwrite, kept)
    _require_matplotlib()

    from moh_llm.reporting.report import write_report

    with new_folder(output, overwrite) as folder:
        report = write_report(folder, runs, args.command_line)
    print(f"report: {output / 'report.md'}, report.json and {len(report['pictures'])} pictures")
    return 0


def _is_ours(folder: Path) -> bool:
    """Whether a folder is a report that this command made."""
    from moh_llm.files import read_json

    record = folder / "report.json"
    return record.is_file() and "comparison" in read_json(record)


def _require_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        raise UserError('the report needs matplotlib: pip install "moh-llm[report]"') from error
