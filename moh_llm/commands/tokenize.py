"""``moh-llm tokenize MIXTURE --tokenizer MODEL --output FOLDER``: text to token shards, once."""

import argparse

from moh_llm.devices import check_workers
from moh_llm.errors import UserError, printable
from moh_llm.terminal import console, say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("mixture", metavar="MIXTURE", help="mixture file (data_mixtures/*.yaml), or 'embedded'")
    parser.add_argument("--tokenizer", required=True, help="folder or Hub id of the model (or tokenizer) to train")
    parser.add_argument("--output", required=True, help="folder of the shards; the same command resumes there")
    parser.add_argument("--workers", type=int, help="processes at once (default: one per 4 cores)")
    parser.add_argument("--executor", choices=("local", "slurm", "ray"), default="local", help="where it runs")
    parser.add_argument(
        "--executor-args",
        nargs="+",
        metavar="KEY=VALUE",
        default=[],
        help="settings of datatrove's executor; slurm needs time=HH:MM:SS partition=NAME",
    )
    parser.add_argument(
        "--on-bad-record",
        choices=("stop", "skip"),
        default="stop",
        help="a record (or the rest of a corrupt file) that cannot be read stops the run, or is left out and counted",
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would be done, with an estimate")
    parser.add_argument(
        "--overwrite", action="store_true", help="tokenise again the sources that were made from something else"
    )


def run(args: argparse.Namespace) -> int:
    """Tokenise. Returns the exit status; raises `UserError` for bad input."""
    from pathlib import Path

    from moh_llm.data.mixture import load_mixture
    from moh_llm.data.tokenizer import TextTokenizer, rows_beside

    if args.workers is not None and args.workers < 1:
        raise UserError(f"--workers {args.workers} must be at least 1")
    if args.workers is not None and args.executor == "local":
        check_workers(args.workers, "--workers")
    executor_args = dict(_pair(argument) for argument in args.executor_args)
    mixture = load_mixture(args.mixture)
    tokenizer = TextTokenizer.load(args.tokenizer, rows_beside(args.tokenizer))
    say(mixture.describe())
    if args.dry_run:
        _dry_run(mixture, tokenizer, Path(args.output).resolve(), args)
        return 0

    from moh_llm.data.tokenize import tokenize_mixture

    record = tokenize_mixture(
        mixture,
        tokenizer,
        Path(args.output),
        workers=args.workers,
        executor=args.executor,
        executor_args=executor_args,
        skip_bad=args.on_bad_record == "skip",
        overwrite=args.overwrite,
    )
    if record is None:
        say(f"submitted to Slurm; the last job writes {args.output}/mixture.json")
        return 0
    for name, source in record.sources.items():
        left_out = "".join(f", {count:,} {kind}" for kind in ("filtered", "bad") if (count := getattr(source, kind)))
        if (targets := source.loss_tokens) is not None:
            left_out = f", loss on {targets:,} tokens{left_out}"
        say(
            f"{name}: {source.tokens:,} tokens of {source.documents:,} documents, "
            f"{source.tokens_per_byte:.3f} tokens per byte{left_out}"
        )
        for example in source.bad_examples:
            say(f"  left out: {example}")
    say(f"{args.output}: {record.tokens:,} tokens in {record.seconds:.1f} s")
    return 0


def _dry_run(mixture, tokenizer, output, args: argparse.Namespace) -> None:
    from rich.table import Table

    from moh_llm.data.sample import estimate_tokens
    from moh_llm.data.tasks import is_done, make_tasks, prepare_sources
    from moh_llm.data.tokenize import count_workers

    tasks = make_tasks(mixture, output)
    prepare_sources(tasks, tokenizer, mixture.validation_share, args.overwrite, write=False)
    table = Table("source", box=None)
    for header in ("files", "MB", "tasks", "done", "tokens (estimate)"):
        table.add_column(header, justify="right")
    total = 0
    for source in mixture.sources:
        own = [task for task in tasks if task.source.name == source.name]
        estimate = estimate_tokens(source, [file for task in own for file in task.files], tokenizer)
        sizes = [task.bytes for task in own]
        size = "?" if None in sizes else f"{sum(s or 0 for s in sizes) / 1e6:,.1f}"
        done = sum(is_done(task) for task in own)
        tokens = "unknown" if estimate is None else f"{estimate:,}"
        table.add_row(
            printable(source.name), str(sum(len(t.files) for t in own)), size, str(len(own)), str(done), tokens
        )
        total += estimate or 0
    console().print(table)
    left = [task for task in tasks if not is_done(task)]
    workers = count_workers(left, args.workers, args.executor, {})[0] if left else 0
    say(
        f"would tokenise {len(left)} of {len(tasks)} tasks into {args.output} with {tokenizer.name} "
        f"({tokenizer.dtype.name}), executor {args.executor}",
        f"about {total:,} tokens, {total * tokenizer.dtype.itemsize / 1e6:,.0f} MB"
        + (f", {workers} at once" if workers > 0 else ""),
    )


def _pair(argument: str) -> tuple[str, str]:
    name, sign, value = argument.partition("=")
    if not sign or not name:
        raise UserError(f"--executor-args {argument} must be KEY=VALUE")
    return name, value
