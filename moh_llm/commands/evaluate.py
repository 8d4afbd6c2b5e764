"""`moh-llm evaluate`: score models, and the base beside them, on a frozen suite of benchmarks.

Then it looks at what the heads of MoH models did on the benchmarks' text. Under `accelerate launch` or
torchrun the items are shared out over the processes. What an interrupted run had scored lies in
OUTPUT.partial; the same command takes it up.
"""

import argparse
import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moh_llm.evaluation.kept import Kept
    from moh_llm.evaluation.processes import Team
    from moh_llm.evaluation.suite import Suite
    from moh_llm.reporting.runs import TrainingRun


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.add_argument("model", metavar="MODEL", nargs="+", help="folders or Hub ids of the models to score")
    parser.add_argument("--base", metavar="BASE", help="folder or Hub id of the base, scored in the same run")
    parser.add_argument(
        "--suite",
        default="paper",
        help="paper, paper_stage1, scratch, smoke, or a YAML file (default: paper)",
    )
    parser.add_argument(
        "--data-dir",
        type=Path,
        metavar="DIR",
        help="local data, <dataset, / as __>/<config>/<split>.jsonl (default: the Hub)",
    )
    parser.add_argument(
        "--limit", type=_positive, metavar="N", help="score only N items of each task, to try things out"
    )
    parser.add_argument(
        "--batch-size",
        type=_batch_size,
        default=8,
        metavar="N",
        help='sequences in a pass, on each process; "auto" picks it for each benchmark from its longest prompt and '
        "the free memory (default: 8)",
    )
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=["auto", "float32", "bfloat16", "float16"],
        help="dtype that every model is run in (default: auto, the widest dtype that one of them is stored in, so that "
        "no model's weights are rounded; a bfloat16 base beside a float32 model takes twice the memory)",
    )
    parser.add_argument("--device", help="torch device, such as cuda:1 or cpu (default: the GPU if there is one)")
    parser.add_argument(
        "--share-prefixes",
        action="store_true",
        help="compute what prompts begin with in common, such as the examples of MMLU, once and not for every prompt; "
        "scores may differ by rounding: in float32 they are equal in practice, in bfloat16 close choices may flip",
    )
    parser.add_argument(
        "--log-samples",
        action="store_true",
        help="write every item's prompt, responses and score to samples/MODEL/BENCHMARK.jsonl in the output",
    )
    parser.add_argument(
        "--no-analysis",
        dest="analysis",
        action="store_false",
        help="scores only: leave out what the heads did on the benchmarks' text",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("out/report"),
        metavar="DIR",
        help="where the report goes (default: out/report)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the output folder if it is not empty")


def run(args: argparse.Namespace) -> int:
    """Score, analyse, write the report, print its table. Returns 1 when a benchmark failed, else 0."""
    # lm-eval draws a bar for each task's prompts, 57 of them for MMLU; the bars over requests stay.
    os.environ.setdefault("TQDM_DISABLE", "1")
    from moh_llm.evaluation.models import check_batch_size, check_model, label_models
    from moh_llm.evaluation.suite import load_suite
    from moh_llm.evaluation.tasks import check_data, require_lm_eval
    from moh_llm.files import check_output_folder
    from moh_llm.reporting.libraries import require_matplotlib

    # What can be refused is refused before anything slow begins.
    suite = load_suite(args.suite)
    models = label_models(args.model, args.base)
    check_output_folder(args.output, args.overwrite, [path for path in (*models.values(), args.data_dir) if path])
    check_data(suite, args.data_dir)
    require_lm_eval()
    require_matplotlib()
    for model in models.values():
        check_model(model)
        if args.batch_size != "auto":
            check_batch_size(model, args.batch_size)

    from moh_llm.evaluation import processes
    from moh_llm.locking import lock_folder

    team = processes.join()
    with contextlib.ExitStack() as held:
        held.callback(processes.leave)
        team.share(lambda: held.enter_context(lock_folder(args.output)))
        # Whoever held it until now may have made the folder.
        team.share(lambda: check_output_folder(args.output, args.overwrite))
        return _score(args, suite, models, team)


def _score(args: argparse.Namespace, suite: "Suite", models: dict[str, str], team: "Team") -> int:
    from moh_llm.evaluation import processes
    from moh_llm.evaluation.analysis import analyse_models
    from moh_llm.evaluation.kept import Kept
    from moh_llm.evaluation.precision import choose_dtype
    from moh_llm.evaluation.report import build_report
    from moh_llm.evaluation.runner import score

    kept = Kept.beside(args.output)
    try:
        dtype = team.share(lambda: choose_dtype(models, args.dtype)).dtype
        scores = score(
            models,
            suite,
            args.data_dir,
            args.limit,
            args.batch_size,
            args.dtype,
            args.device,
            kept=kept,
            log_samples=args.log_samples,
            share_prefixes=args.share_prefixes,
        )
        # The first process alone; the others wait, for a launcher ends all of them when one ends with an error.
        analysis = team.share(
            lambda: analyse_models(models, suite, args.data_dir, args.device, dtype, _say) if args.analysis else {}
        )
    finally:
        processes.leave()
    report = build_report(
        suite, scores, args.limit, args.batch_size, args.data_dir, args.command_line, team.size, args.share_prefixes
    )
    report["analysis"] = analysis
    if team.rank == 0:
        _write(args, report, kept)
    return 1 if report["errors"] else 0


def _write(args: argparse.Namespace, report: dict[str, Any], kept: "Kept") -> None:
    """Write the report and print its page. What was kept goes, unless a benchmark or an analysis failed."""
    from moh_llm.evaluation.report import add_samples
    from moh_llm.files import new_folder
    from moh_llm.reporting.report import write_report

    runs = _runs_behind(report)
    with new_folder(args.output, args.overwrite) as folder:
        if args.log_samples:
            add_samples(folder, report, kept)
        write_report(folder, runs, args.command_line, report)
    print((args.output / "report.md").read_text(encoding="utf-8"))
    print(f"report: {args.output / 'report.html'}, report.md and report.json")
    failed = {label: record["error"] for label, record in report["analysis"].items() if "error" in record}
    for label, error in failed.items():
        print(f"the analysis of {label} failed, its scores stand: {error}")
    if not report["errors"] and not failed:
        kept.remove()
    elif kept.folder.is_dir():
        again = ", ".join(dict.fromkeys(error["benchmark"] for error in report["errors"]))
        print(
            f"what was scored is kept in {kept.folder}: the same command with --overwrite "
            + (f"scores only {again} again" if again else "repeats the analysis only")
        )


def _runs_behind(report: dict[str, Any]) -> "list[TrainingRun]":
    """The training runs that made the models; one that cannot be read is named and left out."""
    from moh_llm.reporting.evaluations import models_of, runs_behind
    from moh_llm.reporting.runs import read_runs

    return read_runs([], runs_behind(models_of(report)), _say)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of 1 or more")
    return int(text)


def _batch_size(text: str) -> int | str:
    return text if text == "auto" else _positive(text)
