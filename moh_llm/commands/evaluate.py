"""`moh-llm evaluate`: score models, and the base beside them, on a frozen suite of benchmarks.

It also analyses what the heads of MoH models did on the benchmarks' text. Under `accelerate launch` or torchrun
the items are distributed over the processes. OUTPUT.partial keeps the finished benchmarks of an interrupted run;
the same command resumes it.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moh_llm.terminal import say

if TYPE_CHECKING:
    from moh_llm.evaluation.evaluate import Evaluation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    add = parser.add_argument
    add("model", metavar="MODEL", nargs="+", help="folders or Hub ids of the models to score")
    add("--base", metavar="BASE", help="folder or Hub id of the base, scored in the same run")
    suites = "paper, paper_stage1, scratch, smoke, or a YAML file (default: paper)"
    add("--suite", default="paper", help=suites)
    layout = "local data, <dataset, / as __>/<config>/<split>.jsonl (default: the Hub)"
    add("--data-dir", type=Path, metavar="DIR", help=layout)
    add("--limit", type=_positive, metavar="N", help="score only N items of each task, to try things out")
    add(
        "--batch-size",
        type=_batch_size,
        default=8,
        metavar="N",
        help='sequences in a forward pass, on each process; "auto" chooses it for each benchmark from its longest '
        "prompt and the free memory (default: 8)",
    )
    add(
        "--compute-dtype",
        default="auto",
        choices=["auto", "bfloat16", "float16", "float32"],
        help="dtype that every model is computed in, whatever it is stored in (default: auto, bfloat16 where the "
        "device computes it fast, else float32)",
    )
    add("--device", help="torch device, such as cuda:1 or cpu (default: the accelerator if there is one)")
    add(
        "--share-prefixes",
        action="store_true",
        help="compute what prompts begin with in common, such as the examples of MMLU, only once; scores may differ "
        "by rounding: in float32 they are equal in practice, in bfloat16 close choices may flip",
    )
    samples = "write every item's prompt, responses and score to samples/MODEL/BENCHMARK.jsonl in the output"
    add("--log-samples", action="store_true", help=samples)
    scores_only = "scores only: leave out what the heads did on the benchmarks' text"
    add("--no-analysis", dest="analysis", action="store_false", help=scores_only)
    place = "where the report goes (default: out/report)"
    add("--output", type=Path, default=Path("out/report"), metavar="DIR", help=place)
    add("--overwrite", action="store_true", help="replace the output folder if it is not empty")


def run(args: argparse.Namespace) -> int:
    """Evaluate, and print the report. Returns 1 when a benchmark failed, else 0; raises `UserError` for bad input."""
    import moh_llm

    evaluation = moh_llm.evaluate(args.model, **evaluation_arguments(args))
    print_evaluation(evaluation)
    return 1 if evaluation.failed_benchmarks else 0


def evaluation_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of `moh_llm.evaluate`: all flags."""
    return {name: value for name, value in vars(args).items() if name not in ("command", "run", "main", "model")}


def print_evaluation(evaluation: "Evaluation") -> None:
    """Print the result, where the report is, what failed, and how to repeat that. Only the first process prints."""
    from moh_llm.claims.evaluation import verdict, warnings

    if not evaluation.first_process:
        return
    record = evaluation.record
    for claim in (*warnings(record), *(verdict(record, label) for label in record.models)):
        say(claim.text)
    say(f"the report is in {evaluation.folder}: report.html, report.md, report.json")
    for label, error in evaluation.failed_analyses.items():
        say(f"the analysis of {label} failed, its scores stand: {error}")
    if evaluation.partial is not None:
        again = ", ".join(evaluation.failed_benchmarks)
        say(
            f"finished benchmarks are kept in {evaluation.partial}: the same command with --overwrite "
            + (f"scores only {again} again" if again else "repeats the analysis only")
        )


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of 1 or more")
    return int(text)


def _batch_size(text: str) -> int | str:
    return text if text == "auto" else _positive(text)
