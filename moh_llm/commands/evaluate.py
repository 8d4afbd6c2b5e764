"""`moh-llm evaluate`: score a model, and the base beside it, on a frozen suite of benchmarks."""

import argparse
import os
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.add_argument("model", metavar="MODEL", help="folder or Hub id of the model to score")
    parser.add_argument("--base", metavar="BASE", help="folder or Hub id of the base, scored in the same run")
    parser.add_argument("--suite", default="paper", help="paper, scratch, smoke, or a YAML file (default: paper)")
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
        "--batch-size", type=_batch_size, default=8, metavar="N", help='a number, or "auto" on a GPU (default: 8)'
    )
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=["auto", "float32", "bfloat16", "float16"],
        help="default: the checkpoint's own (auto)",
    )
    parser.add_argument("--device", help="torch device, such as cuda:1 or cpu (default: the GPU if there is one)")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("out/report"),
        metavar="DIR",
        help="where the report goes (default: out/report)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the output folder if it is not empty")


def run(args: argparse.Namespace) -> int:
    """Score, write the report, print its table. Returns 1 when a benchmark failed, else 0."""
    # lm-eval draws a bar for each task's prompts, 57 of them for MMLU; the bars over requests stay.
    os.environ.setdefault("TQDM_DISABLE", "1")
    from moh_llm.evaluation.models import check_model
    from moh_llm.evaluation.suite import load_suite
    from moh_llm.evaluation.tasks import check_data, require_lm_eval
    from moh_llm.files import check_output_folder, new_folder

    # What can be refused is refused before anything slow begins.
    suite = load_suite(args.suite)
    reads = [path for path in (args.model, args.base, args.data_dir) if path]
    check_output_folder(args.output, args.overwrite, reads)
    check_data(suite, args.data_dir)
    require_lm_eval()
    models = {"base": args.base, "model": args.model} if args.base else {"model": args.model}
    for model in models.values():
        check_model(model)

    from moh_llm.evaluation.report import build_report, write_report
    from moh_llm.evaluation.runner import score

    scores = score(models, suite, args.data_dir, args.limit, args.batch_size, args.dtype, args.device)
    report = build_report(suite, scores, args.limit, args.batch_size, args.data_dir, args.command_line)
    with new_folder(args.output, args.overwrite) as folder:
        write_report(folder, report)

    print((args.output / "report.md").read_text(encoding="utf-8"))
    print(f"report: {args.output / 'report.md'} and report.json")
    return 1 if report["errors"] else 0


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of 1 or more")
    return int(text)


def _batch_size(text: str) -> int | str:
    return text if text == "auto" else _positive(text)
