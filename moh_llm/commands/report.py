"""`moh-llm report FOLDER ...`: evaluations and training runs on one page, and a check against a baseline."""

import argparse
from pathlib import Path
from typing import Any

from moh_llm.errors import UserError
from moh_llm.flags import as_path
from moh_llm.terminal import say, say_aside


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "folders",
        nargs="+",
        type=as_path,
        metavar="FOLDER",
        help="evaluations and training runs, in any mix",
    )
    parser.add_argument(
        "--output", type=as_path, metavar="DIR", help="folder to make (default, for one FOLDER: FOLDER/report)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the output folder if it is not empty")
    parser.add_argument(
        "--baseline", type=as_path, metavar="DIR", help="an earlier evaluation: exit 1 where a model fell behind it"
    )
    parser.add_argument(
        "--max-drop",
        type=float,
        metavar="POINTS",
        help="how far the average may fall below the baseline's (default: 0.5)",
    )


def run(args: argparse.Namespace) -> int:
    """Write the report. Returns 1 where a model fell behind the baseline, else 0; raises UserError."""
    from moh_llm.evaluation.report import write_report
    from moh_llm.evaluation.runs import names_of, read_runs, runs_behind
    from moh_llm.files import check_output_folder, new_folder
    from moh_llm.locking import lock_folder

    if args.output is None and len(args.folders) > 1:
        raise UserError(f"{len(args.folders)} folders have no common place for the report; name one with --output")
    evaluations = [folder for folder in args.folders if _is_evaluation(folder)]
    folders = [folder for folder in args.folders if folder not in evaluations]
    record, behind, drops = None, [], []
    if args.max_drop is not None and args.baseline is None:
        raise UserError(f"--max-drop {args.max_drop:g} has nothing to compare with; name an evaluation with --baseline")
    if args.baseline is not None and not evaluations:
        raise UserError(
            f"--baseline {args.baseline}: no evaluation among {', '.join(map(str, args.folders))} to compare with it"
        )
    if evaluations:
        from moh_llm.evaluation.compare import check_regression, merge
        from moh_llm.records.evaluation import read_evaluation

        read = [read_evaluation(folder) for folder in evaluations]
        record = merge(dict(zip(names_of(evaluations), read, strict=True)))
        behind = runs_behind(record.described_models, folders)
        if args.baseline is not None:
            allowed = 0.5 if args.max_drop is None else args.max_drop
            drops = check_regression(record, read_evaluation(args.baseline), allowed)
    runs = read_runs(folders, behind, say_aside)
    output = args.output or args.folders[0] / "report"
    # A run that goes on gets many reports in its own folder.
    overwrite = args.overwrite or (args.output is None and _is_ours(output))
    check_output_folder(output, overwrite, [*_read_from(args), *behind])
    with lock_folder(output), new_folder(output, overwrite) as folder:
        write_report(folder, runs, args.command_line, record)
    say(f"report: {output / 'report.html'}, report.md, report.json")
    for drop in drops:
        say(f"WORSE than {args.baseline}: {drop}")
    return 1 if drops else 0


def _is_evaluation(folder: Path) -> bool:
    """Whether a folder is one of `moh-llm evaluate`; a run is none, whatever reports lie in it."""
    return (folder / "report.json").is_file() and not (folder / "run.json").is_file()


def _read_from(args: argparse.Namespace) -> list[Path]:
    """Inputs that the output folder must not replace."""
    inputs = [args.baseline] if args.baseline else []
    for folder in args.folders:
        names = ("run.json", "log.jsonl", "model", "checkpoints", "report.json")
        inputs += [folder / name for name in names]
    return inputs


def _is_ours(folder: Path) -> bool:
    """Whether a folder is a report of training runs that this command made."""
    from moh_llm.reading import read_json

    place = folder / "report.json"
    found: Any = read_json(place) if place.is_file() else None
    return isinstance(found, dict) and "comparison" in found
