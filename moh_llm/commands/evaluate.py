"""`moh-llm evaluate`: score models, and the base beside them, on a frozen suite of benchmarks.

It also analyses what the heads of MoH models did on the benchmarks' text. Under `accelerate launch` or torchrun
the requests are distributed over the processes. OUTPUT.partial keeps the finished benchmarks of an interrupted
run; the same command resumes it.
"""

import argparse
import shlex
from typing import TYPE_CHECKING

from moh_llm.flags import OptionParser, options_from
from moh_llm.terminal import say, say_passing

if TYPE_CHECKING:
    from moh_llm.evaluation.evaluate import Evaluation


def add_arguments(parser: OptionParser) -> None:
    from moh_llm.evaluation.config import EvaluationConfig

    parser.usage = "%(prog)s [-h] MODEL ... [--OPTION VALUE ...]\n       %(prog)s RECIPE.yaml [--OPTION VALUE ...]"
    parser.add_words("MODEL", EvaluationConfig, "models")
    parser.add_options(EvaluationConfig, hidden=["models"])


def run(args: argparse.Namespace) -> int:
    """Evaluate, and print the report. Returns 1 when a benchmark failed, else 0; raises `UserError` for bad input."""
    import moh_llm
    from moh_llm.evaluation.config import EvaluationConfig

    config = options_from(EvaluationConfig, args, "models")
    evaluation = moh_llm.evaluate(**vars(config), command_line=args.command_line)
    if isinstance(evaluation, dict):  # of models of images
        from moh_llm.evaluation.images import lines

        say(*lines(evaluation), f"written to {config.output_dir}")
        return 0
    print_evaluation(evaluation)
    return 1 if evaluation.failed_benchmarks else 0


def print_evaluation(evaluation: "Evaluation") -> None:
    """Print the result, where the report is, what failed, and how to repeat that. Only the first process prints."""
    from moh_llm.claims import verdict, warnings

    if not evaluation.first_process:
        return
    record = evaluation.record
    say_passing()
    say(*warnings(record))
    for label in record.models:
        scores = {row.name: row.scores[label].value for row in record.benchmarks if label in row.scores}
        say(f"{label}: {', '.join(f'{name} {value:.1f}' for name, value in scores.items())}")
    for label in record.compared_models or record.models:
        say(verdict(record, label))
    say(f"the report is in {evaluation.folder}: report.html, report.md, report.json")
    for label, found in record.analysis.items():
        if "error" in found:
            say(f"the analysis of {label} failed, its scores stand: {found['error']}")
    if evaluation.partial is not None:
        again = ", ".join(evaluation.failed_benchmarks)
        say(
            f"finished benchmarks are kept in {evaluation.partial}: the same command with --overwrite "
            + (f"scores only {again} again" if again else "repeats the analysis only")
        )
    for model in [about.model for about in record.models.values() if about.heads][-1:]:
        words = shlex.join([model, "--evaluation", str(evaluation.folder)])
        say(f"next: moh-llm publish {words} --repo-id ORG/NAME --dry-run")
