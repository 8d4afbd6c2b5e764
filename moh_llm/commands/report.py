"""`moh-llm report RUN`: the curves and tables of a training run, finished or not, as RUN/report.html and RUN/report.md.

The page of an evaluation is written by `moh-llm evaluate`.
"""

import argparse

from moh_llm.flags import as_path
from moh_llm.terminal import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_folder", type=as_path, metavar="RUN", help="folder of a training run (its output_dir)")


def run(args: argparse.Namespace) -> None:
    """Write the pages into the run's folder. Raises UserError where there is no run that has begun."""
    from moh_llm.errors import UserError
    from moh_llm.evaluation.report import write_report
    from moh_llm.evaluation.runs import read_run

    run, folder = read_run(args.run_folder), args.run_folder
    if run.recipe.get("images"):
        raise UserError(f"{folder} is a run on images, of which no report is made; log.jsonl has its losses and scores")
    write_report(folder, None, [run])
    say(f"report: {folder / 'report.html'}, report.md")
