"""``moh-llm tokenize MIXTURE --tokenizer MODEL --output FOLDER``: text to token shards, once."""

import argparse

from moh_llm.errors import UserError
from moh_llm.flags import as_path
from moh_llm.reading import expand_home
from moh_llm.terminal import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("mixture", metavar="MIXTURE", type=expand_home, help="YAML file, or 'embedded'")
    parser.add_argument("--tokenizer", required=True, type=expand_home, help="folder or Hub id of the model")
    parser.add_argument("--output", required=True, type=as_path, help="folder of the shards; resumes there")
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
    parser.add_argument(
        "--overwrite", action="store_true", help="tokenise again the sources that were made from something else"
    )


def run(args: argparse.Namespace) -> int:
    """Tokenise. Returns the exit status; raises `UserError` for bad input."""
    from moh_llm.data.mixture import load_mixture
    from moh_llm.data.tokenize import tokenize_mixture
    from moh_llm.data.tokenizer import TextTokenizer, rows_beside

    if args.workers is not None and args.workers < 1:
        raise UserError(f"--workers {args.workers} must be at least 1")
    executor_args = dict(_pair(argument) for argument in args.executor_args)
    mixture = load_mixture(args.mixture)
    tokenizer = TextTokenizer.load(args.tokenizer, rows_beside(args.tokenizer))
    say(mixture.describe())
    record = tokenize_mixture(
        mixture,
        tokenizer,
        args.output,
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


def _pair(argument: str) -> tuple[str, str]:
    name, sign, value = argument.partition("=")
    if not sign or not name:
        raise UserError(f"--executor-args {argument} must be KEY=VALUE")
    return name, value
