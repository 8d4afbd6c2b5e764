"""``moh-llm tokenize MIXTURE --tokenizer MODEL --output-dir FOLDER``: text to token shards, once."""

import argparse
from typing import Any

from moh_llm.errors import UserError
from moh_llm.flags import as_path
from moh_llm.reading import expand_home, parse_yaml
from moh_llm.terminal import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("mixture", metavar="MIXTURE", type=expand_home, help="YAML file, or 'embedded'")
    parser.add_argument("--tokenizer", required=True, type=expand_home, help="folder or Hub id of the model")
    parser.add_argument("--output-dir", required=True, type=as_path, help="folder of the shards; resumes there")
    parser.add_argument("--workers", type=int, help="processes at once (default: one per 4 cores)")
    parser.add_argument("--executor", choices=("local", "slurm", "ray"), default="local", help="where it runs")
    parser.add_argument(
        "--executor-args",
        nargs="+",
        metavar="KEY=VALUE",
        default=[],
        help="settings of datatrove's executor; slurm needs time=HH:MM:SS partition=NAME",
    )


def run(args: argparse.Namespace) -> None:
    """Tokenise. Raises `UserError` for bad input."""
    from moh_llm.data.mixture import load_mixture
    from moh_llm.data.tokenize import tokenize_mixture
    from moh_llm.data.tokenizer import TextTokenizer, rows_beside

    if args.workers is not None and args.workers < 1:
        raise UserError(f"--workers {args.workers} must be at least 1")
    executor_args = dict(_pair(argument) for argument in args.executor_args)
    mixture = load_mixture(args.mixture)
    tokenizer = TextTokenizer.load(args.tokenizer, rows_beside(args.tokenizer))
    record = tokenize_mixture(
        mixture, tokenizer, args.output_dir, workers=args.workers, executor=args.executor, executor_args=executor_args
    )
    if record is None:
        say(f"submitted to Slurm; the last job writes {args.output_dir}/mixture.json")
        return
    for name, source in record.sources.items():
        loss = "" if source.loss_tokens is None else f", loss on {source.loss_tokens:,} tokens"
        say(f"{name}: {source.tokens:,} tokens of {source.documents:,} documents{loss}")
    say(f"{args.output_dir}: {record.tokens:,} tokens")


def _pair(argument: str) -> tuple[str, Any]:
    name, sign, value = argument.partition("=")
    if not sign or not name:
        raise UserError(f"--executor-args {argument} must be KEY=VALUE")
    return name, parse_yaml(value, f"--executor-args {name}")
