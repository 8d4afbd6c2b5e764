"""``moh-llm data fetch-benchmarks DIR``: download the data of a suite, for evaluation on machines without a network."""

import argparse

from moh_llm.flags import as_path
from moh_llm.reading import expand_home
from moh_llm.terminal import say, say_aside


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    fetch = actions.add_parser(
        "fetch-benchmarks", help="the benchmarks of a suite, as files for --data-dir", description=__doc__
    )
    fetch.add_argument("folder", metavar="DIR", type=as_path, help="folder of the files; those that are there are kept")
    fetch.add_argument(
        "--suite",
        default="paper",
        type=expand_home,
        help="paper, paper_stage1, scratch, ruler, or a YAML file (default: paper)",
    )


def run(args: argparse.Namespace) -> int:
    """Fetch. Returns 1 when something could not be fetched, else 0; raises `UserError` for bad input."""
    from moh_llm.evaluation.fetch import fetch
    from moh_llm.evaluation.suite import load_suite
    from moh_llm.evaluation.tasks import require_lm_eval
    from moh_llm.files import check_place
    from moh_llm.locking import lock_folder

    suite = load_suite(args.suite)
    require_lm_eval()  # its extra brings `datasets`
    check_place(args.folder, "folder")
    with lock_folder(args.folder):
        problems = fetch(suite, args.folder, say=say)
    for problem in problems:
        say_aside(problem)
    if problems:
        return 1
    say(f"{args.folder} holds suite {suite.name}; use it with --data-dir")
    return 0
